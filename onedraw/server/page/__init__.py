"""The routes of the chat page. Its files are read once at start and sent with security headers.

The files lie in this folder of the package. A request's path is only looked up among the routes and never opened as a path on
disk. The page uses nothing but the public API, so its files are served without a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# The browser may load scripts and styles from this server only, and may send requests nowhere else. Inline code is forbidden, and
# so is every way to turn text into HTML or code (`innerHTML`, `eval`): Trusted Types are required
# and no Trusted Types policy is allowed.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # The browser asks again each time, so a page never outlives an update of the server.
}


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'


def load() -> Mapping[str, Asset]:
    """Read the files of the page into a map from URL path to content."""
    folder = resources.files("onedraw.server") / "page"
    assets: dict[str, Asset] = {}
    for file in folder.iterdir():
        kind = TYPES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            assets["/" if file.name == "index.html" else f"/page/{file.name}"] = Asset(file.read_bytes(), kind)
    return assets


def routes(assets: Mapping[str, Asset]) -> list[Route]:
    return [Route(path, _endpoint(asset), methods=["GET"]) for path, asset in assets.items()]


def _endpoint(asset: Asset) -> Callable[[Request], Awaitable[Response]]:
    etag = asset.etag

    async def answer(request: Request) -> Response:
        headers = {**HEADERS, "etag": etag}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(asset.content, media_type=asset.media_type, headers=headers)

    return answer
