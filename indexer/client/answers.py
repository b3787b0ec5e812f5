"""What a client answers: hits, or no signal and why. Fields that a newer service adds are passed over."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class Reason(StrEnum):
    """Why there is no signal: a closed set, fit for a label of a metric."""

    DEADLINE = "deadline"  # no answer in time
    UNREACHABLE = "unreachable"  # no connection, or it broke
    REFUSED = "refused"  # answered with an error; `code` says which
    NOT_READY = "not_ready"  # 503: recovering, overloaded or stopping; `code` says which
    MALFORMED = "malformed_answer"  # not what this service answers
    COOLING_DOWN = "cooling_down"  # nobody was asked: all endpoints have failed shortly before


class Failure(msgspec.Struct, frozen=True):
    """`message`: a sentence for people. `endpoint`: the one asked last. `status`: of its answer, 0 without one.

    `code`, `field`: of the service's error (docs/api.md), empty if it sent none.
    """

    reason: Reason
    message: str
    endpoint: str = ""
    status: int = 0
    code: str = ""
    field: str = ""


class Span(msgspec.Struct, frozen=True):
    """Part of a prefix, from token `start` to before `end`, the fastest tier it is held on, and by whom."""

    start: int
    end: int
    tier: str
    worker_id: str


class GroupReach(msgspec.Struct, frozen=True):
    """Of one KV-cache group, the longest prefix after which it alone would let the engine go on."""

    group: int
    kind: str
    window: int | None
    block_tokens: int
    held_tokens: int


class Hit(msgspec.Struct, frozen=True):
    """What one publisher holds of the prompt, in tokens. `coverage` says how far to trust it (docs/api.md).

    `spans`, `tier_tokens`, `groups`: only if `detail` asked for them. `expected_tokens`: how many more it would skip
    with the blocks of prompts that routers sent there; counted in `hit_tokens` if `expected` asked for that.
    """

    worker_id: str
    dp_rank: int
    hit_tokens: int
    resident_tokens: int
    tiers: Mapping[str, int] = {}
    coverage: str = ""
    coverage_reason: str = ""
    coverage_at: float | None = None
    sequence_number: int | None = None
    pools: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    tier_tokens: Mapping[str, int] = {}
    groups: tuple[GroupReach, ...] = ()
    expected_tokens: int = 0


class QueryWarning(msgspec.Struct, frozen=True):
    code: str
    message: str


class PrefixHits(msgspec.Struct, frozen=True):
    """Hits, best first; none at all, and `failure`, if there is no signal."""

    prompt_tokens: int
    hits: tuple[Hit, ...]
    warnings: tuple[QueryWarning, ...] = ()
    failure: Failure | None = None

    @property
    def is_signal(self) -> bool:
        """False: nothing is known, which is not the same as no hits."""
        return self.failure is None

    @property
    def reason(self) -> Reason | None:
        return None if self.failure is None else self.failure.reason

    def scores(self) -> dict[str, int]:
        """`hit_tokens` by worker, of its best rank. Workers without a hit are left out."""
        scores: dict[str, int] = {}
        for hit in self.hits:
            scores[hit.worker_id] = max(hit.hit_tokens, scores.get(hit.worker_id, hit.hit_tokens))
        return scores


class Outcome(msgspec.Struct, frozen=True):
    """Of every other call: whether it was done, and the answer's bytes."""

    status: int = 0
    body: bytes = b""
    failure: Failure | None = None

    @property
    def is_done(self) -> bool:
        return self.failure is None

    @property
    def reason(self) -> Reason | None:
        return None if self.failure is None else self.failure.reason


class Counts(msgspec.Struct, frozen=True):
    """Of all calls so far: answered; without a signal; and failures that another endpoint made good."""

    answered: int
    no_signal: Mapping[Reason, int]
    failed_over: Mapping[Reason, int]


class _ErrorDetail(msgspec.Struct):
    code: str
    message: str
    field: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorDetail


class _Ready(msgspec.Struct):
    missing: list[str]


_read_error = msgspec.json.Decoder(_ErrorAnswer).decode
_read_ready = msgspec.json.Decoder(_Ready).decode
read_prefix_hits = msgspec.msgpack.Decoder(PrefixHits).decode


def failure_of(status: int, body: bytes, endpoint: str) -> Failure | None:
    """None for an answer that says that it was done. Never raises, whatever the body is."""
    if status in (200, 201):
        return None
    if not 400 <= status < 600:
        message = f"{endpoint} answered with status {status}, which the service never does"
        return Failure(Reason.MALFORMED, message, endpoint, status)
    reason = Reason.NOT_READY if status == 503 else Reason.REFUSED
    code, text, field = _error(body)
    return Failure(reason, f"{endpoint} answered {status}: {text}", endpoint, status, code, field)


def _error(body: bytes) -> tuple[str, str, str]:
    """Code, message and field of an error's body."""
    try:
        error = _read_error(body).error
    except (ValueError, RecursionError):
        return "", _missing(body), ""
    return error.code, error.message, error.field or ""


def _missing(body: bytes) -> str:
    try:
        return "; ".join(_read_ready(body).missing)
    except (ValueError, RecursionError):
        return body[:200].decode(errors="replace")
