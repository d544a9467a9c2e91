"""Replies of the torch backend through the client libraries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

from onedraw.build.llm import build_llm
from onedraw.settings import Settings
from tests.server.running import Served, serving
from tests.support import tiny

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def torch_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tiny.write_safetensors("qwen3", tmp_path_factory.mktemp("tiny") / "tiny-qwen3")
    with build_llm(Settings(model=str(folder), max_context=1024)) as llm, serving(llm) as running:
        yield running


def test_the_openai_client_gets_a_format_a_tool_call_and_a_response(torch_served: Served) -> None:
    told: Any = [{"role": "user", "content": "A pet?"}]
    shape: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    tool: Any = {"type": "function", "function": {"name": "pet", "parameters": SCHEMA, "strict": True}}
    with torch_served.client() as client:
        asked = {"model": torch_served.model, "messages": told, "max_tokens": 200, "temperature": 1.0}
        for seed in range(3):
            formed = client.chat.completions.create(**asked, seed=seed, response_format=shape)
            jsonschema.validate(json.loads(formed.choices[0].message.content or ""), SCHEMA)
            called = client.chat.completions.create(
                **asked, seed=seed, tools=[tool], tool_choice="required", parallel_tool_calls=False
            )
            (call,) = called.choices[0].message.tool_calls or ()
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)  # type: ignore[union-attr]
        response = client.responses.create(model=torch_served.model, input="Hi", max_output_tokens=8)
        assert response.usage is not None
        assert response.usage.output_tokens <= 8


def test_the_anthropic_client_gets_a_message(torch_served: Served) -> None:
    tool: Any = {"name": "pet", "input_schema": SCHEMA, "strict": True}
    with anthropic.Anthropic(base_url=torch_served.url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": torch_served.model,
            "max_tokens": 200,
            "messages": [{"role": "user", "content": "A pet?"}],
        }
        with client.messages.stream(**asked, tools=[tool], tool_choice={"type": "any"}, extra_body={"seed": 1}) as stream:
            message = stream.get_final_message()
        assert message.stop_reason in ("tool_use", "max_tokens")
        if message.stop_reason == "tool_use":
            jsonschema.validate(message.content[0].input, SCHEMA)  # type: ignore[union-attr]


def test_drafts_do_not_change_these_replies(torch_served: Served) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "A pet?"}], "max_tokens": 120, "seed": 5, "n": 2}
    body |= {"guided_json": SCHEMA, "return_token_ids": True, "return_checksums": True}
    plain = torch_served.post("/v1/chat/completions", **body, speculation=False).json()
    guess = {"type": "content", "content": plain["choices"][0]["message"]["content"]}
    drafted = torch_served.post("/v1/chat/completions", **body, prediction=guess).json()
    assert drafted["choices"] == plain["choices"]
    assert drafted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 5
