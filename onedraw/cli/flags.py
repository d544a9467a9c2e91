"""Command-line options made from the fields of Settings and RequestOptions, and the way back from parsed arguments.

A field without a line in the help tables below makes every command fail, so no field can be forgotten. The options of `--record`
are here as well, because several commands share them.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onedraw.errors import BadSetting
from onedraw.llm.request_options import RequestOptions
from onedraw.settings import ACTIVATION_DTYPES, DTYPES, KV_DTYPES, Settings, size_in_bytes

if TYPE_CHECKING:
    from onedraw.contract.record import RecordWriter
    from onedraw.llm.llm import LLM

# The help text of each setting. A switch that is on by default becomes the option --no-…, so its text says what turning it off
# does.
SETTINGS_HELP: Mapping[str, str] = {
    "served_name": "model name in the API (default: MODEL as given)",
    "backend": "torch, xla (through jax), or fake (no weights, for testing clients)",
    "xla_platform": "platform for --backend xla; auto: jax decides",
    "device": "auto, cpu, some of the CPU's cores (cpu:0-3), cuda, cuda:0 …",
    "devices": "devices to split the layers over, in this order, like cuda:0,cuda:1,cpu; a device may be named twice; "
    "ray:NODE/cuda:0 is a device on a node of a Ray cluster, by its name, address or number; the last must be of this machine",
    "split": "how to split: auto (by memory, accelerators first), layers per device (24,8) or shares (0.75,0.25)",
    "overlap": "run several steps at once on a split, each with its own requests; auto: if all devices are of one kind and none "
    "is named twice, as in cuda:0,cuda:1 or cpu:0-7,cpu:8-15",
    "ahead": "submit the next decode step before the host has read the tokens of the current one; auto: on GPUs with CUDA graphs",
    "dtype": "dtype of weights and matrix products; packed: weights stay quantized; auto: packed if the file is narrower and a "
    "kernel exists (CPU, NVIDIA from sm60 on, most AMD), otherwise the device's default",
    "cpu_activations": "activations for packed weights on a CPU: int8 (rounded per 32 numbers) or f32 (exact, slower)",
    "activation_dtype": "dtype of the residual stream, also between devices; auto: the one of the weakest device "
    "(default: ONEDRAW_ACTIVATION_DTYPE, or auto)",
    "max_context": "longest sequence in tokens, prompt and reply (default: the model's, if memory allows)",
    "max_batch": "sequences running at once (default: 8 on a CPU, up to 64 on GPUs, by their memory)",
    "turn_tokens": "token budget of one engine step (default: 512 on a CPU, 1024 or 8192 on GPUs, by their memory)",
    "step_seconds": "how long a step may compute prompts while replies are generated, which wait for its end; 0: no limit",
    "page_size": "positions per KV page; a divisor of 64",
    "kv_memory": "memory for KV pages, like 512MiB or 2GiB",
    "kv_dtype": "dtype of the KV cache; fp8 and int8 store 8 bits with a scale per token and head, half the bytes of bf16, and "
    "int4 stores 4 bits; bf16 and f16 may be combined with products in f32; auto: the dtype of the products, or f16 with packed "
    "weights on a CPU (default: ONEDRAW_KV_DTYPE, or auto)",
    "state_dtype": "dtype of recurrent state; only f32 keeps answers exact",
    "draft_memory": "memory for rolling back drafts on recurrent layers, like 1GiB; it limits the drafts of a step",
    "checkpoint_memory": "memory for checkpoints of prompts (recurrent state, last logits), reused by equal prefixes; 0: off",
    "threads": "CPU threads (default: all cores)",
    "prefix_cache": "disable the prefix cache; it never changes an answer, only the time it takes",
    "scheduling_policy": "who runs next if not all requests fit: fair (callers in turn, then the requests of a caller; running "
    "replies of whoever holds most are preempted) or fcfs (strict order of arrival)",
    "queue_limit": "requests that may wait before new ones are refused",
    "draft": "drafters for speculative decoding: auto, none, ngram, prediction, mtp (the model's own head), or the path or "
    "hub id of a drafter or draft model; repeatable (default: auto: prediction, ngram, and the drafter that ships or was "
    "pulled with the model)",
    "draft_tokens": "draft tokens per sequence and step; auto: as many as pay off (default: auto)",
    "tree_budget": "nodes of a draft tree; 0: a chain",
    "trace_verify": "print to stderr whether each draft was kept",
    "self_check": "skip the self-check that batching does not change results",
    "snapshot_dir": "folder for snapshots of prompts (default: snapshots in the cache folder)",
    "cache_budget": "disk space for snapshots of prompts, like 20GiB: prompts computed before a restart are not computed again",
    "cache_dir": "folder for downloaded models and compiled kernels (default: ONEDRAW_CACHE, or the user's cache folder)",
}

OPTIONS_HELP: Mapping[str, str] = {
    "temperature": "0 takes the likeliest token; 1 the model's own distribution",
    "top_k": "only the k likeliest tokens; 0: off",
    "top_p": "only the likeliest tokens that together hold this much probability; 1: off",
    "min_p": "only tokens at least this likely, relative to the likeliest; 0: off",
    "repetition_penalty": "divides the score of tokens seen in prompt or reply; 1: off",
    "frequency_penalty": "subtracted from a token's score for every time the reply has used it",
    "presence_penalty": "subtracted from a token's score once the reply has used it",
    "dry_multiplier": "strength of the penalty on extending a repetition; 0: off",
    "dry_base": "factor by which that penalty grows with each repeated token",
    "dry_allowed_length": "repetitions shorter than this are not penalized",
    "dry_range": "how many of the last tokens are searched for repetitions; 0: all",
    "dry_sequence_breakers": "text that a repetition never crosses; may be given several times",
    "logit_bias": "ID=VALUE, added to a token's score; may be given several times",
    "seed": "makes the reply repeatable; without it one is drawn and reported",
    "max_tokens": "longest reply, in tokens",
    "min_tokens": "the reply does not end before this many tokens",
    "continue_ids": "token ids of the reply's beginning, comma-separated; prints what follows them; needs the reply's --seed",
    "reply_ids": "token ids with which the reply begins, comma-separated, as if they had been sampled; see --logprobs",
    "system_fingerprint": "refuse to run unless the model has this fingerprint",
    "ignore_eos": "the model's end-of-reply tokens do not end the reply",
    "stop": "text that ends the reply; may be given several times",
    "stop_token_ids": "token ids that end the reply, comma-separated",
    "bad_words": "text that must not appear; may be given several times",
    "n": "independent replies to one prompt",
    "logprobs": "report the sampled tokens' logprobs and those of this many alternatives",
    "logprobs_mode": "raw: the model's own; processed: after penalties, temperature and filters",
    "logprob_token_ids": "report the logprobs of these tokens too, comma-separated ids; with --logprobs",
    "prompt_logprobs": "report the same as --logprobs for the tokens of the prompt; allows --max-tokens 0",
    "checksums": "report a checksum of the scores behind every sampled token",
    "skip_special_tokens": "show special tokens in the text",
    "prediction": "expected text of the reply, used as drafts; it can speed the reply up but never change it",
    "reasoning_effort": "effort of a reasoning model, in a chat; none: no reasoning",
    "thinking_budget": "most reasoning tokens in a chat; then the reasoning is closed",
    "guided_json": 'the reply is a JSON value that matches this schema; \'{"type": "object"}\' is any object',
    "guided_regex": "the whole reply matches this regular expression",
    "guided_choice": "the reply is one of these texts; may be given several times",
    "guided_grammar": "the reply follows this grammar, Lark or GBNF",
    "speculation": "no drafts for this reply; drafts never change it, only the time it takes",
}
NO_DRAFT_WINDOW = (
    "not offered: drafts are verified with full attention, because a shorter window would compute different scores than plain "
    "decoding and could change the answer; --draft-tokens and --tree-budget control the amount of drafting"
)

ParsedT = TypeVar("ParsedT")

SIZES = ("kv_memory", "draft_memory", "checkpoint_memory", "cache_budget")  # settings whose values are sizes such as 2GiB
LEAST_LEARNING_SIZE = 2**16  # the least --learn-draft-size, in bytes, so that a few records fit into a file
NOT_FLAGS = ("model",)  # fields of Settings that are positional arguments of a command and not options


@dataclass(frozen=True, slots=True)
class Flag:
    """A field as a command-line option."""

    field: str  # name of the field
    spelling: str  # name of the command-line option, such as --max-context
    help: str
    options: Mapping[str, Any]  # further arguments of argparse's add_argument


def settings_flags() -> list[Flag]:
    return _flags(Settings, SETTINGS_HELP, leave_out=NOT_FLAGS)


def option_flags() -> list[Flag]:
    return _flags(RequestOptions, OPTIONS_HELP)


def add_cache_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache-dir", type=Path, metavar="FOLDER", help=SETTINGS_HELP["cache_dir"])


def add_settings(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    group = parser.add_argument_group("how to run the model")
    _add(group, settings_flags(), leave_out)
    if "draft" not in leave_out:
        group.add_argument("--draft-window", action=Refused, reason=NO_DRAFT_WINDOW)


def add_request_options(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    _add(parser.add_argument_group("sampling"), option_flags(), leave_out)


def read_settings(arguments: argparse.Namespace, **more: Any) -> Settings:
    """Build Settings from parsed arguments. Fields that were not given keep their defaults."""
    given = {f.field: getattr(arguments, f.field, None) for f in settings_flags()}
    return Settings.of(model=arguments.model, **{**given, **more})


def read_request_options(arguments: argparse.Namespace, **more: Any) -> RequestOptions:
    given = {f.field: getattr(arguments, f.field, None) for f in option_flags()}
    if getattr(arguments, "logit_bias", None):
        given["logit_bias"] = dict(arguments.logit_bias)
    return RequestOptions.of(**{**given, **more})


def add_record(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recording (off unless --record names a folder)")
    group.add_argument(
        "--record",
        type=Path,
        metavar="FOLDER",
        help="append every finished request there (seed, parameters, token ids of prompt and reply), for `onedraw replay`",
    )
    group.add_argument(
        "--record-size",
        type=argument_type(size_in_bytes),
        metavar="SIZE",
        help="start a new file before one grows over this size (default: 64MiB)",
    )
    group.add_argument("--record-text", action="store_true", help="also write prompt and reply as text")


def add_learning(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("learning (off unless --learn-draft names a folder)")
    group.add_argument(
        "--learn-draft",
        type=Path,
        metavar="FOLDER",
        help="keep token ids of finished prompts and replies there, for `onedraw train-draft --data FOLDER`",
    )
    group.add_argument(
        "--learn-draft-size",
        type=argument_type(size_in_bytes),
        metavar="SIZE",
        help="most bytes of that folder; the oldest replies are removed (default: 256MiB)",
    )


def recorded(llm: LLM, arguments: argparse.Namespace) -> LLM:
    """Return the LLM, wrapped to write finished requests if --record or --learn-draft is given."""
    from onedraw.contract.record import DEFAULT_SIZE, RecordingLLM, RecordWriter

    if arguments.record is None:
        for name in ("record_size", "record_text"):
            if getattr(arguments, name):
                raise BadSetting(f"--{name.replace('_', '-')}: only with --record")
    learning = _learning(arguments)
    if arguments.record is None and learning is None:
        return llm
    size = DEFAULT_SIZE if arguments.record_size is None else arguments.record_size
    if size < 1:
        raise BadSetting(f"--record-size: must be at least 1 byte, not {size}")
    path = Path(arguments.model)
    source = str(path.resolve()) if path.exists() else arguments.model
    writer = None if arguments.record is None else RecordWriter(arguments.record, size=size, text=arguments.record_text)
    return RecordingLLM(llm, writer, source=source, learning=learning)


def _learning(arguments: argparse.Namespace) -> RecordWriter | None:
    """Return the writer of --learn-draft. Only commands that serve have the option."""
    from onedraw.contract.record import LEARNING_FILES, LEARNING_SIZE, RecordWriter

    folder, size = getattr(arguments, "learn_draft", None), getattr(arguments, "learn_draft_size", None)
    if folder is None:
        if size is not None:
            raise BadSetting("--learn-draft-size: only with --learn-draft")
        return None
    if size is not None and size < LEAST_LEARNING_SIZE:
        raise BadSetting(f"--learn-draft-size: must be at least {LEAST_LEARNING_SIZE} bytes, not {size}")
    if folder == arguments.record:
        raise BadSetting("--learn-draft: name another folder than that of --record, since its oldest files are removed")
    most = LEARNING_SIZE if size is None else size
    return RecordWriter(folder, size=most // LEARNING_FILES, most=most, option="--learn-draft")


class Refused(argparse.Action):
    """An option that other servers have and Onedraw does not. Its use is an error with a reason, which names an alternative."""

    def __init__(self, option_strings: list[str], dest: str, *, reason: str) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._reason = reason

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        raise argparse.ArgumentError(self, self._reason)


# ---------------------------------------------------------------------------------------------- from field to option


def _add(group: argparse._ArgumentGroup, flags: list[Flag], leave_out: Collection[str]) -> None:
    for flag in flags:
        if flag.field not in leave_out:
            group.add_argument(flag.spelling, dest=flag.field, help=flag.help, **flag.options)


def _flags(owner: type, helps: Mapping[str, str], leave_out: Collection[str] = ()) -> list[Flag]:
    hints = typing.get_type_hints(owner)
    names = [f.name for f in fields(owner) if f.name not in leave_out]
    strays = set(helps) ^ set(names)
    if strays:
        raise AssertionError(f"{owner.__name__} and its help table disagree on {', '.join(sorted(strays))}")
    defaults = {f.name: f.default for f in fields(owner)}
    return [_flag(name, hints[name], default=defaults[name], text=helps[name]) for name in names]


def _flag(name: str, hint: Any, *, default: Any, text: str) -> Flag:
    """Make the option of one field. An option that is not given parses to None, so the default of the dataclass applies."""
    dashed = "--" + name.replace("_", "-")
    kind = _without_none(hint)
    if kind is bool:
        if default:
            return Flag(name, "--no-" + dashed[2:], text, {"action": "store_const", "const": False})
        return Flag(name, dashed, text, {"action": "store_const", "const": True})
    shown = text if default in (None, (), "auto") or "default:" in text else f"{text} (default: {default})"
    return Flag(name, dashed, shown, _value_options(name, kind))


def _value_options(name: str, kind: Any) -> dict[str, Any]:
    if name in SIZES:
        return {"type": argument_type(size_in_bytes), "metavar": "SIZE"}
    if name == "dtype":
        return {"choices": DTYPES}
    if name == "activation_dtype":
        return {"choices": ACTIVATION_DTYPES}
    if name == "kv_dtype":
        return {"choices": KV_DTYPES}
    if name == "devices":
        return {"metavar": "D,D…"}
    if name == "split":
        return {"metavar": "HOW"}
    if name == "draft":
        return {"action": "append", "metavar": "DRAFTER"}
    if name == "draft_tokens":
        return {"type": argument_type(_number_or_auto), "metavar": "N|auto"}
    if name in ("guided_json", "guided_regex", "guided_grammar"):
        return {"metavar": "TEXT"}
    if name == "logit_bias":
        return {"type": argument_type(_bias), "action": "append", "metavar": "ID=VALUE"}
    if typing.get_origin(kind) is typing.Literal:
        return {"choices": typing.get_args(kind)}
    if kind == tuple[str, ...]:
        return {"action": "append", "metavar": "TEXT"}
    if kind == tuple[int, ...]:
        return {"type": argument_type(token_ids), "metavar": "IDS"}
    simple: dict[Any, dict[str, Any]] = {
        int: {"type": int, "metavar": "N"},
        float: {"type": float, "metavar": "X"},
        str: {"metavar": "NAME"},
        Path: {"type": Path, "metavar": "FOLDER"},
    }
    return simple[kind]


def _without_none(hint: Any) -> Any:
    """Return a type without None. Of a union of several other types it is the first, which must be the one that a command line
    can express."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


def argument_type(parse: Callable[[str], ParsedT]) -> Callable[[str], ParsedT]:
    """Turn a parse function into a type for argparse, so that the message of its BadSetting is shown to the user."""

    def parsed(text: str) -> ParsedT:
        try:
            return parse(text)
        except BadSetting as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def token_ids(text: str) -> tuple[int, ...]:
    """Parse token ids: '5,17, 9' → (5, 17, 9)."""
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise BadSetting(f"not a list of token ids: {text!r}; write for example 5,17,9") from None


def _number_or_auto(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise BadSetting(f"not a number: {text!r}; write for example 4, or auto") from None


def _bias(text: str) -> tuple[int, float]:
    token, separator, value = text.partition("=")
    try:
        if not separator:
            raise ValueError
        return int(token), float(value)
    except ValueError:
        raise BadSetting(f"not ID=VALUE: {text!r}; write for example 42=-5 or 42=-inf") from None
