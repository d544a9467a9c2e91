"""What stands between the wire and the routes: key or name, body limit, JSON, a client that hangs up, errors nobody foresaw.

In: ASGI messages. Out: the same, or an error in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Sequence, Set
from ipaddress import ip_address
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onedraw.errors import BadRequest
from onedraw.server.auth import ApiKeys
from onedraw.server.errors import BodyTooLarge, BodyTooSlow, ClientGone, ForeignPage, UnknownHost, WrongKey, error_response
from onedraw.server.logs import note

OPEN_PATHS = frozenset({"/health"})
CALLER = "onedraw.caller"  # in the scope of a request: whose key it brought
BODY_SECONDS = 60.0  # for the last byte of a body
# Names that lead nowhere outside: reserved for it, or in use for it and never given to anybody.
NEAR = (
    *(".localhost", ".local", ".internal", ".lan", ".home.arpa", ".test", ".svc", ".localdomain", ".home", ".corp", ".intranet"),
    ".private",
)

Result = TypeVar("Result")


class ApiKeyMiddleware:
    """Lets a request pass with a right key, and notes whose it was."""

    def __init__(self, app: ASGIApp, keyring: ApiKeys, open_paths: Set[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keyring = keyring
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._opens(scope):
            await self._app(scope, receive, send)
            return
        wrong = WrongKey("wrong or missing API key; send the header 'Authorization: Bearer KEY'")
        await error_response(wrong, path=scope["path"])(scope, receive, send)

    def _opens(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not key and "x-api-key" in headers:  # how clients of /v1/messages send it
            scheme, key = "bearer", headers["x-api-key"]
        # The bytes that came over the wire; other kinds of space may be parts of a key's characters.
        owner = self._keyring.owner(key.strip(" \t").encode("latin-1"))
        if owner is None or scheme.lower() != "bearer":
            return False
        scope[CALLER] = owner
        note(caller=owner)
        return True


class LocalAccessMiddleware:
    """Stands before a server without keys: it answers to names of this machine and its network, and to no foreign web page.

    A page that somebody looks at may send requests from their browser to their own machine. It can let a name of its own lead
    there, and then read the answers: so a name that anybody can own must be allowed. Without that it can only make us work: a
    browser says so, and only what fetches, which changes nothing, may come from elsewhere.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        self._app, self._hosts, self._origins = app, {name_of(host) for host in hosts}, set(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = self._wrong(scope) if scope["type"] == "http" and scope["path"] not in OPEN_PATHS else None
        if wrong is None:
            await self._app(scope, receive, send)
        else:
            await error_response(wrong, path=scope["path"])(scope, receive, send)

    def _wrong(self, scope: Scope) -> BadRequest | None:
        headers = Headers(scope=scope)
        name = name_of(headers.get("host", ""))
        if not self._answers_to(name):
            return UnknownHost(
                f"a server without a key does not answer to the name {name!r}, which any web page could lead here; serve it with "
                f"--allow-host {name}, or with --api-key"
            )
        origin = headers.get("origin", "")
        works = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if works and not self._origins & {origin, "*"} and self._is_foreign(origin, headers.get("sec-fetch-site"), name):
            return ForeignPage(
                f"a server without a key takes no requests from the web page {origin}; serve it with --cors-origin {origin}, or "
                "with --api-key"
            )
        return None

    def _answers_to(self, name: str) -> bool:
        return bool(self._hosts & {name, "*"}) or _is_near(name)

    def _is_foreign(self, origin: str, site: str | None, name: str) -> bool:
        """Whether a page elsewhere asks. Browsers say so; to an address without TLS they say only where a page is from."""
        if not origin.startswith("http") and origin != "null":  # a program's own page
            return False
        if site is not None or origin == "null":  # which any page can have
            return site in ("cross-site", None)
        page = name_of(origin.partition("://")[2])
        return page != name and page not in self._hosts and not _is_near(page, public=False)


def name_of(host: str) -> str:
    """What a Host header names, without the port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    return name.lower().rstrip(".")


def _is_near(name: str, *, public: bool = True) -> bool:
    """An address (`public`: any, else of a network's own), or a name that nobody can own in public: one without a dot, or under
    a name that stays in its network."""
    try:
        address = ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(NEAR)
    return public or address.is_private or address.is_loopback or address.is_link_local


def caller(request: Request) -> str | None:
    """Whose key the request brought; None where none is asked for."""
    found: str | None = request.scope.get(CALLER)
    return found


class ErrorMiddleware:
    """Answers what nobody foresaw with 500 and an id. A client that hung up needs no answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def witness(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, witness)
        except (ClientGone, ClientDisconnect):
            note(gone=True)
        except Exception as error:
            response = error_response(error, path=scope.get("path", ""))
            if scope["type"] == "http" and not begun:
                await response(scope, receive, send)


async def read_body(request: Request, *, limit: int, seconds: float = BODY_SECONDS) -> bytes:
    """The body, refused as soon as it is known to be over the limit, with or without a declared length, or too slow."""
    declared = request.headers.get("content-length", "")
    body = bytearray()
    if not (declared.isdecimal() and int(declared) > limit):
        try:
            async with asyncio.timeout(seconds):
                async for block in request.stream():
                    body += block
                    if len(body) > limit:
                        break
                else:
                    return bytes(body)
        except TimeoutError:
            raise BodyTooSlow(f"the body did not arrive within {seconds:g} seconds") from None
    raise BodyTooLarge(f"the body is over the limit of {limit} bytes; send less, or serve with a larger --max-body")


def read_json(body: bytes) -> object:
    """The JSON value of a body. A field that is NaN or infinite passes here: it is named later. Inside of one it would be
    handed on, to a schema or back to the caller, so there it is refused."""
    numbers = Numbers()
    try:
        # json's own decoding would let half characters pass
        value: object = json.loads(body.decode("utf-8-sig"), parse_constant=numbers.read, parse_float=numbers.read)
        if isinstance(value, dict) and b"\\u" in body:
            for name, field in value.items():
                _refuse_half_characters(name, field)
        if isinstance(value, dict) and numbers.endless:
            for name, field in value.items():
                _refuse_endless(name, field)
    except RecursionError:
        raise BadRequest("the body is not valid JSON: nested too deeply", code="invalid_json") from None
    except ValueError as error:  # wrong JSON, wrong encoding, a number of too many digits
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    return value


class Numbers:
    """Reads the numbers of a body, and notes whether one of them has no end. One owner: the reading of one body."""

    def __init__(self) -> None:
        self.endless = False

    def read(self, text: str) -> float:
        number = float(text)
        self.endless = self.endless or not math.isfinite(number)
        return number


def _refuse_endless(name: str, value: object) -> None:
    if isinstance(value, dict | list):
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise BadRequest(f"{name}: holds NaN or a number without end", param=name, code="invalid_number") from None


def _refuse_half_characters(name: str, value: object) -> None:
    """JSON can spell half of a surrogate pair, which is no character and has no bytes."""
    try:
        json.dumps([name, value], ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        shown = name.encode("utf-8", "replace").decode()
        raise BadRequest(
            f"{shown}: holds half of a surrogate pair; send valid Unicode", param=shown, code="invalid_text"
        ) from None


async def until_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of the work, unless the client hangs up before: then the work is cancelled."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
