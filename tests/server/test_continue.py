"""`continue_ids` on every API: the rest of the same reply, and errors that name the field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onedraw.llm.llm import PreparedChoice
from onedraw.llm.reply_stream import Generation
from tests.server.running import Served

CHAT = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
COMMON = {"seed": 7, "max_tokens": 16, "temperature": 1.0}


def answer(fake: Served, path: str, **body: Any) -> dict[str, Any]:
    reply = fake.post(path, **body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_a_completion_and_a_chat_are_continued(fake: Served) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "Hello", "frequency_penalty": 0.5, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": CHAT, "guided_json": SCHEMA, "logprobs": True}),
    ):
        wanted = {**COMMON, **body, "return_token_ids": True, "return_checksums": True}
        whole = answer(fake, path, **wanted)
        (choice,) = whole["choices"]
        ids = choice["token_ids"]
        for count in range(1, len(ids) + 1):
            rest = answer(fake, path, **wanted, continue_ids=ids[:count], system_fingerprint=whole["system_fingerprint"])
            (found,) = rest["choices"]
            assert found["token_ids"] == ids[count:]
            assert found["score_checksums"] == choice["score_checksums"][count:]
            assert (found["finish_reason"], found["seed"]) == (choice["finish_reason"], choice["seed"])
            assert rest["usage"]["completion_tokens"] == len(ids) - count
            assert rest["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_a_streamed_continuation_has_the_chunks_of_the_rest(fake: Served) -> None:
    body = {**COMMON, "messages": CHAT, "return_token_ids": True}
    (choice,) = answer(fake, "/v1/chat/completions", **body)["choices"]
    ids = choice["token_ids"]
    chunks = fake.chunks("/v1/chat/completions", **body, continue_ids=ids[:6])
    assert [token for chunk in chunks for one in chunk["choices"] for token in one.get("token_ids", [])] == ids[6:]


def test_responses_and_messages_are_continued(fake: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their replies have no token ids, so these come from running the same generation in the process."""
    generations: list[Generation] = []
    prepare = fake.llm.prepare

    def noting(*found: Generation, **how: Any) -> list[PreparedChoice]:
        generations.extend(found)
        return prepare(*found, **how)

    monkeypatch.setattr(fake.llm, "prepare", noting)
    for path, body in (
        ("/v1/responses", {"input": "Hello", "seed": 7, "max_output_tokens": 16, "temperature": 1.0}),
        ("/v1/messages", {"messages": CHAT, **COMMON}),
    ):
        generations.clear()
        whole = answer(fake, path, **body)
        (reply,) = fake.llm.run(generations[0])
        assert text_of(whole) == reply.text
        given = reply.token_ids[:7]
        (rest,) = fake.llm.run(replace(generations[0], given=tuple(given)))
        found = answer(fake, path, **body, continue_ids=given, system_fingerprint=whole["system_fingerprint"])
        assert text_of(found) == rest.text != reply.text
        assert found["usage"]["output_tokens"] == whole["usage"]["output_tokens"] - 7
        assert not found.get("store")


def text_of(answered: dict[str, Any]) -> str:
    items = answered.get("output") or [answered]
    return "".join(part["text"] for item in items for part in item["content"])


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/completions", {"prompt": "a", "continue_ids": [5]}, "continue_ids", "needs the seed"),
        ("/v1/completions", {"prompt": ["a", "b"], "continue_ids": [5], "seed": 1}, "continue_ids", "one request per prompt"),
        ("/v1/completions", {"prompt": "a", "echo": True, "continue_ids": [5], "seed": 1}, "echo", "beginning of a reply"),
        ("/v1/completions", {"prompt": "a", "n": 2, "continue_ids": [5], "seed": 1}, "n", "the seed that the choice reported"),
        ("/v1/completions", {"prompt": "a", "continue_ids": [-5], "seed": 1}, "continue_ids", "outside the vocabulary"),
        ("/v1/completions", {"prompt": "a", "continue_ids": [5] * 17, "seed": 1}, "continue_ids", "over the 16 of max_tokens"),
        ("/v1/completions", {"prompt": "a", "continue_ids": ["5"], "seed": 1}, "continue_ids[0]", "integer"),
        ("/v1/chat/completions", {"messages": CHAT, "system_fingerprint": "x"}, "system_fingerprint", "'x'"),
        ("/v1/responses", {"input": "a", "continue_ids": [5]}, "continue_ids", "needs the seed"),
        ("/v1/responses", {"input": "a", "continue_ids": [5], "seed": 1, "store": True}, "store", "send false"),
        ("/v1/responses", {"input": "a", "system_fingerprint": "x"}, "system_fingerprint", "'x'"),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 4, "continue_ids": [5]}, "continue_ids", "needs the seed"),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 4, "system_fingerprint": "x"}, "system_fingerprint", "'x'"),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(
    fake: Served, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    reply = fake.post(path, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    if param == "system_fingerprint":
        assert fake.llm.card.fingerprint in error["message"]
