"""An open checkpoint → everything the rest of the house asks about it, in one call. No weight is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from onedraw.errors import BadParameter, CorruptFile
from onedraw.models.family import Family
from onedraw.models.registry import find_family
from onedraw.models.source import CheckpointFormat, ModelSource
from onedraw.models.spec import ModelSpec
from onedraw.models.weight_names import ModelWeights
from onedraw.types import SamplingParams

# -------------------- What a checkpoint says about sampling: default values and the ids that end a reply.


SAMPLED = ("temperature", "top_k", "top_p", "min_p")
GGUF_NAMES = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}


def generation_defaults(source: ModelSource) -> dict[str, float | int]:
    if source.format == "gguf":
        named = {name: source.config.get(f"general.sampling.{key}") for name, key in GGUF_NAMES.items()}
    else:
        wanted = ("repetition_penalty", *(SAMPLED if source.generation_config.get("do_sample") is True else ()))
        named = {name: source.generation_config.get(name) for name in wanted}
    return {name: _number(source, name, value) for name, value in named.items() if value is not None}


def _number(source: ModelSource, name: str, value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CorruptFile(f"{source.path}: the default {name} must be a number, not {value!r}")
    number: float | int = float(value)
    if name == "top_k":
        if value != int(value):
            raise CorruptFile(f"{source.path}: the default top_k must be a whole number, not {value!r}")
        number = 0 if value == -1 else int(value)  # -1: as some say that it is off
    try:
        SamplingParams(**{name: number})  # type: ignore[arg-type]  # one of the numbers
    except BadParameter as error:
        raise CorruptFile(f"{source.path}: the default {error}") from None
    return number


# Tokens that end a reply although no key of a converted file names them, by its architecture.
ENDING_TOKENS = {"gemma4": ("<turn|>", "<|tool_response>")}


def eos_ids(source: ModelSource) -> list[int]:
    """The ids that end a reply, without repetition; generation_config.json goes before config.json."""
    if source.format == "gguf":
        named = [source.config.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        return _ids(source, *named, _unnamed_ends(source))
    inner = source.config.get("text_config")
    for info in (source.generation_config, source.config, inner if isinstance(inner, dict) else {}):
        if info.get("eos_token_id") is not None:
            return _ids(source, info["eos_token_id"])
    return []


def _unnamed_ends(source: ModelSource) -> list[int]:
    texts = ENDING_TOKENS.get(str(source.config.get("general.architecture")), ())
    vocabulary = source.config.get("tokenizer.ggml.tokens")
    return [vocabulary.index(text) for text in texts if text in vocabulary] if texts and isinstance(vocabulary, list) else []


def _ids(source: ModelSource, *values: Any) -> list[int]:
    flat = [one for value in values if value is not None for one in (value if isinstance(value, list) else [value])]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in flat):
        raise CorruptFile(f"{source.path}: eos_token_id must be a token id or a list of them, not {flat!r}")
    return list(dict.fromkeys(flat))


# -------------------- An open checkpoint → everything the rest of the house asks about it, in one call. No weigh


@dataclass(frozen=True, slots=True)
class ModelInfo:
    spec: ModelSpec
    family: Family
    format: CheckpointFormat
    weights: ModelWeights
    eos_ids: tuple[int, ...]
    defaults: dict[str, float | int]


def read_model_info(source: ModelSource) -> ModelInfo:
    """Identify, read the description, and check that the weights fit it."""
    family = find_family(source)
    if source.format == "gguf":
        spec = family.from_metadata(source)
    else:
        spec = family.from_config(source.config, str(source.path / "config.json"))
    weights = ModelWeights(source, spec, family.weight_names[source.format])
    return ModelInfo(
        spec=weights.spec,
        family=family,
        format=source.format,
        weights=weights,
        eos_ids=tuple(eos_ids(source)),
        defaults=generation_defaults(source),
    )
