"""A real server in its own process, for third-party clients installed in a separate virtual environment.

Run by `make test-clients`. ONEDRAW_PYTHON is the interpreter that has Onedraw. A test of a feature that is
not in the server's OpenAPI document is skipped with that reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(os.environ.get("ONEDRAW_ROOT", Path(__file__).parents[2]))
PYTHON = os.environ.get("ONEDRAW_PYTHON", sys.executable)  # the interpreter that has Onedraw
KEY = "sesame"
PATIENCE = 300.0  # seconds, generous, for a busy machine
HELLO = [{"role": "user", "content": "Hello."}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Server:
    url: str
    key: str
    model: str
    document: dict[str, Any]

    @property
    def base(self) -> str:
        return f"{self.url}/v1"

    def field(self, name: str) -> dict[str, Any]:
        """The schema of a field of chat requests in the OpenAPI document."""
        found: dict[str, Any] = self.document["components"]["schemas"]["ChatRequest"]["properties"].get(name, {"type": "null"})
        return found

    def reply(self, **fields: Any) -> str:
        """The reply over plain HTTP, which clients' replies are compared with."""
        body = {"messages": HELLO, **fields}
        answer = httpx.post(
            f"{self.base}/chat/completions", json=body, headers={"authorization": f"Bearer {self.key}"}, timeout=PATIENCE
        )
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text


@contextmanager
def running(*flags: str, model: Sequence[str] = ("fake", "--backend", "fake"), key: str = KEY) -> Iterator[Server]:
    """A server with this key; with none if it is empty."""
    command = [PYTHON, "-m", "onedraw", "serve", *model, "--port", "0", *(("--api-key", key) if key else ())]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [*command, "--log-level", "error", "--batch-dir", folder, *flags], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as process,
    ):
        try:
            assert process.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
            assert found is not None, "the server did not start"
            headers = {"authorization": f"Bearer {key}"} if key else {}
            with httpx.Client(base_url=found[0], headers=headers, timeout=PATIENCE) as http:
                document, models = http.get("/openapi.json").json(), http.get("/v1/models").json()
            yield Server(found[0], key, models["data"][0]["id"], document)
        finally:
            process.terminate()
            process.wait(PATIENCE)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running("--max-context", "4096", "--strict-model-names") as started:
        yield started


@pytest.fixture(scope="session")
def trained() -> Iterator[Server]:
    """A small real model with its drafter, whose replies are text."""
    models = Path(__file__).parents[1] / "fixtures" / "trained"
    drafts = ("--draft", "ngram", "--draft", str(models / "trained_dflash_qwen3"), "--draft-tokens", "4")
    flags = ("--max-context", "512", "--threads", "1", "--no-self-check")
    with running(*flags, *drafts, model=(str(models / "trained_qwen3"),)) as started:
        yield started


@pytest.fixture(scope="session")
def http(trained: Server) -> Iterator[httpx.Client]:
    """The small real model over plain HTTP."""
    with httpx.Client(base_url=trained.url, headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def needs(server: Server) -> Callable[..., None]:
    """Skips a test if the server lacks a path or a field of chat requests."""

    def check(*, path: str | None = None, field: str | None = None) -> None:
        if path is not None and path not in server.document["paths"]:
            pytest.skip(f"this server has no {path}")
        if field is not None:
            options = server.field(field).get("anyOf", [server.field(field)])
            if all(option.get("type") == "null" or "enum" in option for option in options):
                pytest.skip(f"this server does not honour {field}")

    return check
