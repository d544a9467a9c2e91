"""API keys: read from a file or a flag, checked on every request.

A key comes from a file with lines `NAME KEY`, or from a flag. The middleware answers 401 to a request without a known key. Log
lines contain the name of a key, never the key itself.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from onedraw.errors import BadSetting
from onedraw.server.errors import WrongKey, error_response
from onedraw.server.logs import note

log = logging.getLogger("onedraw.server")

NAME = re.compile(r"[\w.@-]{1,64}")
OPEN_PATHS = frozenset({"/health"})  # These paths are served without a key.
CALLER = "onedraw.caller"  # The ASGI scope holds the name of the caller's API key under this entry.


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    key: str = field(repr=False)  # A secret: it is left out of repr() and of the log.

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise BadSetting(f"a key's name must be letters, digits and _ . @ - (64 at most), not {self.name!r}")
        if not self.key.strip() or self.key != self.key.strip():
            raise BadSetting(f"the key of {self.name} must not be empty, nor begin or end with a space")


class ApiKeys:
    """Finds the name that belongs to a key. Every digest is compared, in constant time, so response times reveal nothing."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple((key.name, _digest(key.key.encode())) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def owner(self, given: bytes) -> str | None:
        digest, found = _digest(given), None
        for name, known in self._keys:
            if hmac.compare_digest(digest, known):
                found = name
        return found


class ApiKeyMiddleware:
    """Answers 401 to requests without a known key, except on open paths, and adds the key's name to the log line."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Set[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._allows(scope):
            await self._app(scope, receive, send)
            return
        wrong = WrongKey("wrong or missing API key; send the header 'Authorization: Bearer KEY'")
        await error_response(wrong, path=scope["path"])(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not key and "x-api-key" in headers:  # Anthropic's clients send the key in this header.
            scheme, key = "bearer", headers["x-api-key"]
        # Strip spaces and tabs only: str.strip() would also remove bytes that are part of a non-ASCII character of the key.
        owner = self._keys.owner(key.strip(" \t").encode("latin-1"))
        if owner is None or scheme.lower() != "bearer":
            return False
        scope[CALLER] = owner
        note(caller=owner)
        return True


def caller(request: Request) -> str | None:
    """Return the name of the API key that the request was sent with, or None on a server without keys."""
    found: str | None = request.scope.get(CALLER)
    return found


def turn_caller(scope: Scope) -> str:
    """Return the name of the request's caller, by which requests take turns and limits are counted: the name of its API key, else
    the client's address, else the empty string. For an IPv6 address the /64 network is the name, since one client may have all
    addresses of it."""
    name: str | None = scope.get(CALLER)
    if name is not None:
        return name
    address = scope["client"][0] if scope.get("client") else ""
    try:
        found = ip_address(address)
    except ValueError:
        return str(address)
    return str(found) if found.version == 4 else str(ip_network((found, 64), strict=False))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read the keys of a file, skipping empty lines and lines that begin with #. Error messages never contain a key."""
    try:
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning("%s can be read by others than its owner; chmod 600 it", path)
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadSetting(f"--api-key-file: cannot read {path} ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadSetting(f"--api-key-file: {path} is not UTF-8 text") from None
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, key = line.strip().partition(" ")
        try:
            keys.append(ApiKey(name, key.strip()))
        except BadSetting:
            raise BadSetting(f"--api-key-file: {path}:{number} must be NAME KEY, separated by a space") from None
    for what, values in (("name", [key.name for key in keys]), ("key", [key.key for key in keys])):
        if len(set(values)) < len(values):
            raise BadSetting(f"--api-key-file: {path} has the same {what} twice")
    if not keys:
        raise BadSetting(f"--api-key-file: {path} contains no key; write lines NAME KEY")
    return tuple(keys)
