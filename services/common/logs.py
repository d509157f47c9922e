"""Structured logs: one JSON object per line on standard error, or a short line on a terminal."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_ROOT = "triptych"


class _JsonFormatter(logging.Formatter):
    def __init__(self, role: str, name: str) -> None:
        super().__init__()
        self._fixed = {"role": role, "process": name}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._fixed,
            "event": record.getMessage(),
            **record.__dict__.get("fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class _TextFormatter(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={value}" for key, value in record.__dict__.get("fields", {}).items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {self._name:<7} {record.levelname.lower():<7} {record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(role: str, name: str, level: str, style: str) -> None:
    """Sets the process's logging up once. `level` is a logging level name, `style` is "json" or "text"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(role, name) if style == "json" else _TextFormatter(name))
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    logging.basicConfig(handlers=[handler], level=logging.WARNING)  # what libraries say


class Log:
    """A logger whose events carry fields: `log.info("request finished", request_id=…, tokens=…)`."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{_ROOT}.{name}")

    def debug(self, event: str, **fields: object) -> None:
        """For a developer who looks for a fault."""
        if self._logger.isEnabledFor(logging.DEBUG):
            self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, **fields: object) -> None:
        """What happened."""
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: object) -> None:
        """What somebody should look at."""
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, *, exc_info: bool | BaseException = False, **fields: object) -> None:
        """What went wrong through our fault."""
        self._logger.error(event, exc_info=exc_info, extra={"fields": fields})
