"""Recorded streams, played by engines that a real service follows over real sockets.

For every worker of a capture there is an engine: a PUB socket (XPUB, to see subscriptions) and a replay endpoint whose
buffer holds everything sent since the engine's start. The same records are played into an index of our own at the same
time: that is the uninterrupted run, whose answers and statistics the service must give as well. Between engines and
service there may be a bad network (`tests.lossy_proxy`).
"""

from __future__ import annotations

import base64
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from tests.conformance.player import Player, Record, Verdict
from tests.e2e.service_process import ServiceProcess, wait_for
from tests.lossy_proxy import Faults, LossyProxy

SUBSCRIBED_WITHIN_MS = 15_000
REBOUND_WITHIN_S = 10.0
END_OF_REPLAY = b"\xff" * 8


class RecordedEngine:
    """One engine process: its sockets, and what it has sent since it started."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], topic: str) -> None:
        self.sent: list[tuple[bytes, bytes]] = []
        self._context = context
        self._topic = topic.encode()
        self._ports = [0, 0]
        self._open()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._ports[0]}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._ports[1]}"

    @property
    def last_number(self) -> int | None:
        """Of what it has sent; None = nothing."""
        return int.from_bytes(self.sent[-1][0], "big") if self.sent else None

    def send(self, sequence: bytes, payload: bytes) -> None:
        self.sent.append((sequence, payload))
        self._publisher.send_multipart([self._topic, sequence, payload])

    def restart(self) -> None:
        """A new process on the same ports, with nothing sent yet."""
        self.close()
        self._open()

    def wait_for_subscription(self) -> None:
        while True:
            assert self._publisher.poll(SUBSCRIBED_WITHIN_MS), f"nobody subscribed to {self.endpoint}"
            if self._publisher.recv()[:1] == b"\x01":
                return

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        self._publisher.close(linger=0)
        self._replay.close(linger=0)

    def _open(self) -> None:
        self.sent = []
        self._publisher = self._bound(zmq.XPUB, 0)
        self._replay = self._bound(zmq.ROUTER, 1)
        self._is_open = True
        self._thread = threading.Thread(target=self._serve_replay, daemon=True)
        self._thread.start()

    def _bound(self, kind: int, place: int) -> zmq.Socket[bytes]:
        """A port that was just closed may take a moment to be free again."""
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        deadline = time.monotonic() + REBOUND_WITHIN_S
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{self._ports[place] or '*'}")
                break
            except zmq.ZMQError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        self._ports[place] = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return socket

    def _serve_replay(self) -> None:
        while self._is_open:
            if not self._replay.poll(20):
                continue
            client, _, start = self._replay.recv_multipart()
            with suppress(zmq.ZMQError):  # the client is gone
                for sequence, payload in list(self.sent):
                    if sequence >= start:
                        self._replay.send_multipart([client, b"", self._topic, sequence, payload])
                self._replay.send_multipart([client, b"", b"", END_OF_REPLAY, b""])


class RecordedFleet:
    """The engines of one capture. `model` tells its publishers from those of other captures.

    While the service is away (`service` None), engines go on and probes are passed over. An engine that restarts takes
    its replay buffer with it, so the fleet pauses before it would lose what the service may not have written. Comparing
    with what the engines themselves answered gives `verdict`; comparing with the uninterrupted run fails at once. Every
    `ask_every`-th probe is asked.

    With `faults`, an engine whose newest messages are lost is not compared until a later one shows that: nobody can
    know before. `cut_links` ends such a state.
    """

    def __init__(
        self, path: Path, model: str, *, with_replay: bool, ask_every: int = 1, faults: Faults | None = None
    ) -> None:
        self.model = model
        self.verdict = Verdict()
        self.may_be_unproven = False  # a replica that came later and has no replay endpoint
        self.probes = 0
        self._ask_every = ask_every
        self._probes_seen = 0
        self._whole = Player(path)
        self._records = list(self._whole.records())
        self._place = 0
        self._with_replay = with_replay
        self._context = zmq.Context()
        self._engines = {worker: RecordedEngine(self._context, f"kv@{worker}") for worker in self._whole.publishers}
        self.links = {worker: self._link(engine, faults) for worker, engine in self._engines.items() if faults}
        self._ended_unknown: set[str] = set()  # workers that restarted when their newest messages were lost
        self._reached: dict[str, int | None] = {}  # worker -> the last batch that the service was seen to have
        self._unapplied: set[str] = set()
        self._written: dict[str, int] = {}  # worker -> batches of this run of the engine
        self._generation_before: dict[str, int] = {}

    def __len__(self) -> int:
        """Records not played yet."""
        return len(self._records) - self._place

    def __enter__(self) -> RecordedFleet:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in (*self.links.values(), *self._engines.values()):
            opened.close()
        self._context.term()

    def _link(self, engine: RecordedEngine, faults: Faults) -> LossyProxy:
        link = LossyProxy(self._context, engine.endpoint, engine.replay_endpoint, faults)
        engine.wait_for_subscription()
        return link

    def register(self, service: ServiceProcess) -> None:
        for worker, engine in self._engines.items():
            near = self.links.get(worker, engine)
            registration = self._whole.publishers[worker].registration
            body = {
                "worker_id": self._id(worker),
                "model": self.model,
                "engine": registration.engine,
                "options": dict(registration.options),
                "endpoint": near.endpoint,
                "replay_endpoint": near.replay_endpoint if self._with_replay else None,
            }
            assert service.call("POST", "/v1/publishers", body)[0] == 201
            near.wait_for_subscription()

    def unregister(self, service: ServiceProcess) -> None:
        for worker in self._engines:
            assert service.call("DELETE", f"/v1/publishers/{self._id(worker)}") == (200, {"removed": 1})

    def play(self, service: ServiceProcess | None) -> None:
        """To the end."""
        while len(self):
            self.play_one(service)

    def play_one(self, service: ServiceProcess | None) -> None:
        """The next record."""
        record = self._records[self._place]
        if service is None and not self._may_go_on(record):
            return
        self._place += 1
        if record["type"] == "frame":
            worker = record["worker"]
            self._engines[worker].send(base64.b64decode(record["seq_b64"]), base64.b64decode(record["payload_b64"]))
            self._unapplied.add(worker)
        elif record["type"] == "note" and record["op"] == "restart":
            self._restart(record["worker"], service)
        self._whole.play_one(record)
        if record["type"] == "probe":
            self._probes_seen += 1
            if service and self._probes_seen % self._ask_every == 0:
                self._probe(record, service)

    def is_applied(self, worker: str, service: ServiceProcess) -> bool:
        """Whether the service has all that came through from this engine, and knows of its restart."""
        state = self.state(worker, service)
        before = self._generation_before.get(worker)
        if before is not None and (state is None or state["generation"] <= before):
            return False
        if state is None or state["coverage"] != "complete":
            return False
        reached = self._reached[worker] = state["sequence_number"]
        if worker in self.links:
            last_passed = self.links[worker].last_passed
            return last_passed is None or (reached is not None and reached >= last_passed)
        return bool(reached == self._engines[worker].last_number)

    def state(self, worker: str, service: ServiceProcess) -> Any:
        """What the service says of this publisher."""
        return service.call("GET", f"/v1/publishers/{self._id(worker)}")[1]

    def stream_counts(self, service: ServiceProcess) -> Counter[str]:
        """What the service's followers have counted, over all workers, with what is lost for good."""
        counts: Counter[str] = Counter()
        for worker in self._engines:
            of_one = self.state(worker, service)["counts"]
            counts.update(of_one["stream"], gaps_lost=of_one["gaps"], batches_lost=of_one["missing_batches"])
        return counts

    def cut_links(self, service: ServiceProcess) -> None:
        """Every connection is lost and made again, so the service asks for what it does not know that it missed."""
        for worker, link in self.links.items():
            connections = self.state(worker, service)["counts"]["stream"].get("connections", 0)
            link.cut()
            link.wait_for_subscription()
            wait_for(
                lambda worker=worker, before=connections: self._has_caught_up(worker, before, service),
                f"{self._id(worker)} has caught up",
            )

    def _has_caught_up(self, worker: str, connections_before: int, service: ServiceProcess) -> bool:
        state = self.state(worker, service)
        if state is None or state["counts"]["stream"].get("connections", 0) <= connections_before:
            return False
        self._reached[worker] = state["sequence_number"]
        return (
            state["coverage"] == "complete"
            or (self.may_be_unproven and state["coverage_reason"] == "continuity_unproven")
        ) and self._is_level(worker)

    def _is_level(self, worker: str) -> bool:
        """Whether the service has all that this engine sent, also of what was lost on the way."""
        return worker not in self.links or self._reached.get(worker) == self._engines[worker].last_number

    def wait_until_applied(self, service: ServiceProcess) -> None:
        for worker, link in self.links.items():
            link.wait_until_handled(len(self._engines[worker].sent))
        for worker in sorted(self._unapplied):
            wait_for(lambda worker=worker: self.is_applied(worker, service), f"{self._id(worker)} is applied")
            self._generation_before.pop(worker, None)
        self._unapplied.clear()

    def wait_until_written(self, service: ServiceProcess) -> None:
        """From here on no kill of the service loses any of this."""
        self.wait_until_applied(service)
        wait_for(lambda: service.call("GET", "/v1/audit")[0] == 200, "everything is written")
        self._written = {worker: len(engine.sent) for worker, engine in self._engines.items()}

    def service_died(self) -> None:
        """What it knew of restarts may be lost with it. The next one asks every engine before it is ready."""
        self._generation_before.clear()
        self._unapplied.update(worker for worker, engine in self._engines.items() if engine.sent)

    def check_stats(self, service: ServiceProcess) -> None:
        """The service holds what the uninterrupted run holds.

        Publishers also learn hashes from each other. Whether that comes before or after a removal depends on the turns
        in which they are followed, so the number of ghosts may differ by as many. What an engine's last messages before
        its end would have made ghosts of is never known if those were lost.
        """
        for worker in self._whole.restarted:
            if self._with_replay:
                self._whole.publishers[worker].restart()  # the service saw it at once, not with the first batch
        self.wait_until_applied(service)
        (expected,) = self._whole.index.stats()["models"]  # type: ignore[misc]
        models = service.call("GET", "/v1/stats")[1]["models"]
        found = next(model for model in models if model["model"] == self.model)
        for entry, of_whole in zip(found["publishers"], expected["publishers"], strict=True):
            worker = entry["worker_id"] = entry["worker_id"].removeprefix(f"{self.model}-")
            counters = self._whole.publishers[worker].status().counters
            may_differ = counters.get("parents_from_other_publishers", 0)
            if worker in self._ended_unknown or abs(entry["ghosts"] - of_whole["ghosts"]) <= may_differ:
                entry["ghosts"] = of_whole["ghosts"]
        expected = {**expected, "model": self.model}
        assert found == expected, f"{found} is not {expected}"

    def _may_go_on(self, record: Record) -> bool:
        if record["type"] != "note" or record["op"] != "restart":
            return True
        worker = record["worker"]
        return len(self._engines[worker].sent) == self._written.get(worker, 0)

    def _restart(self, worker: str, service: ServiceProcess | None) -> None:
        engine = self._engines[worker]
        if service:
            self.wait_until_written(service)
            if engine.sent:
                self._generation_before[worker] = self.state(worker, service)["generation"]
            if not self._is_level(worker):
                self._ended_unknown.add(worker)
        engine.restart()
        if worker in self.links:
            self.links[worker].engine_restarted()
            engine.wait_for_subscription()
            self.links[worker].wait_for_subscription()
        self._written[worker] = 0
        self._unapplied.discard(worker)
        if service and not self._with_replay:
            engine.wait_for_subscription()

    def _probe(self, record: Record, service: ServiceProcess) -> None:
        self.wait_until_applied(service)
        body = {
            "model": self.model,
            "token_ids": record["tokens"],
            "lora_name": record.get("lora_name"),
            "cache_salt": record.get("cache_salt"),
            "multimodal": [
                {"identifier": m["id"], "offset": m["offset"], "length": m["length"]} for m in record.get("mm") or []
            ],
        }
        status, answer = service.call("POST", "/v1/prefix-hits", body)
        assert status == 200, answer
        hits = {hit["worker_id"]: hit["hit_tokens"] for hit in answer["hits"]}
        whole = self._whole.answers(record)
        self.probes += 1
        for worker in filter(self._is_level, whole.keys() - self._whole.restarted):
            got = hits.get(self._id(worker), 0)
            what = f"{self.model}, record {self._place - 1}, {worker}"
            assert got == whole[worker], f"{what}: answered {got}, uninterrupted {whole[worker]}"
            if worker in record["expected_hit_tokens"]:
                self.verdict.count(got, record["expected_hit_tokens"][worker], what)

    def _id(self, worker: str) -> str:
        return f"{self.model}-{worker}"


def audit(service: ServiceProcess) -> dict[str, Any]:
    """Compares rows and memory; fails if they differ."""
    status, report = service.call("GET", "/v1/audit")
    assert (status, report["is_equal"]) == (200, True), report
    return dict(report)
