"""The `openai` client with every endpoint, on both backends."""

from __future__ import annotations

import asyncio

import openai
import pytest

HELLO = [{"role": "user", "content": "Say hello to the world."}]


def test_the_model_is_listed_with_what_a_client_needs_to_know(served):
    (model,) = served.client().models.list().data
    assert (model.id, model.object, model.owned_by) == (served.model, "model", "onedraw")
    assert model.max_model_len == served.llm.card.max_context
    assert model.fingerprint == served.llm.card.fingerprint
    assert model.defaults == dict(served.llm.card.defaults)
    assert served.client().models.retrieve(served.model) == model


def test_a_chat_completion_is_returned_whole(served):
    reply = served.client().chat.completions.create(model=served.model, messages=HELLO, max_tokens=12, seed=5)
    (choice,) = reply.choices
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.system_fingerprint == served.llm.card.fingerprint
    assert choice.message.role == "assistant"
    assert isinstance(choice.message.content, str)
    assert choice.finish_reason in ("stop", "length")
    assert choice.seed == 5
    assert reply.usage.prompt_tokens == len(served.llm.chat_prompt(HELLO).ids)
    assert 1 <= reply.usage.completion_tokens <= 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert 0 <= reply.usage.completion_tokens_details.accepted_prediction_tokens < reply.usage.completion_tokens
    assert 0 <= reply.usage.prompt_tokens_details.cached_tokens < reply.usage.prompt_tokens


def test_a_chat_completion_is_streamed(served):
    asked = {"model": served.model, "messages": HELLO, "max_tokens": 12, "seed": 5}
    whole = served.client().chat.completions.create(**asked)
    stream = list(served.client().chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == whole.choices[0].message.content
    assert stream[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert stream[-1].choices == []
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in stream[:-1])
    assert {chunk.object for chunk in stream} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in stream}) == 1


def test_a_completion_is_returned_whole_and_streamed(served):
    asked = {"model": served.model, "prompt": "Once upon a time", "max_tokens": 10, "seed": 3}
    whole = served.client().completions.create(**asked)
    stream = list(served.client().completions.create(**asked, stream=True))
    assert whole.object == "text_completion"
    assert whole.id.startswith("cmpl-")
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert stream[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_completion_has_sixteen_tokens_by_default(served):
    reply = served.client().completions.create(model=served.model, prompt="One", extra_body={"ignore_eos": True})
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (16, "length")


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_a_prompt_may_be_one_or_several_texts_or_token_lists(served, form):
    ids = list(served.llm.encode("Once upon"))
    forms = {"text": "Once upon", "texts": ["Once upon"] * 2, "ids": ids, "lists of ids": [ids, ids]}
    asked = {"model": served.model, "max_tokens": 4, "seed": 1, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    reply = served.client().completions.create(prompt=forms[form], **asked)
    alone = served.client().completions.create(prompt="Once upon", **asked)
    assert [choice.prompt_token_ids for choice in reply.choices] == [ids] * (2 if form in ("texts", "lists of ids") else 1)
    assert reply.choices[0].token_ids == alone.choices[0].token_ids


def test_every_choice_has_a_seed_that_reproduces_it(served):
    client = served.client()
    extra = {"return_token_ids": True, "ignore_eos": True}
    asked = {"model": served.model, "max_tokens": 6, "temperature": 1.0, "extra_body": extra}
    prompts = ["Once upon a time", "The sea"]
    reply = client.completions.create(prompt=prompts, n=2, seed=11, **asked)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[0].seed == 11
    assert len({choice.seed for choice in reply.choices}) == 4
    for choice in reply.choices:
        again = client.completions.create(prompt=prompts[choice.index // 2], seed=choice.seed, **asked)
        assert (again.choices[0].token_ids, again.choices[0].text) == (choice.token_ids, choice.text)


def test_a_reply_without_a_requested_seed_names_the_seed_that_reproduces_it(served):
    asked = {"model": served.model, "messages": HELLO, "max_tokens": 8, "temperature": 1.0}
    first = served.client().chat.completions.create(**asked).choices[0]
    again = served.client().chat.completions.create(**asked, seed=first.seed).choices[0]
    assert again.message.content == first.message.content


def test_usage_counts_a_prompt_once_for_several_choices(served):
    reply = served.client().chat.completions.create(
        model=served.model, messages=HELLO, max_tokens=5, n=3, extra_body={"ignore_eos": True}
    )
    assert reply.usage.prompt_tokens == len(served.llm.chat_prompt(HELLO).ids)
    assert reply.usage.completion_tokens == 15


def test_a_repeated_prompt_is_cached_and_gets_the_same_reply(served):
    asked = {"model": served.model, "prompt": "A long enough prompt to fill a few pages. " * 4, "max_tokens": 6, "seed": 2}
    first = served.client().completions.create(**asked, extra_body={"return_checksums": True, "ignore_eos": True})
    again = served.client().completions.create(**asked, extra_body={"return_checksums": True, "ignore_eos": True})
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert again.choices[0].score_checksums == first.choices[0].score_checksums
    assert len(set(first.choices[0].score_checksums)) == 6
    assert all(isinstance(checksum, str) and checksum.isdecimal() for checksum in first.choices[0].score_checksums)


def test_a_stop_string_ends_the_reply_and_is_named(served):
    client = served.client()
    asked = {"model": served.model, "prompt": "One two three", "max_tokens": 24, "seed": 4, "temperature": 1.0}
    free = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0]
    stop = next(character for character in free.text[3:] if character != "\ufffd")
    cut = client.completions.create(**asked, stop=[stop, "never said"], extra_body={"ignore_eos": True}).choices[0]
    assert cut.text == free.text.split(stop)[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_chat_logprobs_have_the_shape_of_openai(served):
    reply = served.client().chat.completions.create(
        model=served.model, messages=HELLO, max_tokens=4, seed=1, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True}
    )
    entries = reply.choices[0].logprobs.content
    assert len(entries) == 4
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert [top.logprob for top in entry.top_logprobs] == sorted((top.logprob for top in entry.top_logprobs), reverse=True)
        assert entry.top_logprobs[0].logprob >= entry.logprob
        if not entry.token.startswith("bytes:"):
            assert bytes(entry.bytes).decode() == entry.token


def test_completion_logprobs_have_the_shape_of_openai(served):
    reply = served.client().completions.create(
        model=served.model, prompt="Once upon a time", max_tokens=5, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
    )
    choice = reply.choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == 5
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert max(top.values()) == top[token] == logprob  # greedy: the sampled token is the most likely one
    assert logprobs.text_offset[0] == 0


def test_an_echoed_prompt_has_the_logprobs_of_the_same_tokens_when_generated(served):
    """A generated text sent back as a prompt with echo gets the logprobs that it was generated with."""
    client = served.client()
    prompt = list(served.llm.encode("Once upon a time"))
    extra = {"return_token_ids": True, "ignore_eos": True}
    said = client.completions.create(
        model=served.model, prompt=prompt, max_tokens=6, seed=8, logprobs=0, extra_body=extra
    ).choices[0]
    scored = client.completions.create(
        model=served.model, prompt=prompt + said.token_ids, max_tokens=0, echo=True, logprobs=0, extra_body=extra
    )
    logprobs = scored.choices[0].logprobs
    assert scored.usage.completion_tokens == 0
    assert scored.choices[0].finish_reason == "length"
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == len(prompt) + 6
    assert logprobs.token_logprobs[len(prompt) :] == pytest.approx(said.logprobs.token_logprobs, abs=1e-5)


def test_prompt_logprobs_are_those_of_the_echo_in_chats_and_completions(served):
    """In vLLM's shape: beside `choices` in a chat, in each choice of a completion."""
    chat = served.post("/v1/chat/completions", messages=HELLO, max_tokens=2, n=2, prompt_logprobs=2, return_token_ids=True).json()
    prompt, found = chat["prompt_token_ids"], chat["prompt_logprobs"]
    echo = {"echo": True, "logprobs": 5, "prompt_logprobs": 2, "n": 2}
    said = served.post("/v1/completions", prompt=prompt, max_tokens=2, **echo).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in said] == [found, found]
    assert len(found) == len(prompt)
    assert found[0] is None
    ranks = []
    for token, shown, logprob, top in zip(
        prompt[1:],
        found[1:],
        *(said[0]["logprobs"][name][1 : len(prompt)] for name in ("token_logprobs", "top_logprobs")),
        strict=True,
    ):
        assert shown[str(token)]["logprob"] == logprob
        likeliest = [one for one in shown.values() if one["rank"] in (1, 2)]
        assert sorted((one["rank"], one["logprob"]) for one in likeliest) == list(enumerate(sorted(top.values())[:-3:-1], 1))
        assert {one["decoded_token"] for one in shown.values()} <= set(top)
        assert len(shown) == 2 + (shown[str(token)]["rank"] is None)
        ranks.append(shown[str(token)]["rank"])
    assert None in ranks
    chunks = served.chunks("/v1/chat/completions", messages=HELLO, max_tokens=2, n=2, prompt_logprobs=2)
    assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [found]


def test_the_echoed_prompt_comes_before_the_reply(served):
    asked = {"model": served.model, "prompt": "Once upon", "max_tokens": 5, "seed": 9}
    plain = served.client().completions.create(**asked).choices[0]
    echoed = served.client().completions.create(**asked, echo=True).choices[0]
    assert echoed.text == "Once upon" + plain.text


def test_text_offsets_point_to_the_tokens_of_an_echoed_prompt(served):
    choice = (
        served.client()
        .completions.create(model=served.model, prompt="Grüße, 世界!", max_tokens=0, echo=True, logprobs=0)
        .choices[0]
    )
    assert choice.text == "Grüße, 世界!"
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text.startswith(token, offset)


def test_an_echo_without_new_tokens_needs_no_logprobs(served):
    choice = served.client().completions.create(model=served.model, prompt="Just this", max_tokens=0, echo=True).choices[0]
    assert (choice.text, choice.logprobs, choice.finish_reason) == ("Just this", None, "length")


def test_temperature_zero_and_top_k_one_give_the_same_reply(served):
    asked = {"model": served.model, "messages": HELLO, "max_tokens": 8}
    cold = served.client().chat.completions.create(**asked, temperature=0)
    narrow = served.client().chat.completions.create(**asked, temperature=1.5, extra_body={"top_k": 1})
    assert cold.choices[0].message.content == narrow.choices[0].message.content


def test_all_sampling_parameters_are_accepted_together(served):
    extra = {
        "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "dry_multiplier": 0.5, "dry_base": 1.5, "dry_allowed_length": 3,
        "dry_range": 64, "dry_sequence_breakers": ["\n"], "min_tokens": 2, "stop_token_ids": [7], "bad_words": ["darn"],
        "logprobs_mode": "processed", "skip_special_tokens": False, "return_token_ids": True, "ignore_eos": False,
    }  # fmt: skip
    reply = served.client().chat.completions.create(
        model=served.model, messages=HELLO, max_completion_tokens=6, temperature=0.8, top_p=0.9, frequency_penalty=0.2,
        presence_penalty=0.1, logit_bias={"5": -100, "6": 3.5}, seed=1, n=2, stop="\n\n\n", logprobs=True, extra_body=extra,
    )  # fmt: skip
    for choice in reply.choices:
        assert 2 <= len(choice.token_ids) <= 6
        assert 5 not in choice.token_ids


def test_a_strong_logit_bias_decides_the_token(served):
    reply = served.client().completions.create(
        model=served.model,
        prompt="Say",
        max_tokens=3,
        temperature=0,
        logit_bias={"9": 100},
        extra_body={"return_token_ids": True},
    )
    assert reply.choices[0].token_ids == [9, 9, 9]


def test_an_excluded_token_has_a_finite_logprob(served):
    """JSON has no infinity, so -9999 is returned."""
    extra = {"logprobs_mode": "processed", "top_k": 1, "ignore_eos": True}
    reply = served.client().chat.completions.create(
        model=served.model, messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=3, extra_body=extra
    )
    for entry in reply.choices[0].logprobs.content:
        assert entry.logprob == pytest.approx(0, abs=1e-6)
        assert {top.logprob for top in entry.top_logprobs} <= {entry.logprob, -9999.0}


def test_eight_concurrent_clients_get_the_replies_of_one_alone(served):
    asked = [{"model": served.model, "prompt": f"Story {i}:", "max_tokens": 6, "seed": i} for i in range(8)]
    alone = [served.client().completions.create(**request).choices[0].text for request in asked]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            replies = await asyncio.gather(*(client.completions.create(**request) for request in reversed(asked)))
        return [reply.choices[0].text for reply in reversed(replies)]

    assert asyncio.run(together()) == alone


def test_detokenize_inverts_tokenize(served):
    text = "Grüße, 世界 🌍\n\tif x == 1:"
    answer = served.post("/tokenize", prompt=text, add_special_tokens=False).json()
    assert answer == {
        "tokens": list(served.llm.encode(text, add_special=False)),
        "count": len(answer["tokens"]),
        "max_model_len": served.llm.card.max_context,
    }
    assert served.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": text}


def test_tokenizing_a_chat_gives_the_prompt_tokens_of_a_chat_completion(served):
    tokens = served.post("/tokenize", messages=HELLO).json()["tokens"]
    reply = served.post("/v1/chat/completions", messages=HELLO, max_tokens=1, return_token_ids=True).json()
    assert reply["choices"][0]["prompt_token_ids"] == reply["prompt_token_ids"] == tokens


def test_text_parts_are_joined_with_line_breaks(served):
    parts = [{"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]}]
    joined = [{"role": "user", "content": "One\nTwo"}]
    assert served.post("/tokenize", messages=parts).json() == served.post("/tokenize", messages=joined).json()


def test_health_and_metrics_return_200(served):
    assert served.get("/health").json() == {"status": "ok"}
    assert "num_requests_running" in served.get("/metrics").text
