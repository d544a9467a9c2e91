"""`token_details` are sent only on request, are equal in streams and whole replies, and agree with the usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from onedraw.text.fake_tokenizer import fake_tokenizer
from tests.server.running import Served, fake_llm, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello."}]
LETTERS = {str(token): -100 for token in range(259) if not fake_tokenizer().token_bytes(token).isalpha()}
ASKED: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "seed": 4, "temperature": 0.7, "logit_bias": LETTERS}


@pytest.fixture(scope="module")
def drafting() -> Iterator[Served]:
    with fake_llm(draft=("prediction",), draft_tokens=4) as llm, serving(llm) as served:
        yield served


def what(path: str) -> dict[str, Any]:
    return {"messages": HELLO} if path == CHAT else {"prompt": "Hello."}


def predicted(served: Served, path: str) -> dict[str, Any]:
    """A request whose prediction is right at first and then wrong, so that drafts are kept and rejected."""
    ids = served.post(path, **what(path), **ASKED, return_token_ids=True).json()["choices"][0]["token_ids"]
    text = served.llm.tokenizer.decode(ids, skip_special=False)
    return {"prediction": {"type": "content", "content": text[:11] + "something else entirely, which nobody said"}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_token_details_agree_with_usage_and_text(drafting: Served, path: str) -> None:
    more = predicted(drafting, path)
    reply = drafting.post(path, **what(path), **ASKED, **more, return_token_details=True, return_token_ids=True).json()
    (choice,) = reply["choices"]
    details = choice["token_details"]
    counted = reply["usage"]["completion_tokens_details"]
    assert [detail["id"] for detail in details] == choice["token_ids"]
    assert sum(detail["kept"] for detail in details) == counted["accepted_prediction_tokens"] > 0
    assert sum(detail["rejected"] for detail in details) == counted["rejected_prediction_tokens"] > 0
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert "".join(detail["text"] for detail in details) == text
    assert not any(detail["rejected"] for detail in details if detail["kept"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_whole_reply_has_the_details_of_its_stream(drafting: Served, path: str) -> None:
    asked = {**what(path), **ASKED, **predicted(drafting, path), "return_token_details": True}
    whole = drafting.post(path, **asked).json()["choices"][0]["token_details"]
    chunks = [chunk["choices"][0] for chunk in drafting.chunks(path, **asked)]
    streamed = [detail for choice in chunks for detail in choice["token_details"]]
    assert streamed == whole
    turns = [choice["token_details"] for choice in chunks if choice["token_details"]]
    assert max(len(turn) for turn in turns) == 5, "four drafts and a token of its own come in one chunk"


def test_token_details_are_sent_only_on_request(drafting: Served) -> None:
    assert "token_details" not in drafting.post(CHAT, **what(CHAT), **ASKED).json()["choices"][0]


def test_without_speculation_no_token_is_marked_as_drafted(drafting: Served) -> None:
    asked = {**what(CHAT), **ASKED, **predicted(drafting, CHAT), "return_token_details": True}
    drafted = drafting.post(CHAT, **asked).json()["choices"][0]
    plain = drafting.post(CHAT, **asked, speculation=False).json()["choices"][0]
    assert not any(detail["kept"] or detail["rejected"] for detail in plain["token_details"])
    assert [d["id"] for d in plain["token_details"]] == [d["id"] for d in drafted["token_details"]]


def test_a_stop_string_among_kept_drafts_ends_the_details_where_the_text_ends(drafting: Served) -> None:
    asked = {**what(COMPLETIONS), **ASKED, **predicted(drafting, COMPLETIONS), "return_token_details": True}
    text = drafting.post(COMPLETIONS, **asked).json()["choices"][0]["text"]
    stopped = drafting.post(COMPLETIONS, **asked, stop=text[5:8]).json()
    details = stopped["choices"][0]["token_details"]
    assert len(details) == stopped["usage"]["completion_tokens"] == 8
    assert sum(d["kept"] for d in details) == stopped["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
