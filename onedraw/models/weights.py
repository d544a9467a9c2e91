"""Rules as data: which tensor of a checkpoint is which weight of the model, and what to undo on the way.

In: a checkpoint, a ModelSpec and the rules of its dialect. Out: Weights, checked as a whole (every weight is there in
the right shape, every tensor is claimed) and then read layer by layer, so that memory holds one layer beside the model.

Weights, all float32, matrices as [outputs, inputs]
    outer      embed [V, E]  norm [E]  head [V, E] (absent where tied)
    layer      attn_norm  q [H·D, E]  k [K·D, E]  v [K·D, E]  o [E, H·D]  mlp_norm  gate [F, E]  up [F, E]  down [E, F]
               and where the spec says so q_bias k_bias v_bias o_bias q_norm [D] k_norm [D] gate_bias up_bias down_bias
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onedraw.errors import Corrupt, UnsupportedModel
from onedraw.models.source import Source, Tensor
from onedraw.models.spec import LayerSpec, ModelSpec

Where = tuple[int | None, str]  # (layer, weight); layer None for the outer ones
Shape = tuple[int, ...]
Read = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Rules:
    """One dialect's names: weight → stored name, with {layer} for the index."""

    outer: Mapping[str, str]
    layer: Mapping[str, str]
    ignored: str = r"(?!)"  # a pattern of names that hold nothing we need
    permuted: frozenset[str] = frozenset()  # weights whose rows stand in interleaved order, per head

    def stored(self, where: Where) -> str:
        layer, weight = where
        return self.outer[weight] if layer is None else self.layer[weight].format(layer=layer)


class Stack(Protocol):
    """What the weights of a layer depend on; a model is one, a drafter too."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...

    @property
    def hidden(self) -> int: ...


def pairs(prefix: str, names: str) -> dict[str, str]:
    """'q=attn_q.weight k=…' → a table, each stored name behind the prefix."""
    return {weight: prefix + stored for weight, _, stored in (pair.partition("=") for pair in names.split())}


SAFETENSORS = Rules(
    outer=pairs("", "embed=model.embed_tokens.weight norm=model.norm.weight head=lm_head.weight"),
    layer=pairs(
        "model.layers.{layer}.",
        """attn_norm=input_layernorm.weight mlp_norm=post_attention_layernorm.weight
        q=self_attn.q_proj.weight k=self_attn.k_proj.weight v=self_attn.v_proj.weight o=self_attn.o_proj.weight
        q_bias=self_attn.q_proj.bias k_bias=self_attn.k_proj.bias v_bias=self_attn.v_proj.bias o_bias=self_attn.o_proj.bias
        q_norm=self_attn.q_norm.weight k_norm=self_attn.k_norm.weight
        gate=mlp.gate_proj.weight up=mlp.up_proj.weight down=mlp.down_proj.weight
        gate_bias=mlp.gate_proj.bias up_bias=mlp.up_proj.bias down_bias=mlp.down_proj.bias""",
    ),
    ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)
GGUF = Rules(
    outer=pairs("", "embed=token_embd.weight norm=output_norm.weight head=output.weight"),
    layer=pairs(
        "blk.{layer}.",
        """attn_norm=attn_norm.weight mlp_norm=ffn_norm.weight
        q=attn_q.weight k=attn_k.weight v=attn_v.weight o=attn_output.weight
        q_bias=attn_q.bias k_bias=attn_k.bias v_bias=attn_v.bias o_bias=attn_output.bias
        q_norm=attn_q_norm.weight k_norm=attn_k_norm.weight
        gate=ffn_gate.weight up=ffn_up.weight down=ffn_down.weight
        gate_bias=ffn_gate.bias up_bias=ffn_up.bias down_bias=ffn_down.bias""",
    ),
    ignored=r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?",  # the first is read with the rope
)
GGUF_PERMUTED = Rules(
    outer=GGUF.outer, layer=GGUF.layer, ignored=GGUF.ignored, permuted=frozenset({"q", "k", "q_bias", "k_bias"})
)
PLAIN = Rules(
    outer={weight: weight for weight in SAFETENSORS.outer},
    layer={weight: f"layers.{{layer}}.{weight}" for weight in SAFETENSORS.layer},
)


# ------------------------------------------------------------------ what a spec needs


def all_shapes(spec: ModelSpec) -> dict[Where, Shape]:
    shapes: dict[Where, Shape] = {(None, weight): shape for weight, shape in spec.outer_shapes().items()}
    for index in range(len(spec.layers)):
        shapes |= {(index, weight): shape for weight, shape in spec.layers[index].shapes(spec.hidden).items()}
    return shapes


# ------------------------------------------------------------------ reading


class Weights:
    """The weights of one checkpoint. Complete when made: what is missing, misshapen or unclaimed was refused."""

    def __init__(self, source: Source, spec: ModelSpec, rules: Rules) -> None:
        self.spec = spec
        self._rules = rules
        self._tensors: dict[Where, Tensor] = {}
        for where, shape in all_shapes(spec).items():
            self._tensors[where] = find(source, rules.stored(where), shape)
            self._tensors[where].require_readable()
        claimed = {tensor.name for tensor in self._tensors.values()}
        copies = {rules.outer["head"]} if spec.tied else set()  # a tied head may be stored a second time
        refuse_unclaimed(source, claimed | copies, ignored=rules.ignored, kind=f"{spec.family} model")

    def tensor(self, layer: int | None, weight: str) -> Tensor:
        """One weight, still packed, its rows in our order."""
        tensor = self._tensors[layer, weight]
        if layer is None or weight not in self._rules.permuted:
            return tensor
        mixer = self.spec.layers[layer].mixer
        return tensor.take_rows(half_split_order(mixer.heads if weight.startswith("q") else mixer.kv_heads, mixer.head_dim))

    def read(self, layer: int | None, weight: str) -> NDArray[np.float32]:
        return self.tensor(layer, weight).float32()

    def outer(self) -> Read:
        """embed, norm and, unless tied, head."""
        return {weight: self.read(None, weight) for weight in self.spec.outer_shapes()}

    def layer(self, index: int) -> Read:
        return {weight: self.read(index, weight) for weight in self.spec.layers[index].shapes(self.spec.hidden)}


def half_split_order(heads: int, head_dim: int) -> NDArray[np.intp]:
    """Undoes what converters do to q and k: pairs that stand side by side go back to (i, i + head_dim / 2)."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def find(source: Source, name: str, shape: Shape) -> Tensor:
    tensor = source.tensors.get(name)
    if tensor is None:
        raise Corrupt(f"{source.path}: tensor {name} is missing")
    if tensor.shape != shape:
        raise Corrupt(f"{source.path}: tensor {name} has shape {list(tensor.shape)}, the model needs {list(shape)}")
    return tensor


def refuse_unclaimed(source: Source, claimed: Collection[str], *, ignored: str, kind: str) -> None:
    """A tensor nobody reads may be half of the model."""
    pattern = re.compile(ignored)
    for name in source.tensors:
        if name not in claimed and not pattern.fullmatch(name):
            raise UnsupportedModel(f"{source.path}: tensor {name} has no place in a {kind} of this description")
