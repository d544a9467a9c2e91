"""The HTTP parser of uvicorn, with a bound on the head of a request and on what follows its body.

Uvicorn's own parser collects a URL, a header or a trailer of any length, on the event loop and before any check of a key.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from onedraw.limits import MAX_HEAD

_BODY = b"the head of the request is too large"
_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: "
_REFUSAL += b"%d\r\n\r\n" % len(_BODY) + _BODY


class BoundedParser(HttpToolsProtocol):
    """Refuses a request once more than MAX_HEAD bytes arrive that neither complete its head nor belong to its body."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._pending = 0  # bytes since the last head or part of a body

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._pending += len(data)
        super().data_received(data)
        if self._pending > MAX_HEAD and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_REFUSAL)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._pending = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)

    def _unsupported_upgrade_warning(self) -> None:
        """There are no WebSockets here, and a client that offers another protocol is answered in this one."""
