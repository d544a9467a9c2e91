"""What a checkpoint says about sampling: default values and the ids that end a reply.

In: an open checkpoint. Out: plain values. From generation_config.json, as transformers reads it: where `do_sample`
is not true, temperature, top_k, top_p and min_p are not in force and are left out (our own defaults then hold);
repetition_penalty always counts. From a GGUF file: its general.sampling keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from onedraw.errors import Corrupt
from onedraw.models.source import Source

SAMPLED = ("temperature", "top_k", "top_p", "min_p")
GGUF_NAMES = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}


def generation_defaults(source: Source) -> dict[str, float | int]:
    if source.dialect == "gguf":
        named = {name: source.config.get(f"general.sampling.{key}") for name, key in GGUF_NAMES.items()}
    else:
        wanted = ("repetition_penalty", *(SAMPLED if source.generation_config.get("do_sample") is True else ()))
        named = {name: source.generation_config.get(name) for name in wanted}
    return {name: _number(source, name, value) for name, value in named.items() if value is not None}


def _number(source: Source, name: str, value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Corrupt(f"{source.path}: the default {name} must be a number, not {value!r}")
    return int(value) if name == "top_k" else float(value)


def eos_ids(source: Source) -> list[int]:
    """The ids that end a reply, without repetition; generation_config.json goes before config.json."""
    if source.dialect == "gguf":
        kinds = ("eos", "eot", "eom")
        return _ids(source, *(source.config.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds))
    described: Mapping[str, Any] = source.generation_config
    if described.get("eos_token_id") is None:
        described = source.config
    return _ids(source, described.get("eos_token_id"))


def _ids(source: Source, *values: Any) -> list[int]:
    flat = [one for value in values if value is not None for one in (value if isinstance(value, list) else [value])]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in flat):
        raise Corrupt(f"{source.path}: eos_token_id must be a token id or a list of them, not {flat!r}")
    return list(dict.fromkeys(flat))
