"""Everything the rest of the program needs to know about an open checkpoint, read in one call without reading weights."""

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

# Sampling defaults that generation_config.json sets only together with do_sample.
SAMPLED = ("temperature", "top_k", "top_p", "min_p")
GGUF_SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# Tokens that end a reply although no metadata key of a converted file names them, by GGUF architecture.
EXTRA_EOS_TOKENS = {"gemma4": ("<turn|>", "<|tool_response>")}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    spec: ModelSpec
    family: Family
    format: CheckpointFormat
    weights: ModelWeights
    eos_ids: tuple[int, ...]
    defaults: dict[str, float | int]  # sampling parameters


def read_model_info(source: ModelSource) -> ModelInfo:
    """Find the family, read the configuration, and check that the tensors match it."""
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


def generation_defaults(source: ModelSource) -> dict[str, float | int]:
    """The sampling parameters that the checkpoint recommends."""
    if source.format == "gguf":
        named = {name: source.config.get(f"general.sampling.{key}") for name, key in GGUF_SAMPLING_KEYS.items()}
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
        number = 0 if value == -1 else int(value)  # some files write -1 for "off"
    try:
        SamplingParams(**{name: number})  # type: ignore[arg-type]  # every name is a numeric field
    except BadParameter as error:
        raise CorruptFile(f"{source.path}: the default {error}") from None
    return number


def eos_ids(source: ModelSource) -> list[int]:
    """The token ids that end a reply, without duplicates; generation_config.json takes precedence over config.json."""
    if source.format == "gguf":
        named = [source.config.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        return _ids(source, *named, _extra_eos_ids(source))
    inner = source.config.get("text_config")
    for config in (source.generation_config, source.config, inner if isinstance(inner, dict) else {}):
        if config.get("eos_token_id") is not None:
            return _ids(source, config["eos_token_id"])
    return []


def _extra_eos_ids(source: ModelSource) -> list[int]:
    texts = EXTRA_EOS_TOKENS.get(str(source.config.get("general.architecture")), ())
    vocabulary = source.config.get("tokenizer.ggml.tokens")
    return [vocabulary.index(text) for text in texts if text in vocabulary] if texts and isinstance(vocabulary, list) else []


def _ids(source: ModelSource, *values: Any) -> list[int]:
    flat = [one for value in values if value is not None for one in (value if isinstance(value, list) else [value])]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in flat):
        raise CorruptFile(f"{source.path}: eos_token_id must be a token id or a list of them, not {flat!r}")
    return list(dict.fromkeys(flat))
