"""The MTP head (multi-token prediction) of a Qwen3.5 checkpoint: its spec and weights.

In: an open checkpoint and its ModelInfo. Out: MtpInfo; UnsupportedModel if there is no such head, CorruptFile if its tensors are
missing or misshapen.

The target is the model that the MTP head belongs to; E is its hidden width. The MTP head drafts from position t, whose token
t + 1 is known:
    e      = rms(embed(token t+1)) · embed_norm
    h      = rms(x_t) · hidden_norm             x_t for the first draft: the target's hidden state after its final norm (the
                                                input of its LM head); for later drafts: z of the draft before
    y_t    = layer(fc · [e, h])                 one attention layer like the target's, with its own keys and values
    z_t    = rms(y_t) · norm
    draft  = LM head of the target, applied to z_t

Weights, float32, matrices as [outputs, inputs]
    outer      fc [E, 2·E]  embed_norm [E]  hidden_norm [E]  norm [E]; embedding and LM head are the target's
    layer      the weights of an attention layer of the target, by the names of `weight_names.py`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from onedraw.errors import UnsupportedModel
from onedraw.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from onedraw.models.registry import ModelInfo
from onedraw.models.source import ModelSource
from onedraw.models.spec import AttentionSpec, LayerSpec, ModelSpec, Norm, Shapes
from onedraw.models.weight_names import (
    NamedWeights,
    TensorShape,
    WeightKey,
    WeightNames,
    find_weights,
    name_table,
    refuse_unused_tensors,
)
from onedraw.models.weight_transforms import add_one

FAMILIES = (QWEN3_5.name, QWEN3_5_MOE.name)


@dataclass(frozen=True, slots=True)
class MtpSpec:
    layer: LayerSpec
    hidden: int
    vocab: int
    eps: float
    norm: Norm
    max_context: int

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return (self.layer,)

    def outer_shapes(self) -> Shapes:
        hidden = self.hidden
        return {"fc": (hidden, 2 * hidden), "embed_norm": (hidden,), "hidden_norm": (hidden,), "norm": (hidden,)}

    @property
    def parameters(self) -> int:
        return self.layer.parameters(self.hidden) + sum(prod(shape) for shape in self.outer_shapes().values())


@dataclass(frozen=True, slots=True)
class MtpInfo:
    spec: MtpSpec
    weights: MtpWeights


def has_mtp(source: ModelSource, info: ModelInfo) -> bool:
    """Whether the checkpoint has an MTP head, supported or not."""
    if info.family.name not in FAMILIES:
        return False
    if info.format == "gguf":
        return f"blk.{len(info.spec.layers)}.nextn.eh_proj.weight" in source.tensors
    return any(name.startswith(("mtp.", "model.mtp.")) for name in source.tensors)


def read_mtp_info(source: ModelSource, info: ModelInfo) -> MtpInfo:
    """Build the MTP head's spec from the target's, and check that the tensors match it. No values are read."""
    target = info.spec
    if info.family.name not in FAMILIES:
        raise UnsupportedModel(f"{source.path}: a {target.family} model has no MTP head; supported: {', '.join(FAMILIES)}")
    if not has_mtp(source, info):
        raise UnsupportedModel(f"{source.path}: the checkpoint has no MTP head (mtp.* or nextn tensors); pass another --draft")
    attention_layer = next((layer for layer in target.layers if isinstance(layer.mixer, AttentionSpec)), None)
    if attention_layer is None:
        raise UnsupportedModel(f"{source.path}: the MTP head needs an attention layer, and this model has none")
    spec = MtpSpec(attention_layer, target.hidden, target.vocab, eps=target.eps, norm=target.norm, max_context=target.max_context)
    names = _gguf_names(info, target) if info.format == "gguf" else _safetensors_names(info, target)
    return MtpInfo(spec, MtpWeights(source, spec, names, depth=len(target.layers)))


def _safetensors_names(info: ModelInfo, target: ModelSpec) -> WeightNames:
    """Names in a transformers folder. Aliases give the MTP layer the index after the target's last layer, so that the target's
    name patterns find its tensors."""
    names = info.family.weight_names[info.format]
    norms = name_table("mtp.", "embed_norm=pre_fc_norm_embedding.weight hidden_norm=pre_fc_norm_hidden.weight norm=norm.weight")
    own = (r"^(?:model\.)?mtp\.layers\.0\.", f"model.layers.{len(target.layers)}."), (r"^model\.mtp\.", "mtp.")
    return replace(
        names,
        outer={"fc": "mtp.fc.weight"} | norms,
        transforms={**names.transforms} | {weight: add_one(name) for weight, name in norms.items()},
        aliases=(*own, *names.aliases),
        stored=((rf"^model\.layers\.{len(target.layers)}\.", "mtp.layers.0."),),
        ignored=rf"(?!(model\.)?mtp\.).*|{names.ignored}",
    )


def _gguf_names(info: ModelInfo, target: ModelSpec) -> WeightNames:
    base, depth = info.family.weight_names[info.format], len(target.layers)
    table = "fc=eh_proj.weight embed_norm=enorm.weight hidden_norm=hnorm.weight norm=shared_head_norm.weight"
    return replace(base, outer=name_table(f"blk.{depth}.nextn.", table), ignored=rf"(?!blk\.{depth}\.).*|{base.ignored}")


@dataclass(frozen=True, slots=True)
class _ExtendedStack:
    """A stack in which `find_weights` finds the MTP layer under its index, the target's depth. The layers before it are
    unused."""

    layers: tuple[LayerSpec, ...]
    hidden: int


class MtpWeights(NamedWeights):
    """The weights of one MTP head, whose layer has index 0. The constructor refuses missing, misshapen and unknown tensors."""

    def __init__(self, source: ModelSource, spec: MtpSpec, names: WeightNames, *, depth: int) -> None:
        self.spec = spec
        shapes: dict[WeightKey, TensorShape] = {(None, weight): shape for weight, shape in spec.outer_shapes().items()}
        shapes |= {(depth, weight): shape for weight, shape in spec.layer.shapes(spec.hidden).items()}
        stack, used = _ExtendedStack((spec.layer,) * (depth + 1), spec.hidden), set[str]()
        found = find_weights(source, stack, names, shapes=shapes, used=used)
        super().__init__({(None if layer is None else 0, weight): tensor for (layer, weight), tensor in found.items()})
        refuse_unused_tensors(source, used, ignored=names.ignored, kind="MTP head")
