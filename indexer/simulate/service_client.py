"""The few HTTP calls a fleet makes to the service, with nothing but the standard library."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple
from urllib.parse import quote

from indexer.credentials import NO_CREDENTIALS, Credentials
from indexer.simulate.cache import Prompt
from indexer.simulate.engine import SimulatedEngine


class ServiceUnreachable(Exception):
    """The service did not answer, or not with what was expected."""


class PublisherState(NamedTuple):
    """What the service says of one publisher."""

    sequence_number: int | None
    coverage: str


class ServiceClient:
    """Calls one service. Each call takes at most `timeout_s` and runs in a thread of its own."""

    def __init__(self, url: str, timeout_s: float = 3.0, credentials: Credentials = NO_CREDENTIALS) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json", **credentials.headers}
        self._opener = credentials.opener()

    async def register(self, engine: SimulatedEngine, model: str) -> None:
        """Register an engine; one registered with other values (an earlier fleet's) is replaced."""
        body = {
            "worker_id": engine.worker_id,
            "dp_rank": 0,
            "model": model,
            "endpoint": engine.endpoint,
            "replay_endpoint": engine.replay_endpoint,
            "engine": engine.flavour.engine,
        }
        status, answer = await self._call("POST", "/v1/publishers", body)
        if status == 409:
            await self.unregister(engine.worker_id)
            status, answer = await self._call("POST", "/v1/publishers", body)
        if status not in (200, 201):
            raise ServiceUnreachable(f"{self.url} did not register {engine.worker_id}: {status} {answer}")

    async def unregister(self, worker_id: str) -> None:
        await self._call("DELETE", f"/v1/publishers/{quote(worker_id, safe='')}?dp_rank=0")

    async def publishers(self) -> dict[str, PublisherState]:
        """State by worker id, of rank 0."""
        answer = await self._expect("GET", "/v1/publishers")
        return {
            entry["worker_id"]: PublisherState(entry["sequence_number"], str(entry["coverage"]))
            for entry in answer["publishers"]
            if entry["dp_rank"] == 0
        }

    async def hit_tokens(self, model: str, prompt: Prompt) -> dict[str, int]:
        """Answers by worker id; workers with no hit are left out."""
        answer = await self._expect("POST", "/v1/prefix-hits", _query(model, prompt))
        return {hit["worker_id"]: hit["hit_tokens"] for hit in answer["hits"]}

    async def _expect(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        status, answer = await self._call(method, path, body)
        if status != 200:
            raise ServiceUnreachable(f"{method} {self.url}{path} answered {status}: {answer}")
        return answer

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        return await asyncio.to_thread(self._call_blocking, method, path, body)

    def _call_blocking(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers=self._headers,
        )
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                return response.status, _json_or_none(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _json_or_none(error.read())
        except (OSError, ValueError) as error:
            raise ServiceUnreachable(f"{self.url} is not reachable: {error}") from error


def _query(model: str, prompt: Prompt) -> dict[str, Any]:
    return {
        "model": model,
        "token_ids": list(prompt.token_ids),
        "lora_name": prompt.lora_name,
        "cache_salt": prompt.cache_salt,
        "multimodal": [image._asdict() for image in prompt.images],
    }


def _json_or_none(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
