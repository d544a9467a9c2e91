"""Real servers on loopback ports, in threads of the test process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import openai

from onedraw.build.llm import build_llm
from onedraw.llm.llm import LLM
from onedraw.server.config import ServerOptions
from onedraw.server.serve import Server
from onedraw.settings import Settings

DEFAULTS = ServerOptions()
PATIENCE = 120.0  # the longest wait for a condition or an answer, in seconds, so that tests pass on a busy machine


@dataclass(frozen=True)
class Served:
    url: str
    llm: LLM
    http: httpx.Client
    clients: list[Any] = field(default_factory=list)  # closed with the server

    @property
    def model(self) -> str:
        return self.llm.card.name

    def client(self, **kwargs: Any) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE, **kwargs)
        self.clients.append(client)
        return client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def send(self, path: str, content: Any) -> httpx.Response:
        """Send these bytes as the body."""
        return self.http.post(path, content=content)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.http.get(path, **kwargs)

    def stream(self, path: str, **body: Any) -> AbstractContextManager[httpx.Response]:
        """Open a streamed response to read line by line; closing it early disconnects."""
        return self.http.stream("POST", path, json={**body, "stream": True})

    @contextmanager
    def unread(self, path: str, body: bytes, *, length: int | None = None) -> Iterator[socket.socket]:
        """Send a request over a new connection without reading the answer. Leaving the context disconnects."""
        address = httpx.URL(self.url)
        with socket.create_connection((address.host, address.port), timeout=PATIENCE) as connection:
            head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(body) if length is None else length}\r\n\r\n"
            connection.sendall(head.encode() + body)
            yield connection

    def chunks(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Return the objects of a stream, which must end with [DONE]."""
        answer = self.post(path, stream=True, **body)
        assert answer.status_code == 200, answer.text
        *events, last, empty = answer.text.split("\n\n")
        assert (last, empty) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def serving(llm: LLM, options: ServerOptions = DEFAULTS, *, port: int = 0) -> Iterator[Served]:
    """Run a server in a thread, on a free port if none is given. The LLM stays open when the server stops."""
    server = Server(llm, replace(options, port=port, log_level="critical"))
    server.config.timeout_keep_alive = (
        3600  # so that a client that was paused does not use a connection that the server is closing
    )
    thread = threading.Thread(target=server.run, name="test-server")
    thread.start()
    try:
        wait_until(lambda: server.started)
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
            served = Served(server.url, llm, http)
            yield served
            for client in served.clients:
                client.close()
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.005)


def fake_llm(**settings: Any) -> LLM:
    return build_llm(Settings(backend="fake", model="fake", **settings))


def backend_of(llm: LLM) -> Any:
    """The backend of an LLM whose engine runs in this process: tests make its steps slow or let them fail."""
    return llm.service._engine.backend  # type: ignore[attr-defined,unused-ignore]


def slowed(llm: LLM, seconds: float, until: Any = None) -> LLM:
    """Make every step of the LLM take this long until the event `until` is set."""
    free = until or threading.Event()
    backend = backend_of(llm)
    submit = backend.submit

    def slow_submit(plan: Any) -> Any:
        free.wait(seconds)
        return submit(plan)

    backend.submit = slow_submit
    return llm
