"""Checks that run before the endpoints: access without a key, disconnects, unexpected errors.

A request that fails a check gets an error response in the shape of its API. `auth.py` checks API keys, `body.py` bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from ipaddress import ip_address
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onedraw.errors import BadRequest
from onedraw.server.auth import OPEN_PATHS
from onedraw.server.errors import ClientGone, ForeignPage, UnknownHost, error_response
from onedraw.server.logs import note

# Top-level domains of local networks. The public DNS never delegates them, so no stranger can own a name in them.
LOCAL_DOMAINS = (
    *(".localhost", ".local", ".internal", ".lan", ".home.arpa", ".test", ".svc", ".localdomain", ".home", ".corp", ".intranet"),
    ".private",
)

Result = TypeVar("Result")


class LocalAccessMiddleware:
    """Protects a server without API keys against web pages, which can send requests from a visitor's browser to the visitor's
    own machine.

    DNS rebinding: a page could let its own host name resolve to this machine and then read the replies, so the Host header must
    be an address, a local name, or an allowed host. Cross-site requests: a page cannot read the replies but could cause work,
    so anything but GET, HEAD and OPTIONS must come from the same site, a local page or an allowed origin.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        self._app, self._hosts, self._origins = app, {host_name(host) for host in hosts}, set(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" and scope["path"] not in OPEN_PATHS else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal, path=scope["path"])(scope, receive, send)

    def _refusal(self, scope: Scope) -> BadRequest | None:
        headers = Headers(scope=scope)
        name = host_name(headers.get("host", ""))
        if not self._allows_host(name):
            return UnknownHost(
                f"Host {name!r} is not allowed without an API key (DNS-rebinding protection). Serve with --allow-host {name}, or "
                "with --api-key."
            )
        origin = headers.get("origin", "")
        causes_work = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if causes_work and not self._origins & {origin, "*"} and self._is_cross_site(origin, headers.get("sec-fetch-site"), name):
            page, allow = (
                (f"the web page {origin}", f"--cors-origin {origin}, or with ") if origin else ("a page of another site", "")
            )
            return ForeignPage(f"requests from {page} are not allowed without an API key; serve with {allow}--api-key")
        return None

    def _allows_host(self, name: str) -> bool:
        return bool(self._hosts & {name, "*"}) or _is_local(name)

    def _is_cross_site(self, origin: str, site: str | None, name: str) -> bool:
        """Whether a web page of another site sent the request. Browsers send Sec-Fetch-Site only over TLS or to localhost;
        without it the host in Origin decides."""
        if not origin:  # Some requests have no Origin. Sec-Fetch-Site is never "cross-site" for an address that a person typed.
            return site == "cross-site"
        if not origin.startswith("http") and origin != "null":  # The sender is a program or an extension, not a web page.
            return False
        if site is not None or origin == "null":  # Any page can make its origin "null", so that value proves nothing.
            return site in ("cross-site", None)
        page = host_name(origin.partition("://")[2])
        return page != name and page not in self._hosts and not _is_local(page, public=False)


def host_name(host: str) -> str:
    """Return the host part of a Host header, without the port and in lower case."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    return name.lower().rstrip(".")


def _is_local(name: str, *, public: bool = True) -> bool:
    """Whether a name cannot belong to a stranger: it has no dot, or lies in a domain of local networks. An IP address counts
    if it is private, loopback or link-local; with `public` every address counts."""
    try:
        address = ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(LOCAL_DOMAINS)
    return public or address.is_private or address.is_loopback or address.is_link_local


class CrossOriginMiddleware(CORSMiddleware):
    """Adds CORS headers. A refused preflight request is answered in JSON, as every other error."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        origin = request_headers.get("origin", "")
        reason = bytes(answer.body).decode()
        refusal = error_response(ForeignPage(f"{reason}: serve with --cors-origin {origin} to allow requests from it"))
        kept = {name: value for name, value in answer.headers.items() if name not in ("content-length", "content-type")}
        refusal.headers.update(kept)
        return refusal


class RootPathMiddleware:
    """Serves the same paths below a prefix too, for a proxy that does not strip the prefix."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._root or path.startswith(f"{self._root}/"):
            rest = path[len(self._root) :] or "/"
            # A copy of the scope would hide from the HTTP parser which caller the middleware after this one finds.
            scope.update(path=rest, raw_path=rest.encode())
        await self._app(scope, receive, send)


class ErrorMiddleware:
    """Turns an unexpected exception into a 500 with an error id. A client that has disconnected gets no response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_noting_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_noting_start)
        except (ClientGone, ClientDisconnect):
            note(gone=True)
        except Exception as error:
            response = error_response(error, path=scope.get("path", ""))
            if scope["type"] == "http" and not started:
                await response(scope, receive, send)


async def or_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of the work. If the client disconnects first, the work is cancelled and ClientGone is raised."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
