"""Requests as coding agents send them by default are accepted, with all their neutral fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Served, fake_llm, serving, wait_until

BODIES = Path(__file__).parents[1] / "clients" / "bodies"
SHELL = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}},
    "required": ["command"],
    "additionalProperties": False,
}


PATHS = {
    "claude_code": "/v1/messages?beta=true",
    "codex": "/v1/responses",
    "codex_unknown_model": "/v1/responses",
    "open_webui_ollama": "/api/chat",
    **dict.fromkeys(("aider", "continue", "opencode", "open_webui"), "/v1/chat/completions"),
}
LAST_LINE = '"done":true'  # of Ollama's API
ENDINGS = ("response.completed\n", "response.incomplete\n", "message_stop\n")


@pytest.fixture(scope="module")
def window() -> Iterator[Served]:
    """A server whose context fits the prompts of these tests but not the requested length of the replies."""
    with fake_llm(max_context=32768) as llm, serving(llm) as served:
        yield served


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("reasons", [True, False])
def test_the_recorded_body_of_a_real_agent_is_answered(
    window: Served, monkeypatch: pytest.MonkeyPatch, name: str, reasons: bool
) -> None:
    """The bodies were recorded with their prose replaced; those of Open WebUI are written after its source."""
    if not reasons:
        monkeypatch.setitem(window.llm.__dict__, "reasoning", None)
    body = json.loads((BODIES / f"{name}.json").read_text())
    seed = {} if PATHS[name] == "/api/chat" else {"seed": 5}
    answer = window.http.post(PATHS[name], json={**body, **seed})
    assert answer.status_code == 200, answer.text
    if PATHS[name] == "/v1/chat/completions":
        assert answer.text.endswith("data: [DONE]\n\n")
    elif PATHS[name] == "/api/chat":
        assert LAST_LINE in answer.text.splitlines()[-1]
    else:
        assert answer.text.rsplit("event: ")[-1].startswith(ENDINGS)


def test_tools_that_the_server_cannot_offer_are_left_out_and_named(window: Served) -> None:
    body = json.loads((BODIES / "codex_unknown_model.json").read_text()) | {"stream": False, "max_output_tokens": 4}
    answer = window.post("/v1/responses", **body)
    assert answer.headers["x-onedraw-ignored"] == "tools[4] (namespace), tools[8] (web_search)"
    functions = [tool for tool in body["tools"] if tool["type"] == "function"]
    assert [tool["name"] for tool in answer.json()["tools"]] == [tool["name"] for tool in functions]
    alone = window.post("/v1/responses", **{**body, "tools": functions})
    assert "x-onedraw-ignored" not in alone.headers
    assert alone.json()["usage"]["input_tokens"] == answer.json()["usage"]["input_tokens"]


HELLO = [{"role": "user", "content": "a"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"tools": [FUNCTION, {"type": "custom", "custom": {"name": "g"}}]}, None),
        ("/v1/responses", {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ("/v1/responses", {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "s", "max_uses": 8}]}, None),
        (
            "/v1/messages",
            {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "tool", "name": "bash"}},
            "tool_choice.name",
        ),
        ("/v1/chat/completions", {"tools": [{"type": "functoin", "function": {"name": "f"}, "more": 1}]}, "tools[0].type"),
        ("/v1/responses", {"tools": [{"type": "functoin", "name": "f", "more": 1}]}, "tools[0].type"),
        ("/v1/messages", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].type"),
    ],
)
def test_a_tool_is_refused_for_its_type_only_if_it_is_forced_or_unknown(
    window: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    length = {"/v1/responses": {"input": "a", "max_output_tokens": 4}}.get(path, {"messages": HELLO, "max_tokens": 4})
    answer = window.post(path, **length, **body)
    assert answer.status_code == (200 if param is None else 400), answer.text
    if param is None:
        assert "tools[" in answer.headers["x-onedraw-ignored"]
    else:
        assert answer.json()["error"]["param"] == param
        assert next(tool["type"] for tool in body["tools"]) in answer.json()["error"]["message"] or param == "tool_choice"


def test_a_reply_ends_at_the_context_with_the_reason_length(window: Served) -> None:
    room, long = window.llm.card.max_context, {"seed": 3, "max_tokens": 10**9}
    greedy = {"logit_bias": {str(id): -100 for id in window.llm.card.eos_ids}}
    prompt = "a" * (room - 40)
    completion = window.post("/v1/completions", prompt=prompt, **long, **greedy).json()
    assert completion["choices"][0]["finish_reason"] == "length"
    assert completion["usage"]["total_tokens"] == room
    said = [{"role": "user", "content": "a" * (room - 100)}]
    chat = window.post("/v1/chat/completions", messages=said, **long, **greedy).json()
    assert (chat["choices"][0]["finish_reason"], chat["usage"]["total_tokens"]) == ("length", room)
    message = window.post("/v1/messages", messages=said, **long).json()
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] < room
    response = window.post("/v1/responses", input=said, max_output_tokens=10**9, seed=3).json()
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["total_tokens"] == room


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/messages", "messages"), ("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/api/chat", "messages")],
)
def test_an_agent_recognizes_that_the_prompt_is_too_long(window: Served, path: str, field: str) -> None:
    """Then it compacts the conversation. Claude Code and opencode search for the first phrase, litellm for the second."""
    room = window.llm.card.max_context
    length = {"max_tokens": 4} if path == "/v1/messages" else {}  # it is required there
    answer = window.post(path, **{field: [{"role": "user", "content": "a" * (room + 100)}]}, **length)
    assert answer.status_code == 400
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    found = re.search(r"prompt is too long: (\d+) tokens > (\d+)", message)
    assert found is not None, message
    assert int(found[1]) > int(found[2]) == room - 1
    assert f"This model's maximum context length is {room} tokens" in message


def test_an_agent_on_responses(fake: Any) -> None:
    """With store: false every turn sends the whole conversation, including encrypted reasoning."""
    said = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are in /tmp."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "content": None,
            "encrypted_content": "gAAA",
        },
        {"type": "function_call", "id": "fc_1", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a b c"},
    ]
    answer = fake.post(
        "/v1/responses",
        model=fake.model,
        instructions="Be brief.",
        input=said,
        tools=[{"type": "function", "name": "shell", "description": "Run it.", "strict": False, "parameters": SHELL}],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="one",
        text={"verbosity": "medium"},
        max_output_tokens=24,
    )
    assert answer.status_code == 200, answer.text
    assert answer.text.rsplit("event: ")[-1].startswith(("response.completed\n", "response.incomplete\n"))


def test_an_agent_on_messages(fake: Any) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    asked = {
        "model": fake.model,
        "max_tokens": 24,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": mark}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "List the files.", "cache_control": mark}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "Eo"},
                    {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": ["ls"]}, "caller": {"type": "direct"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "no"}], "is_error": True}
                ],
            },
        ],
        "tools": [{"name": "Bash", "description": "Run it.", "input_schema": SHELL}],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "any-2025-01-01", "x-api-key": "none"}
    answer = fake.http.post("/v1/messages?beta=true", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    assert "event: message_stop" in answer.text


def test_adaptive_thinking_is_accepted_by_a_model_without_reasoning() -> None:
    """`adaptive` lets the model decide."""
    from onedraw.server.anthropic.messages import MessagesRequest

    def asked(**thinking: Any) -> dict[str, Any]:
        said = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "thinking": thinking}
        return MessagesRequest.model_validate(said).chat()

    assert "reasoning_effort" not in asked(type="adaptive")
    assert asked(type="enabled", budget_tokens=9)["thinking_budget"] == 9
    assert asked(type="disabled")["reasoning_effort"] == "none"


def test_the_log_names_the_tools_that_are_left_out(window: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="onedraw.access"):
        window.post("/v1/responses", input="a", max_output_tokens=1, tools=[{"type": "web_search"}])
        wait_until(lambda: 'ignored="tools[0] (web_search)"' in caplog.text)
