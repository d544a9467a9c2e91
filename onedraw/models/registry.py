"""The supported model families, and the one that a checkpoint belongs to.

A family is found by `architectures` and `model_type` of config.json, or by `general.architecture` of a GGUF file.
To support a new family, write it as a Family (see `family.py`) and add it to FAMILIES.
"""

from __future__ import annotations

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.family import Family, Traits, dense_family
from onedraw.models.gemma4 import GEMMA4
from onedraw.models.laguna import LAGUNA
from onedraw.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from onedraw.models.source import ModelSource
from onedraw.models.weight_names import GGUF_NAMES, PLAIN_NAMES, SAFETENSORS_NAMES, WeightNames, name_table
from onedraw.models.weight_transforms import EXPERT_WEIGHT_ALIAS, experts, gguf_experts

LLAMA = dense_family(
    Traits(family="llama", mlp_bias=True, kv_heads_named=False, permuted=True),
    model_types=("llama",),
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    gguf=("llama",),  # GGUF converters write Mistral models as llama too
)

MISTRAL = dense_family(
    Traits(family="mistral", qkv_bias="never", out_bias="never", window="all"),
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    gguf=(),
)


# ------------------ Qwen2, Qwen2.5 and Qwen3, dense and with experts


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


# ------------------ The supported model families, and the one that a checkpoint belongs to


FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, QWEN3_5, QWEN3_5_MOE, GEMMA4, LAGUNA)


def find_family(source: ModelSource) -> Family:
    """The family of a checkpoint; UnsupportedModel with a list of the supported ones."""
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
