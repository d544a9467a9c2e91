"""The supported model families, and the one that a checkpoint belongs to.

A family is found by `architectures` and `model_type` of config.json, or by `general.architecture` of a GGUF file.
To support a new family, write it as a Family (see `family.py`) and add it to FAMILIES.
"""

from __future__ import annotations

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.family import Family
from onedraw.models.gemma4 import GEMMA4
from onedraw.models.laguna import LAGUNA
from onedraw.models.llama import LLAMA, MISTRAL
from onedraw.models.qwen import QWEN2, QWEN3, QWEN3_MOE
from onedraw.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from onedraw.models.source import ModelSource

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
