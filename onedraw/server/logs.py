"""One log line per request, as text or JSON. The request's id is on every line that is logged while it runs.

The fields of the line come from ASGI messages and from endpoints, which add more with `note`. Log records go to stderr. Prompts
are logged only with `--log-prompts`.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import secrets
import time
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import LOGGING_CONFIG

log = logging.getLogger("onedraw.access")

FORMATS = ("text", "json")
HEADER = "x-request-id"
SAFE = re.compile(r"[\w.:-]{1,128}")  # A caller's own request id is logged only if it has no character that breaks a line.

Facts = dict[str, Any]
_facts: ContextVar[Facts | None] = ContextVar("facts", default=None)


def note(**facts: Any) -> None:
    """Add fields to the log line of the current request. Outside of a request this does nothing."""
    noted = _facts.get()
    if noted is not None:
        noted.update(facts)


class RequestLog:
    """Middleware that gives every request an id, and logs one line when the request ends. The response header has the caller's
    own id, else the id of the reply, else this one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        facts: Facts = {"id": f"req-{secrets.token_hex(12)}", "method": scope["method"], "path": scope["path"], "status": None}
        theirs = Headers(scope=scope).get(HEADER, "")
        if SAFE.fullmatch(theirs):
            facts["caller_id"] = theirs

        async def send_noting_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
                headers = MutableHeaders(scope=message)
                identity = facts.get("caller_id") or headers.get(HEADER) or facts["id"]
                headers[HEADER] = identity
                if scope["path"].startswith("/v1/messages"):
                    headers["request-id"] = identity  # Anthropic's clients read this header.
            await send(message)

        token = _facts.set(facts)
        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            facts["seconds"] = round(time.monotonic() - begun, 4)
            facts["client"] = scope["client"][0] if scope.get("client") else None
            log.info(line(facts), extra={"facts": facts})
            _facts.reset(token)


def line(facts: Facts) -> str:
    """Return the log line of a request as text. The path is escaped, so that it cannot contain a line break."""
    path = facts["path"].encode("unicode_escape").decode()
    head = f"{facts['method']} {path} {facts['status'] or 'no answer'} {facts['seconds']:.3f} s"
    rest = {name: value for name, value in facts.items() if name not in ("method", "path", "status", "seconds")}
    return " ".join(
        (head, *(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in rest.items() if value is not None))
    )


class TextFormatter(logging.Formatter):
    """Formats a record as `TIME LEVEL message [request id]`."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text, facts = super().format(record), _facts.get()
        return text if facts is None or hasattr(record, "facts") else f"{text} [{facts['id']}]"


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, and the fields of the request."""

    def format(self, record: logging.LogRecord) -> str:
        found: Facts = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        own = getattr(record, "facts", None)
        around = _facts.get()
        if own is not None:
            found |= {"message": "request", **own}
        else:
            found["message"] = record.getMessage()
            if around is not None:
                found["id"] = around["id"]
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False, default=str)


def log_config(level: str, style: str) -> dict[str, Any]:
    """Return a logging configuration that sends uvicorn's and onedraw's logs to stderr in one format. Uvicorn's access log is
    off, because RequestLog replaces it."""
    config: dict[str, Any] = copy.deepcopy(LOGGING_CONFIG)
    formatter = JsonFormatter if style == "json" else TextFormatter
    config["formatters"] = {"default": {"()": formatter}}
    config["handlers"] = {"default": {"class": "logging.StreamHandler", "formatter": "default", "stream": "ext://sys.stderr"}}
    config["loggers"] = {
        "uvicorn": {"handlers": ["default"], "level": level.upper(), "propagate": False},
        "uvicorn.access": {"handlers": [], "level": "CRITICAL", "propagate": False},
        "onedraw": {"handlers": ["default"], "level": level.upper(), "propagate": True},
    }
    return config
