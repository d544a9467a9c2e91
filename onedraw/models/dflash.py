"""DFlash drafters as data: what a drafter file says, which of its tensors is which weight, and whether it fits a target.

In: an open checkpoint in one of three layouts (z-lab or speculators safetensors, GGUF `dflash`) and the target's
ModelSpec. Out: a DrafterSpec with DrafterWeights, or a refusal by name. The layouts are read in `dflash_layouts.py`.

What a drafter computes, for C committed positions with features F [C, n·Ht] and the last chosen token, the anchor:
    c        = rms(F · fcᵀ) · hidden_norm                      once per position, the same for all layers; not normed again
    context  k = rope(rms(c · kᵀ) · k_norm, position)  v = c · vᵀ      per layer, at the target token's own position
    block    x = embed([anchor, mask, …, mask])                B tokens at positions C … C + B - 1
    layer    x += attention(rms(x) · attn_norm)                over the context and the block's own keys and values
             x += down(silu(gate(h)) · up(h)), h = rms(x) · mlp_norm
    logits   head(rms(x) · norm) of slots 1 … B - 1; slot s drafts the token of its own position C + s
A layer with a window W sees context positions C - W … C - 1, the same for every slot. Inside the block every slot sees
every slot, or where `causal_in_block` says so only itself and the slots before it.

Weights, float32, matrices as [outputs, inputs]
    outer      fc [E, n·Ht]  hidden_norm [E]  norm [E]  and where the spec says so embed [V, E]  head [Vd, E]
    layer      the names of `weights.py`, with q_norm and k_norm
    target_ids int64 [Vd]: the target's id of every row of a head of its own vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onedraw.errors import Corrupt, UnsupportedModel
from onedraw.models.dflash_layouts import layout_of, looks_like_drafter, read_description, refuse_relatives
from onedraw.models.source import Source, Tensor
from onedraw.models.spec import DrafterLayout, DrafterSpec, ModelSpec
from onedraw.models.weights import GGUF, SAFETENSORS, Read, Rules, Shape, Where, find, pairs, refuse_unclaimed

__all__ = ["DescribedDrafter", "DrafterSpec", "DrafterWeights", "check_fit", "describe_drafter", "is_drafter"]

_FOLDER = Rules(
    outer=pairs("", "fc=fc.weight hidden_norm=hidden_norm.weight norm=norm.weight embed=embed_tokens.weight")
    | pairs("", "head=lm_head.weight d2t=d2t"),
    layer={weight: stored.removeprefix("model.") for weight, stored in SAFETENSORS.layer.items()},
    ignored=r"t2d|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",  # t2d is d2t read backwards, for training
)
RULES: dict[DrafterLayout, Rules] = {
    "z-lab": _FOLDER,
    "speculators": _FOLDER,
    "gguf": Rules(
        outer=pairs("", "fc=fc.weight hidden_norm=enc.output_norm.weight norm=output_norm.weight")
        | pairs("", "embed=token_embd.weight head=output.weight d2t=d2t"),
        layer=GGUF.layer,
        ignored=GGUF.ignored,
    ),
}


@dataclass(frozen=True, slots=True)
class DescribedDrafter:
    spec: DrafterSpec
    weights: DrafterWeights


def is_drafter(source: Source) -> bool:
    """Whether a checkpoint is a block drafter rather than a model, be it one that is supported or not."""
    return looks_like_drafter(source)


def describe_drafter(source: Source) -> DescribedDrafter:
    """Read the description, and check that the weights fit it. No weight is read."""
    layout = layout_of(source)
    refuse_relatives(source)
    spec = read_description(source, layout)
    return DescribedDrafter(spec, DrafterWeights(source, spec, RULES[layout]))


# ------------------------------------------------------------------ weights


def outer_shapes(spec: DrafterSpec) -> dict[str, Shape]:
    """The float32 weights outside the layers."""
    hidden = spec.hidden
    shapes: dict[str, Shape] = {"fc": (hidden, spec.feature_width)}
    shapes |= {"hidden_norm": (hidden,), "norm": (hidden,)}
    if spec.own_embedding:
        shapes |= {"embed": (spec.vocab, hidden)}
    if spec.own_head:
        shapes |= {"head": (spec.draft_vocab, hidden)}
    return shapes


class DrafterWeights:
    """The weights of one drafter. Complete when made: what is missing, misshapen or unclaimed was refused."""

    def __init__(self, source: Source, spec: DrafterSpec, rules: Rules) -> None:
        self.spec = spec
        self._origin = str(source.path)
        shapes: dict[Where, Shape] = {(None, weight): shape for weight, shape in outer_shapes(spec).items()}
        for index in range(len(spec.layers)):
            shapes |= {(index, weight): shape for weight, shape in spec.layers[index].shapes(spec.hidden).items()}
        self._tensors = {where: find(source, rules.stored(where), shape) for where, shape in shapes.items()}
        for tensor in self._tensors.values():
            tensor.require_readable()
        self._map = find(source, rules.outer["d2t"], (spec.draft_vocab,)) if spec.mapped else None
        claimed = {tensor.name for tensor in self._tensors.values()} | ({self._map.name} if self._map else set())
        refuse_unclaimed(source, claimed, ignored=rules.ignored, kind="DFlash drafter")

    def tensor(self, layer: int | None, weight: str) -> Tensor:
        """One weight, still packed."""
        return self._tensors[layer, weight]

    def outer(self) -> Read:
        """fc, hidden_norm, norm and, where they are the drafter's own, embed and head."""
        return {weight: self._tensors[None, weight].float32() for weight in outer_shapes(self.spec)}

    def layer(self, index: int) -> Read:
        return {weight: self._tensors[index, weight].float32() for weight in self.spec.layers[index].shapes(self.spec.hidden)}

    def target_ids(self) -> NDArray[np.int64] | None:
        """The target's id of every draft id; None where they are the same."""
        if self._map is None:
            return None
        ids = self._map.int64()
        if self.spec.layout != "gguf":  # safetensors hold the distance from the draft id, GGUF the id itself
            ids = ids + np.arange(len(ids))
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= self.spec.vocab:
            worst = ids.max() if ids.max() >= self.spec.vocab else ids.min()
            raise Corrupt(f"{self._origin}: d2t names token {worst}, outside the vocabulary of {self.spec.vocab}")
        return ids


# ------------------------------------------------------------------ fit


def check_fit(spec: DrafterSpec, target: ModelSpec) -> None:
    """Refuse a drafter made for another model, with both numbers."""
    depth = len(target.layers)
    if spec.vocab != target.vocab:
        raise _unfit(f"its vocabulary has {spec.vocab} tokens, the target's has {target.vocab}")
    if spec.target_hidden != target.hidden:
        raise _unfit(f"it reads hidden states of size {spec.target_hidden}, the target's have {target.hidden}")
    if not (spec.own_embedding and spec.own_head) and spec.hidden != target.hidden:
        raise _unfit(f"its hidden size is {spec.hidden}, the target's embedding and head have {target.hidden}")
    if spec.target_depth is not None and spec.target_depth != depth:
        raise _unfit(f"it was made for a target of {spec.target_depth} layers, the target has {depth}")
    if max(spec.target_layers) >= depth:
        raise _unfit(f"it reads the target after layer {max(spec.target_layers)}, the target's last layer is {depth - 1}")
    if spec.block < 2:
        raise _unfit(f"a block of {spec.block} drafts nothing, at least 2 are needed")
    if spec.mask_token >= target.vocab:
        raise _unfit(f"its mask token is {spec.mask_token}, the target's last token is {target.vocab - 1}")


def _unfit(reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"the drafter does not fit the target: {reason}; pass the drafter of this model, or --draft none")
