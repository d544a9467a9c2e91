"""`onedraw bench`: measured values and their summary."""

from __future__ import annotations

import re

import pytest

from onedraw.build.llm import build_llm
from onedraw.cli.bench import BenchRun, Prompts, Timing, constrained_options, measured_options, summarise
from onedraw.cli.main import parse
from onedraw.engine.stats import Stats
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.settings import Settings
from tests.cli.running import FAKE, Terminal


def test_every_batch_size_has_its_line(terminal: Terminal) -> None:
    given = ("bench", *FAKE, "--batch", "1,3", "--prompt-tokens", "20", "--new-tokens", "6", "--repeats", "2")
    report = terminal.json(*given)
    assert [line["batch"] for line in report["batches"]] == [1, 3]
    for line in report["batches"]:
        assert line["first_token_ms"] > 0
        assert line["tokens_per_second"] > 0
        assert line["inter_token_p99_ms"] >= line["inter_token_ms"]
    assert terminal.run(*given, "--draft", "none") == 0
    assert terminal.out.splitlines()[1].split() == [
        "batch",
        "first",
        "token",
        "ms",
        "inter-token",
        "ms",
        "p99",
        "ms",
        "tokens/s",
        "decode",
        "tokens/s",
    ]


def test_accepted_drafts_have_their_own_columns(terminal: Terminal) -> None:
    """A strong bias makes the reply repeat one token, so that n-gram drafts are found."""
    given = ("bench", *FAKE, "--batch", "2", "--prompt-tokens", "8", "--new-tokens", "24", "--repeats", "2")
    given = (*given, "--temperature", "0", "--logit-bias", "72=100", "--draft", "ngram", "--draft-tokens", "3")
    (line,) = terminal.json(*given)["batches"]
    assert 0 < line["accepted_tokens"] <= line["draft_tokens"]
    assert line["tokens_per_turn"] == pytest.approx(96 / (96 - line["accepted_tokens"]))
    assert line["turns_per_second"] > 0
    assert terminal.run(*given) == 0
    heads, _, cells = terminal.out.splitlines()[1:4]
    assert heads.endswith("accepted/drafts  tokens/step  steps/s")
    assert f"{line['accepted_tokens']}/{line['draft_tokens']}" in cells


@pytest.mark.parametrize("given", [("--guided-json",), ("--guided-json", "1"), ("--logprobs", "5")])
def test_constrained_replies_and_replies_with_logprobs_run_to_their_full_length(
    given: tuple[str, ...], terminal: Terminal
) -> None:
    sizes = (
        "--batch",
        "3",
        "--prompt-tokens",
        "8",
        "--new-tokens",
        "30",
        "--repeats",
        "1",
        "--draft",
        "none",
        "--temperature",
        "1",
    )
    (line,) = terminal.json("bench", *FAKE, *sizes, *given)["batches"]
    assert line["turns_per_second"] / line["tokens_per_second"] == pytest.approx(30 / 90)


def test_a_reply_of_the_benchmark_follows_its_schema_and_never_completes_it() -> None:
    options = RequestOptions.of(max_tokens=120, temperature=1.0, seed=3)
    with build_llm(Settings(model="fake", backend="fake")) as llm:
        generation = make_generation(constrained_options(options), llm=llm, prompt=(65, 66), label="bench")
        pieces = list(llm.pieces(llm.prepare(generation)))
    text = "".join(piece.text for piece in pieces)
    assert re.match(r'\s*\[\s*\{\s*"name"\s*:\s*"', text), text
    assert pieces[-1].finish == "length"


def test_the_engine_is_sized_for_the_requested_batch(terminal: Terminal) -> None:
    report = terminal.json("bench", *FAKE, "--batch", "12", "--prompt-tokens", "4000", "--new-tokens", "2", "--repeats", "1")
    assert report["batches"][0]["batch"] == 12


def test_more_requests_may_wait_than_run(terminal: Terminal) -> None:
    sizes = ("--batch", "300", "--prompt-tokens", "4", "--new-tokens", "2", "--repeats", "1")
    (line,) = terminal.json("bench", *FAKE, "--max-batch", "1", *sizes)["batches"]
    assert line["batch"] == 300
    assert terminal.run("bench", *FAKE, "--max-batch", "0", *sizes) == 2
    assert "--max-batch" in terminal.err


def test_figures_are_medians_and_rates() -> None:
    even = Timing(first=1.0, gaps=(0.1,) * 10, tokens=11)
    late = Timing(first=3.0, gaps=(0.1,) * 9 + (0.5,), tokens=11)
    counted = Stats(steps=9, completion_tokens=22, draft_tokens=16, accepted_tokens=11)
    measure = summarise(2, [BenchRun(4.5, (even, late), counted)])
    assert measure.first_token_ms == pytest.approx(2000)
    assert measure.inter_token_ms == pytest.approx(100)
    assert measure.inter_token_p99_ms == pytest.approx(500)
    assert measure.tokens_per_second == pytest.approx(22 / 4.5)
    assert (measure.draft_tokens, measure.accepted_tokens) == (16, 11)
    assert measure.tokens_per_turn == pytest.approx(2.0)
    assert measure.turns_per_second == pytest.approx(2.0)


def test_the_decode_rate_counts_only_the_time_when_all_requests_decode() -> None:
    first = Timing(first=1.0, gaps=(0.5,) * 8, tokens=9)  # tokens until 5.0
    second = Timing(first=2.0, gaps=(0.5,) * 8, tokens=9)  # until 6.0
    assert summarise(2, [BenchRun(6.0, (first, second), Stats())]).decode_tokens_per_second == pytest.approx(4.0)


def test_a_reply_of_one_token_has_no_gap() -> None:
    measure = summarise(1, [BenchRun(1.0, (Timing(first=1.0, gaps=(), tokens=1),), Stats())])
    assert (measure.inter_token_ms, measure.decode_tokens_per_second) == (0.0, 0.0)


def test_no_two_prompts_share_a_prefix() -> None:
    with build_llm(Settings(model="fake", backend="fake")) as llm:
        prompts = Prompts(llm, 40)
        made = [prompts.next() for _ in range(8)]
    assert len({prompt[:8] for prompt in made}) == 8
    assert {len(prompt) for prompt in made} == {40}


@pytest.mark.parametrize("given", [("--batch", "0"), ("--new-tokens", "0"), ("--repeats", "-1"), ("--batch", "")])
def test_an_empty_measurement_is_refused(terminal: Terminal, given: tuple[str, ...]) -> None:
    assert terminal.run("bench", *FAKE, *given) == 2
    assert "must be at least 1" in terminal.err


def test_recorded_replies_are_replayed_as_drafts_with_a_set_acceptance(terminal: Terminal) -> None:
    given = ("--batch", "1", "--prompt-tokens", "8", "--new-tokens", "24", "--repeats", "1", "--draft-tokens", "6")
    report = terminal.json("bench", *FAKE, *given, "--draft", "replay:3")
    (measure,) = report["batches"]
    assert measure["tokens_per_turn"] > 3
    assert measure["accepted_tokens"] < measure["draft_tokens"]  # some recorded drafts are replaced by wrong tokens
    assert measure["plain_tokens_per_second"] > 0
    assert terminal.run("bench", *FAKE, *given, "--draft", "replay:many") == 2


def test_values_that_were_not_given_are_neutral_and_never_a_models_own() -> None:
    options = measured_options(parse(("bench", *FAKE, "--top-p", "0.95")))
    assert (options.temperature, options.top_k, options.top_p, options.repetition_penalty) == (1.0, 0, 0.95, 1.0)
