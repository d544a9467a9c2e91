"""`onedraw generate`: a prompt in, the reply out, as text or as one object."""

from __future__ import annotations

import io
import math

import pytest

from tests.cli.running import FAKE, Terminal

SHORT = ("--max-tokens", "12", "--ignore-eos")


def test_the_streamed_text_is_the_text_of_the_object(terminal: Terminal) -> None:
    whole = terminal.json("generate", *FAKE, "hello", *SHORT, "--seed", "3")
    assert terminal.run("generate", *FAKE, "hello", *SHORT, "--seed", "3") == 0
    assert terminal.out == whole["text"] + "\n"


def test_the_object_has_everything_a_replay_needs(terminal: Terminal) -> None:
    first = terminal.json("generate", *FAKE, "hello", *SHORT)
    assert first["finish_reason"] == "length"
    assert first["usage"] == {"prompt_tokens": len(first["prompt_ids"]), "completion_tokens": 12, "cached_tokens": 0}
    ids = ",".join(map(str, first["prompt_ids"]))
    again = terminal.json("generate", *FAKE, "--prompt-ids", ids, *SHORT, "--seed", str(first["seed"]))
    assert again == first


def test_without_a_seed_two_replies_have_two_seeds(terminal: Terminal) -> None:
    seeds = {terminal.json("generate", *FAKE, "hello", "--max-tokens", "1")["seed"] for _ in range(2)}
    assert len(seeds) == 2


def test_the_prompt_may_come_from_stdin(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    given = terminal.json("generate", *FAKE, "hello\n", *SHORT, "--seed", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert terminal.json("generate", *FAKE, "-", *SHORT, "--seed", "1") == given


def test_chat_goes_through_the_template(terminal: Terminal) -> None:
    plain = terminal.json("generate", *FAKE, "hello", *SHORT)["prompt_ids"]
    chat = terminal.json("generate", *FAKE, "hello", "--chat", *SHORT)["prompt_ids"]
    system = terminal.json("generate", *FAKE, "hello", "--chat", "--system", "be brief", *SHORT)["prompt_ids"]
    assert len(plain) < len(chat) < len(system)


def test_several_replies_are_separate(terminal: Terminal) -> None:
    whole = terminal.json("generate", *FAKE, "hello", *SHORT, "--seed", "5", "--n", "3")
    texts, seeds = ([c[name] for c in whole["choices"]] for name in ("text", "seed"))
    assert len(set(seeds)) == 3
    assert terminal.run("generate", *FAKE, "hello", *SHORT, "--seed", "5", "--n", "3") == 0
    assert terminal.out == "".join(f"--- {i} (seed {s})\n{t}\n" for i, (s, t) in enumerate(zip(seeds, texts, strict=True)))


def test_logprobs_and_checksums_are_returned_if_requested(terminal: Terminal) -> None:
    whole = terminal.json("generate", *FAKE, "hello", *SHORT, "--temperature", "0", "--logprobs", "2", "--checksums")
    assert len(whole["logprobs"]) == len(whole["checksums"]) == 12
    for token, scored in zip(whole["token_ids"], whole["logprobs"], strict=True):
        assert scored["top"][0] == {"id": token, "logprob": scored["logprob"]}
        assert math.exp(scored["logprob"]) <= 1
    bare = terminal.json("generate", *FAKE, "hello", *SHORT, "--temperature", "0")
    assert bare["logprobs"] is None
    assert bare["checksums"] is None
    assert bare["token_ids"] == whole["token_ids"]


def test_prompt_logprobs_alone_sample_nothing(terminal: Terminal) -> None:
    whole = terminal.json("generate", *FAKE, "hello", "--max-tokens", "0", "--prompt-logprobs", "1")
    assert whole["token_ids"] == []
    assert len(whole["prompt_logprobs"]) == len(whole["prompt_ids"]) - 1


def test_the_default_length_is_reduced_to_a_small_context(terminal: Terminal) -> None:
    whole = terminal.json("generate", *FAKE, "hello", "--ignore-eos", "--max-context", "32")
    assert len(whole["prompt_ids"]) + len(whole["token_ids"]) == 32


def test_a_requested_length_over_the_context_ends_at_the_context(terminal: Terminal) -> None:
    given = ("generate", *FAKE, "--prompt-ids", "1,2,3", "--max-tokens", "40", "--max-context", "32", "--ignore-eos")
    reply = terminal.json(*given)
    assert len(reply["token_ids"]) == 29
    assert reply["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "give either PROMPT (or - for stdin) or --prompt-ids"),
        (("x", "--prompt-ids", "1"), "give either PROMPT (or - for stdin) or --prompt-ids"),
        (("--prompt-ids", "1", "--chat"), "--chat needs a text prompt"),
        (("x", "--system", "y"), "--system needs --chat"),
        (("",), "the prompt is empty"),
        (("--prompt-ids", "1,99999"), "token id 99999 is outside the vocabulary"),
        (("x", "--top-p", "0"), "top_p: must be"),
        (("x", "--temperature", "nan"), "temperature: must be"),
        (("x", "--n", "0"), "n: must be at least 1"),
    ],
)
def test_a_usage_error_is_one_line_and_no_output(terminal: Terminal, given: tuple[str, ...], message: str) -> None:
    assert terminal.run("generate", *FAKE, *given) == 2
    assert terminal.out == ""
    assert terminal.err.startswith("onedraw: ")
    assert message in terminal.err
    assert terminal.err.count("\n") == 1


def test_every_verified_draft_can_be_traced(terminal: Terminal) -> None:
    given = ("generate", *FAKE, "la la la la", *SHORT, "--temperature", "0", "--logit-bias", "72=100", "--draft-tokens", "2")
    given = (*given, "--seed", "1")
    quiet = terminal.json(*given)
    assert "verify" not in terminal.err
    assert terminal.json(*given, "--trace-verify") == quiet
    walks = [line for line in terminal.err.splitlines() if line.startswith("verify ")]
    assert any(line.endswith(", kept") for line in walks)
    assert terminal.run(*given, "--trace-verify", "--no-speculation") == 0
    assert "verify" not in terminal.err
