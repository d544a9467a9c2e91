"""Speculative decoding over HTTP: its fields, its counts, and equal replies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onedraw.server.parsing import parse
from onedraw.server.protocol import ChatRequest
from onedraw.text.fake_tokenizer import fake_tokenizer
from tests.server.running import Served, fake_llm, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello."}]
LETTERS = {str(token): -100 for token in range(259) if not fake_tokenizer().token_bytes(token).isalpha()}
ASKED = {
    **{"max_tokens": 24, "ignore_eos": True, "seed": 11, "return_token_ids": True, "return_checksums": True},
    "logit_bias": LETTERS,  # a reply of ASCII letters, so that its text encodes to the same tokens
}


@pytest.fixture(scope="module")
def drafting() -> Iterator[Served]:
    """A server that drafts only from predictions, five tokens at a time, so that all counts are known."""
    with fake_llm(draft=("prediction",), draft_tokens=5) as llm, serving(llm) as served:
        yield served


def ask(served: Served, path: str, **more: object) -> tuple[dict, dict]:
    """Return the first choice and the numbers of kept and rejected drafts."""
    what = {"messages": HELLO} if path == CHAT else {"prompt": "Hello."}
    answer = served.post(path, **what | ASKED | more)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    return reply["choices"][0], reply["usage"]["completion_tokens_details"]


def said(served: Served, choice: dict) -> str:
    text = served.llm.tokenizer.decode(choice["token_ids"], skip_special=False)
    assert served.llm.encode(text, add_special=False) == tuple(choice["token_ids"]), "else it predicts something else"
    return text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_drafts_of_a_correct_prediction_are_kept_and_change_nothing(drafting: Served, path: str) -> None:
    plain, none = ask(drafting, path)
    assert none == {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    predicted, counted = ask(drafting, path, prediction={"type": "content", "content": said(drafting, plain)})
    assert predicted == plain
    # A step yields five drafts and one more token: 1 token, then 6 + 6 + 6 + 5 up to the requested length.
    assert counted == {"reasoning_tokens": 0, "accepted_prediction_tokens": 19, "rejected_prediction_tokens": 0}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_drafts_of_a_wrong_prediction_are_rejected_and_change_nothing(drafting: Served, path: str) -> None:
    plain, _ = ask(drafting, path)
    predicted, counted = ask(drafting, path, prediction={"type": "content", "content": "Nothing of the kind, ever."})
    assert predicted == plain
    assert counted["rejected_prediction_tokens"] >= 5


def test_speculation_false_drafts_nothing(drafting: Served) -> None:
    plain, _ = ask(drafting, CHAT)
    prediction = {"type": "content", "content": said(drafting, plain)}
    quiet, counted = ask(drafting, CHAT, prediction=prediction, speculation=False)
    assert quiet == plain
    assert counted == {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert ask(drafting, CHAT, prediction=prediction, speculation=True)[1]["accepted_prediction_tokens"] > 0


def test_a_stream_has_the_counts_of_the_whole_reply(drafting: Served) -> None:
    prediction = {"type": "content", "content": said(drafting, ask(drafting, CHAT)[0])}
    asked = ASKED | {"prediction": prediction, "stream_options": {"include_usage": True}}
    *_, last = drafting.chunks(CHAT, messages=HELLO, **asked)
    assert last["usage"]["completion_tokens_details"] == ask(drafting, CHAT, prediction=prediction)[1]


def test_drafts_after_a_stop_string_are_not_counted_as_kept(drafting: Served) -> None:
    """The stop string ends the reply inside a row whose drafts were all correct."""
    plain, _ = ask(drafting, COMPLETIONS)
    text = said(drafting, plain)
    stop = plain["text"][3]  # after one token, the drafts of the row are characters 1 to 5
    assert stop not in plain["text"][:3]
    stopped, counted = ask(drafting, COMPLETIONS, prediction={"type": "content", "content": text}, stop=stop)
    assert (stopped["text"], stopped["finish_reason"]) == (plain["text"][:3], "stop")
    assert stopped["token_ids"] == plain["token_ids"][:4]
    assert counted == {"reasoning_tokens": 0, "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}


def test_drafts_after_a_stop_id_are_not_counted_as_kept(drafting: Served) -> None:
    plain, _ = ask(drafting, COMPLETIONS)
    stop = plain["token_ids"][3]
    assert stop not in plain["token_ids"][:3]
    prediction = {"type": "content", "content": said(drafting, plain)}
    stopped, counted = ask(drafting, COMPLETIONS, prediction=prediction, stop_token_ids=[stop])
    assert stopped["token_ids"] == plain["token_ids"][:4]
    assert counted == {"reasoning_tokens": 0, "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}


def test_a_prediction_may_be_a_list_of_text_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    asked = {"messages": HELLO, "prediction": {"type": "content", "content": parts}}
    assert parse(ChatRequest, asked).request.options(logprobs=None).prediction == "one\ntwo"


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "model", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0]"),
        ({"type": "content", "content": "x", "length": 3}, "prediction.length"),
    ],
    ids=str,
)
def test_an_invalid_prediction_is_refused_by_name(fake: Served, prediction: object, param: str) -> None:
    answer = fake.post(CHAT, messages=HELLO, prediction=prediction)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
