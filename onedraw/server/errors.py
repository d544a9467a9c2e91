"""Errors as HTTP responses in OpenAI's, Anthropic's or Ollama's shape.

The input is an exception, the output the error object and its response. An unexpected exception is logged under an id, and the
client receives the id without the details.
"""

from __future__ import annotations

import errno
import logging
import secrets
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from onedraw.errors import BadRequest, OnedrawError
from onedraw.limits import MAX_ERROR_CHARACTERS
from onedraw.server.limits import RateLimited
from onedraw.text.tokenizer import replace_surrogates

log = logging.getLogger("onedraw.server")

PATHS = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/score",
    "/v1/files",
    "/v1/files/{id}",
    "/v1/files/{id}/content",
    "/v1/batches",
    "/v1/batches/{id}",
    "/v1/batches/{id}/cancel",
    "/v1/responses",
    "/v1/responses/{id}",
    "/v1/responses/{id}/input_items",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/api/tags",
    "/api/ps",
    "/api/version",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/tokenizer_info",
    "/pause",
    "/resume",
    "/is_paused",
    "/update_weights",
    "/start_weight_update",
    "/finish_weight_update",
    "/init_weight_transfer_engine",
    "/get_world_size",
    "/server_info",
    "/version",
    "/health",
    "/metrics",
    "/openapi.json",
    "/",
)
RETRY_SECONDS = 1  # The Retry-After of a 429 and 503. A short wait is enough: every finished reply frees a place in the queue.


class BodyTooLarge(BadRequest):
    code, status = "body_too_large", 413


class BodyTooComplex(BadRequest):
    code = "body_too_complex"


class BodyTooSlow(BadRequest):
    code, status = "body_too_slow", 408


class TimedOut(OnedrawError):
    code, status = "request_timeout", 504


class DiskFull(OnedrawError):
    code, status = "disk_full", 507


class WrongKey(BadRequest):
    code, status = "invalid_api_key", 401


class UnknownHost(BadRequest):
    code, status = "unknown_host", 403


class ForeignPage(BadRequest):
    code, status = "foreign_page", 403


class ClientGone(Exception):
    """The client disconnected before the response was complete."""


def known(error: Exception, *, path: str = "") -> OnedrawError:
    """Return the error as an OnedrawError. An unexpected one is logged with an id, and the client is told only that id. `path` is
    the path of the request, for advice."""
    if isinstance(error, OnedrawError):
        return error
    if isinstance(error, HTTPException):
        found = OnedrawError(_route_message(error, path), code=HTTPStatus(error.status_code).phrase.lower().replace(" ", "_"))
        found.status = error.status_code
        return found
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        log.error("the disk is full: %s", error)
        return DiskFull("the disk of the server is full, so nothing was stored; try again when it has room")
    identity = f"err-{secrets.token_hex(6)}"
    log.error("%s: unexpected error", identity, exc_info=error)
    return OnedrawError(f"unexpected error {identity}; see the server's log for this id", code="internal_error")


def _route_message(error: HTTPException, path: str) -> str:
    match error.status_code:
        case 404:
            for meant in (f"/v1{path}", path.removeprefix("/v1")):  # The client's base URL lacks /v1 or has it twice.
                if meant in PATHS and meant != path:
                    return f"no such path: did you mean {meant}? Base URLs of OpenAI's clients end with /v1, all others do not"
            return f"no such path; the paths are {', '.join(PATHS)}"
        case 405:
            return "this path does not accept this method"
        case _:
            return str(error.detail)


def error_object(error: OnedrawError) -> dict[str, Any]:
    found = {"message": _cut(str(error)), "type": _type(error.status), "param": _cut(error.param), "code": error.code}
    return {"error": found}


TextT = TypeVar("TextT", str, str | None)


def _cut(text: TextT) -> TextT:
    """Cut a message to its greatest length, and replace what UTF-8 cannot encode. It may repeat what the client sent, such as the
    name of an unknown field."""
    if text is None:
        return None
    return replace_surrogates(text if len(text) <= MAX_ERROR_CHARACTERS else text[:MAX_ERROR_CHARACTERS] + "…")


def _type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 404:
            return "not_found_error"
        case 429:
            return "rate_limit_error"
        case 503:
            return "service_unavailable_error"
        case _:
            return "invalid_request_error" if status < 500 else "server_error"


def message_error(error: OnedrawError) -> dict[str, Any]:
    """Return the error object in Anthropic's shape."""
    kinds = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
    kind = _type(error.status)
    return {"type": "error", "error": {"type": kinds.get(kind, kind), "message": _cut(str(error)), "param": _cut(error.param)}}


def ollama_error(error: OnedrawError) -> dict[str, Any]:
    """Return the error object in Ollama's shape."""
    return {"error": _cut(str(error)), "param": _cut(error.param), "code": error.code}


def error_response(error: Exception, *, path: str = "") -> JSONResponse:
    """Build the response of an error, in the shape of the API that the path belongs to."""
    found = known(error, path=path)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if found.status == 401:
        headers["www-authenticate"] = "Bearer"
    if found.status in (429, 503):
        headers["retry-after"] = str(found.retry_seconds if isinstance(found, RateLimited) else RETRY_SECONDS)
    shapes = {"/v1/messages": message_error, "/api/": ollama_error}
    shape = next((shape for beginning, shape in shapes.items() if path.startswith(beginning)), error_object)
    return JSONResponse(shape(found), status_code=found.status, headers=headers)
