from __future__ import annotations

import asyncio

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from indexer.collector import IndexCollector
from indexer.index.content_index import ContentIndex
from indexer.index.predictions import PredictionLimits, Predictions
from indexer.registration import Registration
from indexer.wire.decode import decode_batch
from tests.unit.api.stand_ins import StandInRegistry


def registered(registry: StandInRegistry, worker_id: str) -> None:
    registration = Registration(worker_id, 0, "m", "tcp://127.0.0.1:1")
    followed, _ = asyncio.run(registry.register(registration))
    event = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": list(range(16)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    elsewhere = {**event, "medium": "SOMETHING NEW"}
    payload = msgspec.msgpack.encode([1.0, [event, elsewhere, {"type": "Nonsense"}], 0])
    followed.index.apply(decode_batch(payload), 0, 1)
    followed.index.count_gap(1, 3)
    followed.index.apply(decode_batch(msgspec.msgpack.encode([1.0, [event], 0])), 4, 1)
    followed.counters["batches_received"] = 1


def text_of(collector: IndexCollector) -> str:
    asyncio.run(collector.refresh())
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry).decode()


def test_sums_over_publishers_by_closed_labels() -> None:
    registry = StandInRegistry(ContentIndex())
    registered(registry, "a")
    registered(registry, "b")
    text = text_of(IndexCollector(registry, 10))
    for line in (
        'indexer_publishers{state="connected"} 2.0',
        'indexer_coverage{coverage="degraded"} 2.0',
        'indexer_coverage_reasons{reason="gap"} 2.0',
        'indexer_residencies{tier="GPU"} 2.0',
        "indexer_unverified 2.0",
        "indexer_batches_applied_total 4.0",
        "indexer_missing_batches_total 6.0",
        'indexer_stream_outcomes_total{name="batches_received"} 2.0',
        'indexer_publisher_residencies{dp_rank="0",worker_id="a"} 1.0',
    ):
        assert line in text
    assert "SOMETHING" not in text
    assert "indexer_bad_events_total{" in text


def test_counters_stay_when_a_publisher_leaves_and_comes_back() -> None:
    registry = StandInRegistry(ContentIndex())
    collector = IndexCollector(registry, 10)
    registered(registry, "a")
    assert "indexer_gaps_total 1.0" in text_of(collector)
    assert "indexer_gaps_total 1.0" in text_of(collector)
    asyncio.run(registry.unregister("a", None))
    assert "indexer_gaps_total 1.0" in text_of(collector)
    registered(registry, "a")
    assert "indexer_gaps_total 2.0" in text_of(collector)


def test_single_publishers_show_only_while_they_are_few() -> None:
    registry = StandInRegistry(ContentIndex())
    collector = IndexCollector(registry, 1)
    registered(registry, "a")
    assert 'worker_id="a"' in text_of(collector)
    registered(registry, "b")
    assert "worker_id" not in text_of(collector)


def test_predictions_show_as_sums_and_per_publisher() -> None:
    registry = StandInRegistry(ContentIndex())
    registered(registry, "a")
    followed = registry.find("a", 0)
    assert followed is not None
    followed.index.predictions = Predictions(PredictionLimits(10, 2, 0.2))
    for cached in (32, 48, 16, 16):
        followed.index.predictions.note(32, cached, None, 1.0)
    collector = IndexCollector(registry, 1)
    text = text_of(collector)
    for line in (
        'indexer_predictions_total{outcome="too_low"} 1.0',
        'indexer_predictions_total{outcome="exact"} 1.0',
        'indexer_predictions_total{outcome="too_high"} 2.0',
        "indexer_prediction_alarms 1.0",
        'indexer_publisher_prediction_alarm{dp_rank="0",worker_id="a"} 1.0',
        'indexer_publisher_prediction_error_tokens_bucket{dp_rank="0",le="-1.0",worker_id="a"} 1.0',
        'indexer_publisher_prediction_error_tokens_bucket{dp_rank="0",le="0.0",worker_id="a"} 2.0',
        'indexer_publisher_prediction_error_tokens_bucket{dp_rank="0",le="+Inf",worker_id="a"} 4.0',
    ):
        assert line in text
    registered(registry, "b")
    text = text_of(collector)
    assert 'worker_id="a"' not in text
