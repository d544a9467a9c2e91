"""Requests as coding agents send them by default are accepted, with all their neutral fields."""

from __future__ import annotations

from typing import Any

SHELL = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}},
    "required": ["command"],
    "additionalProperties": False,
}


def test_an_agent_on_responses(fake: Any) -> None:
    """Nothing is stored: every turn sends the whole conversation, reasoning that only its maker can read included."""
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
    """`adaptive` leaves it to the model."""
    from onedraw.server.anthropic.messages import MessagesRequest

    def asked(**thinking: Any) -> dict[str, Any]:
        said = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "thinking": thinking}
        return MessagesRequest.model_validate(said).chat()

    assert "reasoning_effort" not in asked(type="adaptive")
    assert asked(type="enabled", budget_tokens=9)["thinking_budget"] == 9
    assert asked(type="disabled")["reasoning_effort"] == "none"
