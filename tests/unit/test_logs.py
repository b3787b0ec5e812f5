from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from indexer.logs import set_up_logs


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level
    logging.captureWarnings(False)
    structlog.reset_defaults()


def test_lines_are_json_outside_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs()
    structlog.get_logger().info("gap_found", worker_id="w", gap_first=3)
    logging.getLogger("library").warning("beware of %s", "it")
    own, foreign = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (own["event"], own["level"], own["worker_id"], own["gap_first"]) == ("gap_found", "info", "w", 3)
    assert (foreign["event"], foreign["level"]) == ("beware of it", "warning")
    assert own["timestamp"].endswith("Z")


def test_an_exception_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs()
    try:
        raise ValueError("broken")
    except ValueError as error:
        structlog.get_logger().error("task_died", exc_info=error)
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_levels_below_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("error")
    structlog.get_logger().warning("flush_failed")
    logging.getLogger("library").warning("beware")
    assert capsys.readouterr().err == ""


def test_people_may_read_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs(log_format="console")
    structlog.get_logger().info("gap_found", worker_id="w")
    text = capsys.readouterr().err
    assert "gap_found" in text
    assert not text.startswith("{")
