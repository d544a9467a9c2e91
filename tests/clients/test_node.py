"""Clients from the npm registry: openai, ollama and the Vercel AI SDK, each a script that prints its results as JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import PATIENCE, Server

FOLDER = Path(__file__).parent / "node"


def run(server: Server, script: str, part: str, *, key: str | None = None) -> Any:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (FOLDER / "node_modules").is_dir():
        pytest.skip("the npm packages are not installed: npm ci in tests/clients/node")
    given = {**os.environ, "BASE": server.base, "KEY": key or server.key, "MODEL": server.model}
    done = subprocess.run([node, script, part], cwd=FOLDER, env=given, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("script", ["openai.js", "ai.js", "ollama.js"])
@pytest.mark.parametrize("part", ["chat", "stream"])
def test_chat_and_streaming(server: Server, script: str, part: str) -> None:
    assert run(server, script, part)["text"] == server.reply(seed=7, max_tokens=12)


@pytest.mark.parametrize("script", ["openai.js", "ai.js", "ollama.js"])
def test_errors(server: Server, script: str) -> None:
    result = run(server, script, "error")
    assert (result["status"], "temperature" in result["message"]) == (400, True)
    assert run(server, script, "chat-error", key="wrong")["status"] == 401


@pytest.mark.parametrize("script", ["openai.js", "ai.js"])
def test_tools(server: Server, needs: Callable[..., None], script: str) -> None:
    needs(field="tools")
    assert 1 <= run(server, script, "tools")["days"] <= 9


@pytest.mark.parametrize("script", ["openai.js", "ai.js", "ollama.js"])
def test_structured_output(server: Server, needs: Callable[..., None], script: str) -> None:
    needs(field="response_format")
    assert 1 <= run(server, script, "structured")["days"] <= 9


@pytest.mark.parametrize("script", ["openai.js", "ai.js"])
def test_a_tool_call_and_its_result(server: Server, needs: Callable[..., None], script: str) -> None:
    needs(field="tools")
    for part in ("round", "responses-round")[: 2 if script == "ai.js" else 1]:
        result = run(server, script, part)
        assert 1 <= result["days"] <= 9
        assert result["steps"] == 2


@pytest.mark.parametrize("script", ["openai.js", "ai.js"])
@pytest.mark.parametrize("part", ["responses", "responses-stream"])
def test_responses(server: Server, needs: Callable[..., None], script: str, part: str) -> None:
    needs(path="/v1/responses")
    assert run(server, script, part)["text"]


def test_responses_refer_to_earlier_ones_by_id(server: Server, needs: Callable[..., None]) -> None:
    """The AI SDK's OpenAI provider refers to earlier items by their ids."""
    needs(path="/v1/responses")
    result = run(server, "ai.js", "responses-refer")
    assert result["text"]
    assert result["referred"]


def test_ollama_generates_and_lists_the_model(server: Server, needs: Callable[..., None]) -> None:
    needs(path="/api/generate")
    assert run(server, "ollama.js", "generate")["text"] == server.reply(seed=7, max_tokens=12)
    found = run(server, "ollama.js", "models")
    assert (found["names"], "tools" in found["capabilities"]) == ([server.model], True)
