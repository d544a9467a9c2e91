"""Every dataclass field has a flag, and parsed flags become those dataclasses."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

import pytest

from onedraw.cli import flags
from onedraw.cli.main import UsageError, command_parser
from onedraw.errors import BadSetting
from onedraw.llm.llm import LLM
from onedraw.llm.request_options import RequestOptions
from onedraw.settings import Settings, size_in_bytes


def parsed(*given: str, command: str = "generate") -> argparse.Namespace:
    return command_parser(command).parse_intermixed_args(["tiny", *given])


def test_every_request_option_is_a_flag_of_generate() -> None:
    spellings = {a.dest for a in command_parser("generate")._actions if a.option_strings}
    assert {f.name for f in fields(RequestOptions)} <= spellings


def test_every_setting_but_the_model_is_a_flag_of_serve() -> None:
    spellings = {a.dest for a in command_parser("serve")._actions if a.option_strings}
    assert {f.name for f in fields(Settings)} - {"model"} <= spellings


def test_a_field_without_a_line_of_help_is_an_error() -> None:
    @dataclass
    class Grown:
        known: int = 1
        forgotten: int = 2

    with pytest.raises(AssertionError, match="forgotten"):
        flags._flags(Grown, {"known": "a line"})


def test_without_flags_every_value_is_the_default() -> None:
    arguments = parsed()
    assert flags.read_settings(arguments) == Settings.of(model="tiny")
    assert flags.read_request_options(arguments) == RequestOptions()


def test_flags_become_settings(tmp_path: Path) -> None:
    settings = flags.read_settings(
        parsed(
            *("--max-context", "99", "--max-batch", "3", "--turn-tokens", "32", "--page-size", "8", "--kv-memory", "1.5GiB"),
            *("--threads", "2", "--dtype", "bf16", "--device", "cuda:1", "--backend", "fake", "--cache-dir", "somewhere"),
            *("--no-prefix-cache", "--no-self-check", "--draft", "ngram", "--draft", str(tmp_path), "--draft-tokens", "3"),
            *("--tree-budget", "24", "--trace-verify"),
        )
    )
    assert settings == Settings(
        model="tiny",
        max_context=99,
        max_batch=3,
        turn_tokens=32,
        page_size=8,
        kv_memory=3 * 2**29,
        threads=2,
        dtype="bf16",
        device="cuda:1",
        backend="fake",
        cache_dir=Path("somewhere"),
        prefix_cache=False,
        self_check=False,
        draft=("ngram", str(tmp_path)),
        draft_tokens=3,
        tree_budget=24,
        trace_verify=True,
    )


def test_flags_become_request_options() -> None:
    options = flags.read_request_options(
        parsed(
            *("--temperature", "0.5", "--top-k", "40", "--stop", "END", "--stop", "\n", "--stop-token-ids", "3,4"),
            *("--logit-bias", "7=-inf", "--logit-bias", "5=1.5", "--ignore-eos", "--bad-words", "no", "--seed", "0"),
            *("--logprobs", "2", "--logprobs-mode", "processed", "--no-skip-special-tokens", "--dry-sequence-breakers", "."),
            *("--prediction", "so it is", "--no-speculation"),
        )
    )
    assert options == RequestOptions(
        temperature=0.5,
        top_k=40,
        stop=("END", "\n"),
        stop_token_ids=(3, 4),
        logit_bias={7: float("-inf"), 5: 1.5},
        ignore_eos=True,
        bad_words=("no",),
        seed=0,
        logprobs=2,
        logprobs_mode="processed",
        skip_special_tokens=False,
        dry_sequence_breakers=(".",),
        prediction="so it is",
        speculation=False,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--kv-memory", "lots"), "not a size: 'lots'"),
        (("--prompt-ids", "1,x"), "not a list of token ids"),
        (("--logit-bias", "5"), "not ID=VALUE"),
        (("--logit-bias", "a=b"), "not ID=VALUE"),
        (("--dtype", "f8"), "invalid choice: 'f8'"),
        (("--temp", "1"), "unknown option --temp: did you mean --temperature"),
        (("--draft-tokens", "many"), "not a number: 'many'; write for example 4, or auto"),
        (("--draft-window", "64"), "verified with full attention"),
        (("--draft-window",), "could change the answer"),
    ],
)
def test_a_bad_value_is_refused_with_a_message(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parsed(*given)


@pytest.mark.parametrize("text", ["inf", "1e400", "nan", "-", "GiB", ""])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(BadSetting, match="not a size"):
        size_in_bytes(text)


def test_an_impossible_number_of_threads_is_refused() -> None:
    with pytest.raises(BadSetting, match="--threads: must be at most"):
        Settings(threads=10**12)


def test_auto_is_the_default_number_of_drafts() -> None:
    assert flags.read_settings(parsed("--draft-tokens", "auto")) == flags.read_settings(parsed())


@pytest.mark.parametrize("command", ["generate", "serve", "chat", "bench", "inspect", "prove"])
def test_every_command_refuses_a_verification_window(command: str) -> None:
    with pytest.raises(UsageError, match="full attention"):
        parsed("--draft-window", "64", command=command)


def test_learning_is_bounded_and_has_a_folder_of_its_own(tmp_path: Path) -> None:
    llm, folder = cast(LLM, None), str(tmp_path / "one")
    assert flags.recorded(llm, parsed(command="serve")) is llm, "nothing is kept unless it is asked for"
    for given, complaint in (
        (["--learn-draft-size", "1MiB"], "only with --learn-draft"),
        (["--learn-draft", folder, "--learn-draft-size", "10"], "at least 65536 bytes"),
        (["--learn-draft", folder, "--record", folder], "another folder than that of --record"),
    ):
        with pytest.raises(BadSetting, match=complaint):
            flags.recorded(llm, parsed(*given, command="serve"))
