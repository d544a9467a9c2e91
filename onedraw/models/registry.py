"""The supported model families, and what the rest of the program needs to know about an open checkpoint.

In: a checkpoint. Out: its ModelInfo, without reading weights. A family is found by `architectures` and `model_type` of
config.json, or by `general.architecture` of a GGUF file. To support a new family, write it as a Family (see `family.py`) and add
it to FAMILIES.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from onedraw.errors import BadParameter, CorruptFile, UnsupportedModel
from onedraw.models.family import Family, Traits, dense_family
from onedraw.models.gemma4 import GEMMA4
from onedraw.models.laguna import LAGUNA
from onedraw.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from onedraw.models.source import CheckpointFormat, ModelSource
from onedraw.models.spec import ModelSpec
from onedraw.models.weight_names import GGUF_NAMES, PLAIN_NAMES, SAFETENSORS_NAMES, ModelWeights, WeightNames, name_table
from onedraw.models.weight_transforms import EXPERT_WEIGHT_ALIAS, experts, gguf_experts
from onedraw.types import SamplingParams

LLAMA = dense_family(
    Traits(family="llama", mlp_bias=True, kv_heads_named=False, permuted=True),
    model_types=("llama",),
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    gguf=("llama",),  # GGUF converters write "llama" for Mistral models too
)

MISTRAL = dense_family(
    Traits(family="mistral", qkv_bias="never", out_bias="never", window="all"),
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    gguf=(),
)

QWEN2 = dense_family(
    Traits(family="qwen2", qkv_bias="always", out_bias="never", window="gated"),
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    gguf=("qwen2",),
)

QWEN3 = dense_family(
    Traits(family="qwen3", qk_norm=True, window="gated", head_dim=128),
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    gguf=("qwen3",),
)

MLP = "model.layers.{layer}.mlp."
QWEN3_MOE = dense_family(
    Traits(family="qwen3_moe", qk_norm=True, window="switched", experts=True),
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    gguf=("qwen3moe",),
    weight_names={
        "safetensors": WeightNames(
            outer=SAFETENSORS_NAMES.outer,
            layer={**SAFETENSORS_NAMES.layer} | name_table(MLP, "router=gate.weight"),
            transforms=experts(MLP + "experts."),
            aliases=(EXPERT_WEIGHT_ALIAS,),
            ignored=SAFETENSORS_NAMES.ignored,
        ),
        "gguf": WeightNames(
            outer=GGUF_NAMES.outer,
            layer={**GGUF_NAMES.layer} | name_table("blk.{layer}.", "router=ffn_gate_inp.weight"),
            transforms=gguf_experts(),
            ignored=GGUF_NAMES.ignored,
        ),
        "plain": PLAIN_NAMES,
    },
)

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, QWEN3_5, QWEN3_5_MOE, GEMMA4, LAGUNA)

# Sampling parameters that are read from generation_config.json only if its do_sample is true.
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
    """The description of a model, read from an open checkpoint."""

    spec: ModelSpec
    family: Family
    format: CheckpointFormat
    weights: ModelWeights  # shapes were checked; values are read when requested
    eos_ids: tuple[int, ...]  # token ids that end a reply
    defaults: dict[str, float | int]  # the sampling parameters that the checkpoint recommends, by name


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


def find_family(source: ModelSource) -> Family:
    """Return the family of a checkpoint. Raise UnsupportedModel, with a list of the supported families, if it has none of them,
    and CorruptFile if the checkpoint does not name its family."""
    if source.format == "gguf":
        return _find_gguf_family(source)
    config = source.config
    names = config.get("architectures") or []
    model_type = config.get("model_type")
    if not isinstance(names, list) or not (names or model_type):
        raise CorruptFile(
            f"{source.path}: config.json has neither architectures nor a model_type, so the model family is unknown"
        )
    for family in FAMILIES:
        known = family.architectures[0] if not names else names[0]
        if known in family.architectures and model_type in (None, *family.model_types):
            return family
    supported = ", ".join(family.architectures[0] for family in FAMILIES)
    wanted = names[0] if names else f"model_type {model_type}"
    if any(names and names[0] in family.architectures for family in FAMILIES):
        wanted = f"{names[0]} with the model_type {model_type}"
    raise UnsupportedModel(f"{source.path}: {wanted} is not supported; supported: {supported}")


def _find_gguf_family(source: ModelSource) -> Family:
    name = source.config.get("general.architecture")
    if not isinstance(name, str):
        raise CorruptFile(f"{source.path}: the metadata key general.architecture is missing")
    for family in FAMILIES:
        if name in family.gguf:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.gguf)
    raise UnsupportedModel(f"{source.path}: the architecture {name} is not supported in GGUF; supported: {supported}")


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
    """The token ids that end a reply, without duplicates: from GGUF metadata, or from generation_config.json, else
    config.json."""
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
