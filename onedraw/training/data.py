"""The data that a drafter learns from: prompts to which the target model samples replies, and records of such replies.

In: `builtin`, a file of prompts (.jsonl), or records that `--record` and `--learn-draft` write. Out: prompts, or training
examples (token sequences). A line of a prompt file is an object with `messages` or `prompt`, and perhaps `kind`, a word under
which the figures of such prompts are shown together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onedraw.build.training import Example
from onedraw.contract.record import Record, read_records
from onedraw.errors import BadSetting
from onedraw.llm.request_options import Prompt
from onedraw.models.registry import ModelInfo
from onedraw.training.builtin_prompts import builtin_prompts

BUILTIN = "builtin"
HELD_OUT = 16  # one prompt in this many is held out of training
MOST_PROMPTS = 1_000_000


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt, and the kind of text that it asks for."""

    prompt: Prompt
    kind: str = ""


def read_data(source: str) -> list[NamedPrompt] | list[Record]:
    """Return the prompts or records that `source` names."""
    if source == BUILTIN:
        return [NamedPrompt([{"role": "user", "content": text}], kind) for kind, text in builtin_prompts()]
    path = Path(source)
    if not path.exists():
        raise BadSetting(f"--data: there is no {source}; name records, a .jsonl file of prompts, or {BUILTIN}")
    if path.is_file() and not _is_record(path):
        return read_prompts(path)
    return read_records(path)


def read_prompts(path: Path) -> list[NamedPrompt]:
    found: list[NamedPrompt] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                found.append(_prompt(line, f"{path}:{number}"))
            if len(found) > MOST_PROMPTS:
                raise BadSetting(f"{path}: more than {MOST_PROMPTS:,} prompts; split the file")
    if not found:
        raise BadSetting(f"{path}: no prompts; write one JSON object per line, with `messages` or `prompt`")
    return found


def _prompt(line: str, where: str) -> NamedPrompt:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise BadSetting(f"{where}: not JSON; write one object per line, with `messages` or `prompt`") from None
    given = value if isinstance(value, dict) else {}
    messages, text, kind = given.get("messages"), given.get("prompt"), given.get("kind", "")
    if not isinstance(kind, str) or (messages is None) == (text is None):
        raise BadSetting(f"{where}: an object needs either `messages` or `prompt`, and `kind` is a string")
    if messages is not None:
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            raise BadSetting(f"{where}: `messages` must be a list of chat messages")
        return NamedPrompt(messages, kind)
    if not isinstance(text, str) or not text:
        raise BadSetting(f"{where}: `prompt` must be a text")
    return NamedPrompt(text, kind)


def _is_record(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(2**20)
    return b'"fingerprint"' in first and b'"reply"' in first


# ------------------------------------------------------------------ examples


def split_records(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Divide records into those to train on and those held out, by a hash of their prompts: replies to one prompt are on one
    side, and each side has at least one prompt. Records without a request, or with fewer than two reply tokens, are left out. If
    fewer than two prompts are left, raise BadSetting."""
    usable = [record for record in records if record.generation is not None and len(record.reply) >= 2]
    numbered = [(_number(record), record) for record in usable]
    prompts = sorted({number for number, _ in numbered})
    if len(prompts) < 2:
        raise BadSetting(
            "the data has fewer than two different prompts with replies; at least one to train on, one to measure with"
        )
    chosen = {number for number in prompts if number % HELD_OUT == 0} or {prompts[0]}
    chosen = chosen if len(chosen) < len(prompts) else {prompts[0]}
    training = [record for number, record in numbered if number not in chosen]
    return training, [record for number, record in numbered if number in chosen]


def _number(record: Record) -> int:
    assert record.generation is not None
    prompt = ",".join(map(str, record.generation.prompt))
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=6).digest())


def examples_of(records: Sequence[Record], info: ModelInfo, *, max_context: int) -> list[Example]:
    """Return the prompt and reply of each record as one sequence, cut at the end of the context. A token outside of the model's
    vocabulary is refused; sequences with fewer than two tokens of the reply are left out."""
    found = []
    for record in records:
        generation = record.generation
        assert generation is not None
        tokens = (*generation.prompt, *generation.given, *record.reply)[:max_context]
        if max(tokens) >= info.spec.vocab:
            raise BadSetting(
                f"{record.where}: token {max(tokens)} is not in this model's vocabulary of {info.spec.vocab}; "
                f"the record is of the model {record.model}"
            )
        if len(tokens) >= len(generation.prompt) + 2:
            found.append(
                Example(tokens, len(generation.prompt), 0.0 if generation.params.greedy else generation.params.temperature)
            )
    if not found:
        raise BadSetting(f"no reply of the data fits into a context of {max_context} tokens; raise --max-context")
    return found
