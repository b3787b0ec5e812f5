"""Log lines: an event word in the past tense plus fields; JSON outside a terminal. On standard error, never a token."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

_THIRD_PARTY_LEVEL = logging.WARNING


def set_up_logs(level: str = "info", log_format: str = "auto") -> None:
    """`log_format`: auto, json or console. Lines of third-party libraries take the same form, from warning on."""
    is_console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer: Any = structlog.dev.ConsoleRenderer() if is_console else structlog.processors.JSONRenderer()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if not is_console:
        shared.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    _set_up_standard_logging(shared, renderer, level)


def _set_up_standard_logging(shared: list[Any], renderer: Any, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(_THIRD_PARTY_LEVEL, logging.getLevelName(level.upper())))
    logging.captureWarnings(True)
