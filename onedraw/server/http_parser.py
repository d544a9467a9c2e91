"""The HTTP parser of uvicorn, with a bound on the head of a request and on what follows its body, a bound on the replies that
clients do not read, and without upgrades.

Uvicorn's own parser collects a URL, a header or a trailer of any length, on the event loop and before any check of a key. It also
drops the body of a request that offers another protocol, as Java's HTTP client does with every request to an http:// URL. A reply
that its client does not read waits in memory for as long as the client keeps the connection.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from onedraw.limits import MAX_HEAD, MAX_UNREAD
from onedraw.server.auth import turn_caller

OFFERS = (b"connection", b"upgrade", b"http2-settings")  # headers that offer another protocol
_BODY = b"the head of the request is too large"
_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: "
_REFUSAL += b"%d\r\n\r\n" % len(_BODY) + _BODY


class BoundedParser(HttpToolsProtocol):
    """Refuses a request once more than MAX_HEAD bytes arrive that neither complete its head nor belong to its body."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._pending = 0  # bytes since the last complete head or part of a body
        # Parts of a body that arrived together. They are passed on as one: for each, uvicorn copies all before it, and a client
        # may send each byte as a part of its own.
        self._parts: list[bytes] = []

    @property
    def caller(self) -> str:
        """The caller of the latest request."""
        return turn_caller(cast(Scope, self.scope))

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._pending += len(data)
        try:
            self._feed(data)
            self._pass_on()
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._pending > MAX_HEAD and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_REFUSAL)
            self.transport.close()

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:  # The head offers another protocol: parse it again without the offer.
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise httptools.HttpParserError("this server is no proxy") from None
                close = any(name == b"connection" and b"close" in value.lower() for name, value in self.headers)
                kept = [(name, value) for name, value in self.headers if name not in OFFERS]
                lines = [name + b": " + value for name, value in (*kept, *([(b"connection", b"close")] if close else []))]
                head = b"\r\n".join((method + b" " + self.url + b" HTTP/1.1", *lines, b"", b""))
                self.parser = httptools.HttpRequestParser(self)
                data = head + data[offer.args[0] :]

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._pending = 0
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        self._parts.append(body)

    def _pass_on(self) -> None:
        if self._parts:
            body = b"".join(self._parts)
            self._parts.clear()
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._pass_on()
            super().on_message_complete()

    def pause_writing(self) -> None:
        """Note that this client reads more slowly than its reply is written. While such replies have more than MAX_UNREAD bytes
        together, close the connection with the largest of the caller that has most of them, except the only one."""
        super().pause_writing()
        slow = [one for one in self.connections if isinstance(one, BoundedParser) and one.flow.write_paused]
        unread = {one: one.transport.get_write_buffer_size() for one in slow}
        total = sum(unread.values())
        if total <= MAX_UNREAD:
            return
        callers: defaultdict[str, int] = defaultdict(int)
        for connection, size in unread.items():
            callers[connection.caller] += size
        while total > MAX_UNREAD and len(unread) > 1:
            most = max(callers, key=callers.__getitem__)
            theirs = [connection for connection in unread if connection.caller == most]
            largest = max(theirs, key=unread.__getitem__)
            size = unread.pop(largest)
            total -= size
            callers[most] -= size
            largest.transport.abort()
