"""/v1/score: a reply has the logprobs of its generation, and what cannot be a reply is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from onedraw.llm.reply import Reply
from tests.server.running import Served

CHAT = [{"role": "user", "content": "Name three colours."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
BOTH = {"logprobs_mode": "both", "return_token_ids": True, "return_checksums": True, "seed": 5, "max_tokens": 24}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    "penalties": {
        **{"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3, "dry_multiplier": 0.8},
        **{"logit_bias": {"9": -4.0}, "bad_words": ["a"], "min_tokens": 30, "max_tokens": 40},
    },
    "schema": {"guided_json": SCHEMA, "max_tokens": 60},
}


def posted(served: Served, path: str, **body: Any) -> dict[str, Any]:
    reply = served.post(path, **body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_a_chat_reply_is_scored_as_it_was_generated(served: Served, name: str) -> None:
    body = {**BOTH, "messages": CHAT, "top_logprobs": 2, "logprob_token_ids": [7, 9], **OPTIONS[name]}
    whole = posted(served, "/v1/chat/completions", **body, logprobs=True)
    (choice,) = whole["choices"]
    content = choice["logprobs"]["content"]
    found = posted(served, "/v1/score", **{**body, "seed": 99}, reply_ids=choice["token_ids"])
    assert found["token_ids"] == choice["token_ids"]
    assert found["logprobs"] == [one["logprob"] for one in content]
    assert found["processed_logprobs"] == [one["processed_logprob"] for one in content]
    assert found["kept_masses"] == [one["kept_mass"] for one in content]
    assert found["tokens"] == [one["token"] for one in content]
    assert found["score_checksums"] == choice["score_checksums"]
    assert found["top_logprobs"] == [one["top_logprobs"] for one in content]
    assert all({7, 9} <= {one["id"] for one in row} and len(row) <= 4 for row in found["top_logprobs"])
    assert found["prompt_token_ids"] == choice["prompt_token_ids"]
    assert found["usage"] == {key: whole["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert found["finish_reason"] == ("stop" if choice["finish_reason"] == "stop" else "length")
    assert found["system_fingerprint"] == whole["system_fingerprint"]
    if name == "filters":
        assert any(mass < 1 for mass in found["kept_masses"])


def test_a_completion_is_scored_by_ids_by_text_and_from_a_cut(fake: Served) -> None:
    body = {**BOTH, "prompt": "The sea", "frequency_penalty": 0.4, "ignore_eos": True}
    (choice,) = posted(fake, "/v1/completions", **body, logprobs=1)["choices"]
    logprobs, ids = choice["logprobs"], choice["token_ids"]
    found = posted(fake, "/v1/score", **body, reply_ids=ids)
    assert found["logprobs"] == logprobs["token_logprobs"]
    assert found["processed_logprobs"] == logprobs["processed_token_logprobs"]
    assert found["kept_masses"] == logprobs["kept_masses"]
    rest = posted(fake, "/v1/score", **body, continue_ids=ids[:7], reply_ids=ids[7:])
    assert rest["logprobs"] == found["logprobs"][7:]
    assert rest["usage"]["completion_tokens"] == len(ids) - 7
    spelled = posted(fake, "/v1/score", prompt="The sea", reply=" is wide")
    assert "".join(spelled["tokens"]) == " is wide"
    assert "top_logprobs" not in spelled


def test_tokens_asked_for_by_id_have_the_same_logprobs_in_chats_completions_and_streams(fake: Served) -> None:
    body = {"temperature": 1.2, "top_k": 5, "seed": 3, "max_tokens": 12, "ignore_eos": True, "logprob_token_ids": [200, 65, 201]}
    for mode in ("raw", "processed"):
        body["logprobs_mode"] = mode
        (choice,) = posted(fake, "/v1/chat/completions", **body, messages=CHAT, logprobs=True)["choices"]
        rows = [{one["id"]: one["logprob"] for one in entry["top_logprobs"]} for entry in choice["logprobs"]["content"]]
        assert all(list(row) == [200, 65, 201] for row in rows)
        assert any(row[65] > -9999 for row in rows)
        assert (mode == "processed") == any(row[200] == -9999 for row in rows)
        whole = posted(fake, "/v1/chat/completions", **body, messages=CHAT, logprobs=True, top_logprobs=128)
        for row, entry in zip(rows, whole["choices"][0]["logprobs"]["content"], strict=True):
            everything = {one["id"]: one["logprob"] for one in entry["top_logprobs"]}
            assert len(everything) == len(entry["top_logprobs"])
            assert row.items() <= everything.items()
        (choice,) = posted(fake, "/v1/completions", **body, prompt="The sea", logprobs=0)["choices"]
        tops = choice["logprobs"]["top_logprobs"]
        named = zip(tops, choice["logprobs"]["tokens"], strict=True)
        chunks = fake.chunks("/v1/completions", **body, prompt="The sea", logprobs=0)
        streamed = [one["choices"][0]["logprobs"] for one in chunks if one["choices"] and one["choices"][0]["logprobs"]]
        assert [top for one in streamed for top in one["top_logprobs"]] == tops
        assert all({"b", "\x0c", "\r"} <= set(top) <= {"b", "\x0c", "\r", token} for top, token in named)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "logprob_token_ids": [1]}),
        ("/v1/completions", {"prompt": "a", "logprob_token_ids": [1]}),
        ("/v1/completions", {"prompt": "a", "logprobs": 0, "max_tokens": 0, "echo": True, "logprob_token_ids": [1]}),
        ("/v1/completions", {"prompt": "a", "logprobs": 0, "logprob_token_ids": [10**6]}),
        ("/v1/completions", {"prompt": "a", "logprobs": 0, "logprob_token_ids": [-1]}),
        ("/v1/completions", {"prompt": "a", "logprobs": 0, "logprob_token_ids": list(range(129))}),
        ("/v1/score", {"prompt": "a", "reply": "b", "logprob_token_ids": [10**6]}),
    ],
)
def test_token_ids_whose_logprobs_cannot_be_given_are_refused_by_name(fake: Served, path: str, body: dict[str, Any]) -> None:
    reply = fake.post(path, **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "logprob_token_ids", reply.text


def test_the_library_scores_a_reply(fake: Served) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.7, "min_tokens": 4}
    reply = fake.llm.generate("Well", seed=4, max_tokens=20, logprobs=0, logprobs_mode="both", **options)
    assert isinstance(reply, Reply)
    scored = fake.llm.score("Well", reply.token_ids, **options)
    assert scored.tokens == reply.tokens
    assert scored.text == reply.text


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": "a"}, "reply_ids", "send either reply or reply_ids"),
        ({"prompt": "a", "reply": "b", "reply_ids": [1]}, "reply_ids", "send either reply or reply_ids"),
        ({"reply": "b"}, "prompt", "send either messages or prompt"),
        ({"prompt": ["a", "b"], "reply": "b"}, "prompt", "only one prompt"),
        ({"prompt": "a", "reply": ""}, "reply_ids", "the reply is empty"),
        ({"prompt": "a", "reply_ids": [10**6]}, "reply_ids", "token id 1000000 is outside the vocabulary"),
        ({"prompt": "a", "reply_ids": [7, 8], "stop_token_ids": [7]}, "reply_ids", "which ends the reply, and others follow it"),
        ({"prompt": "a", "reply": "zz", "guided_json": SCHEMA}, "reply_ids", "which the response format"),
        ({"prompt": "a", "reply": "a stop b", "stop": "stop"}, "reply_ids", "with the stop string 'stop'"),
        ({"prompt": "a", "reply": "b", "n": 2}, "n", ""),
        ({"prompt": "a", "reply": "b", "stream": True}, "stream", ""),
        ({"prompt": "a", "reply_ids": [5] * 100_000}, "reply_ids", "more than the context"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(fake: Served, body: dict[str, Any], param: str, message: str) -> None:
    reply = fake.post("/v1/score", **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text
    assert message in reply.json()["error"]["message"]
