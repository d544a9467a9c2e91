"""Reasoning over HTTP: its field, its token count and its budget."""

from __future__ import annotations

from typing import Any

import pytest

HELLO = [{"role": "user", "content": "Hello."}]
THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "seed": 5, "temperature": 1.0}


def ask(fake: Any, **options: Any) -> dict[str, Any]:
    answer = fake.post("/v1/chat/completions", messages=HELLO, **{"max_tokens": 40, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_reasoning_ends_at_its_budget_and_is_separate_from_the_content(fake: Any) -> None:
    reply = ask(fake, **THINKING, thinking_budget=12, return_token_ids=True)
    choice, closing = reply["choices"][0], fake.llm.encode("\n</think>\n\n", add_special=False)
    ids = choice["token_ids"]
    assert tuple(ids[12 : 12 + len(closing)]) == closing
    assert choice["message"]["reasoning_content"] == fake.llm.tokenizer.decode(ids[:12]).strip()
    assert choice["message"]["content"] == fake.llm.tokenizer.decode(ids[12 + len(closing) :]).lstrip()
    # The two line breaks after the marker are content.
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12 + len(closing) - 2


def test_reasoning_without_a_budget_lasts_until_the_end_of_the_reply(fake: Any) -> None:
    reply = ask(fake, **THINKING)
    assert reply["choices"][0]["message"]["content"] == ""
    assert reply["choices"][0]["message"]["reasoning_content"]
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 40


def test_the_joined_stream_equals_the_whole_reply(fake: Any) -> None:
    options = {**THINKING, "thinking_budget": 12, "max_tokens": 40}
    whole = ask(fake, **options)["choices"][0]
    said = {"reasoning_content": "", "content": ""}
    order = []
    for chunk in fake.chunks("/v1/chat/completions", messages=HELLO, **options):
        for name, text in chunk["choices"][0]["delta"].items():
            if name in said and text:
                said[name] += text
                order.append(name)
    assert said == {name: whole["message"][name] for name in said}
    assert order == sorted(order, reverse=True), "reasoning comes first"


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("high", True), ("minimal", True)])
def test_reasoning_effort_enables_and_disables_reasoning(fake: Any, effort: str, thinks: bool) -> None:
    message = ask(fake, reasoning_effort=effort, seed=3)["choices"][0]["message"]
    assert ("reasoning_content" in message) is thinks


def test_drafts_and_batches_do_not_change_reasoning(fake: Any) -> None:
    options = {**THINKING, "thinking_budget": 9, "n": 3, "return_token_ids": True, "return_checksums": True}
    plain = ask(fake, **options, speculation=False)["choices"]
    assert len({tuple(choice["token_ids"]) for choice in plain}) == 3
    predicted = plain[0]["message"]["reasoning_content"] + "\n</think>\n\n" + plain[0]["message"]["content"]
    assert ask(fake, **options, prediction={"type": "content", "content": predicted})["choices"] == plain


def test_a_negative_budget_is_refused(fake: Any) -> None:
    answer = fake.post("/v1/chat/completions", messages=HELLO, thinking_budget=-1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_budget")


def test_a_completion_with_a_thinking_budget_is_refused(fake: Any) -> None:
    answer = fake.post("/v1/completions", prompt="a", thinking_budget=5)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_budget")


def test_stop_strings_are_searched_in_the_content_only(fake: Any) -> None:
    """The closing text of reasoning ends with two line breaks; a stop string of two line breaks must not match it."""
    options = {**THINKING, "thinking_budget": 12, "max_tokens": 60, "return_token_ids": True}
    free = ask(fake, **options)["choices"][0]
    thought, answer = free["message"]["reasoning_content"], free["message"]["content"]
    assert len(answer) > 8
    spared = ask(fake, **options, stop=["\n\n", "</think>", thought[2:5]])["choices"][0]
    assert spared["message"]["reasoning_content"] == thought
    stop = answer[4:6]
    hit = ask(fake, **options, stop=[stop])["choices"][0]
    assert hit["message"]["content"] == answer[: answer.index(stop)]
    assert (hit["finish_reason"], hit["stop_reason"]) == ("stop", stop)
    assert hit["token_ids"] == free["token_ids"][: len(hit["token_ids"])]
    chunks = fake.chunks("/v1/chat/completions", messages=HELLO, **options, stop=[stop])
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == hit["message"]["content"]
