"""Rules as data: which tensor of a checkpoint is which weight of the model, and what to undo on the way.

In: a checkpoint, a ModelSpec and the rules of its dialect. Out: Weights, checked as a whole (every weight is there in
the right shape, every tensor is claimed) and then read layer by layer, so that memory holds one layer beside the model.

Weights, all float32, matrices as [outputs, inputs], experts as [expert, outputs, inputs]. Their names and shapes are
those of `spec.py`, and they have one form whatever the file: a norm's weight multiplies as it is, `decay` is negative,
`conv` is [channels, positions], value heads stand grouped by key head, q and its gate are two matrices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.source import LazyTensor, ModelSource
from onedraw.models.spec import AttentionSpec, LayerSpec, ModelSpec
from onedraw.models.tensor_views import RowSelection

WeightKey = tuple[int | None, str]  # (layer, weight); layer None for the outer ones
TensorShape = tuple[int, ...]
WeightArrays = dict[str, NDArray[np.float32]]
WeightTransform = Callable[["WeightLookup"], LazyTensor]  # makes a weight of one or several stored tensors


@dataclass(frozen=True, slots=True)
class WeightNames:
    """One dialect's names: weight → stored name, with {layer} for the index; and what a name alone does not say."""

    outer: Mapping[str, str]
    layer: Mapping[str, str]
    ignored: str = r"(?!)"  # a pattern of names that hold nothing we need
    transforms: Mapping[str, WeightTransform] = field(
        default_factory=dict
    )  # weights that are more than one tensor as it is stored
    aliases: tuple[tuple[str, str], ...] = ()  # patterns of other names for the same tensors, and ours
    unused: tuple[tuple[str, str], ...] = ()  # patterns of tensors that are no part of the model, and what to tell of them
    mtp_marker: str = ""  # by this tensor the block after the model's last is known to guess ahead and nothing else

    def stored_name(self, where: WeightKey) -> str:
        layer, weight = where
        return self.outer[weight] if layer is None else self.layer[weight].format(layer=layer)

    def transform(self, where: WeightKey) -> WeightTransform:
        return self.transforms.get(where[1]) or as_stored(self.stored_name(where))


class LayerStack(Protocol):
    """What the weights of a layer depend on; a model is one, a drafter too."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...

    @property
    def hidden(self) -> int: ...


def name_table(prefix: str, names: str) -> dict[str, str]:
    """'q=attn_q.weight k=…' → a table, each stored name behind the prefix."""
    return {weight: prefix + stored for weight, _, stored in (pair.partition("=") for pair in names.split())}


# ------------------------------------------------------------------ where a recipe is followed


@dataclass(frozen=True, slots=True)
class WeightLookup:
    """One weight being looked for: what there is, what it must become, and what was used for it."""

    origin: str
    tensors: Mapping[str, LazyTensor]  # by our names
    index: int | None
    layer: LayerSpec | None
    shape: TensorShape
    claimed: set[str]

    def named(self, name: str) -> str:
        return name.format(layer=self.index)

    def has(self, name: str) -> bool:
        return self.named(name) in self.tensors

    def find(self, name: str, shape: TensorShape | None = None) -> LazyTensor:
        """A stored tensor, which must have this shape; without one, that of the weight."""
        tensor = _find(self.origin, self.tensors, self.named(name), self.shape if shape is None else shape)
        self.claimed.add(tensor.name)
        return tensor

    @property
    def attention(self) -> AttentionSpec:
        if self.layer is None:
            raise TypeError("this weight belongs to no layer")
        return self.layer.attention


def as_stored(name: str) -> WeightTransform:
    return lambda site: site.find(name)


def unpermute_rows(name: str, heads: Callable[[AttentionSpec], int]) -> WeightTransform:
    """Rows that a converter put side by side in pairs."""

    def recipe(site: WeightLookup) -> LazyTensor:
        return RowSelection(site.find(name), unpermuted_row_order(heads(site.attention), site.attention.head_dim))

    return recipe


def unpermuted_row_order(heads: int, head_dim: int) -> NDArray[np.intp]:
    """Undoes what converters do to q and k: pairs that stand side by side go back to (i, i + head_dim / 2)."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


# ------------------------------------------------------------------ the dialects of the dense families


SAFETENSORS_NAMES = WeightNames(
    outer=name_table("", "embed=model.embed_tokens.weight norm=model.norm.weight head=lm_head.weight"),
    layer=name_table(
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
GGUF_NAMES = WeightNames(
    outer=name_table("", "embed=token_embd.weight norm=output_norm.weight head=output.weight"),
    layer=name_table(
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
GGUF_PERMUTED_NAMES = WeightNames(
    outer=GGUF_NAMES.outer,
    layer=GGUF_NAMES.layer,
    ignored=GGUF_NAMES.ignored,
    transforms={weight: unpermute_rows(GGUF_NAMES.layer[weight], lambda mixer: mixer.heads) for weight in ("q", "q_bias")}
    | {weight: unpermute_rows(GGUF_NAMES.layer[weight], lambda mixer: mixer.kv_heads) for weight in ("k", "k_bias")},
)
_OUTER = "embed norm head inputs_embed inputs_project inputs_project_norm"
_LAYER = """
    attn_norm q k v o q_bias k_bias v_bias o_bias q_norm k_norm attn_gate
    delta_qkv delta_z delta_a delta_b conv decay delta_bias delta_norm
    mlp_norm gate up down gate_bias up_bias down_bias
    router expert_gate expert_up expert_down select_bias expert_scale router_scale
    shared_gate shared_up shared_down shared_route
    post_attn_norm post_mlp_norm dense_norm experts_norm post_experts_norm
    inputs_gate inputs_out inputs_norm layer_scale
"""
PLAIN_NAMES = WeightNames(
    outer={name: name for name in _OUTER.split()},
    layer={name: f"layers.{{layer}}.{name}" for name in _LAYER.split()},
)


# ------------------------------------------------------------------ what a spec needs


def weight_shapes(spec: ModelSpec) -> dict[WeightKey, TensorShape]:
    shapes: dict[WeightKey, TensorShape] = {(None, weight): shape for weight, shape in spec.outer_shapes().items()}
    for index in range(len(spec.layers)):
        shapes |= {(index, weight): shape for weight, shape in spec.layers[index].shapes(spec.hidden).items()}
    return shapes


# ------------------------------------------------------------------ reading


class ModelWeights:
    """The weights of one checkpoint. Complete when made: what is missing, misshapen or unclaimed was refused."""

    def __init__(self, source: ModelSource, spec: ModelSpec, rules: WeightNames) -> None:
        claimed: set[str] = set()
        self._tensors = find_weights(source, spec, rules, shapes=weight_shapes(spec), claimed=claimed)
        claimed |= _copies(spec, rules, renamed(source, rules))
        self.spec = replace(spec, notes=(*spec.notes, *_leftovers(source, spec, rules, claimed)))

    def tensor(self, layer: int | None, weight: str) -> LazyTensor:
        """One weight in our form, its rows still packed."""
        return self._tensors[layer, weight]

    def read(self, layer: int | None, weight: str) -> NDArray[np.float32]:
        return self.tensor(layer, weight).float32()

    def outer(self) -> WeightArrays:
        """embed, norm and, unless tied, head."""
        return {weight: self.read(None, weight) for weight in self.spec.outer_shapes()}

    def layer(self, index: int) -> WeightArrays:
        return {weight: self.read(index, weight) for weight in self.spec.layers[index].shapes(self.spec.hidden)}


def find_weights(
    source: ModelSource, stack: LayerStack, rules: WeightNames, *, shapes: Mapping[WeightKey, TensorShape], claimed: set[str]
) -> dict[WeightKey, LazyTensor]:
    """Every weight, checked and not read; the names of the tensors they are made of are added to `claimed`."""
    tensors = renamed(source, rules)
    found: dict[WeightKey, LazyTensor] = {}
    for where, shape in shapes.items():
        index = where[0]
        layer = None if index is None else stack.layers[index]
        site = WeightLookup(str(source.path), tensors, index=index, layer=layer, shape=shape, claimed=claimed)
        found[where] = rules.transform(where)(site)
        if found[where].shape != shape:
            raise ValueError(f"the rule for {where} gives shape {found[where].shape}, the model needs {shape}")
        found[where].require_readable()
    return found


def renamed(source: ModelSource, rules: WeightNames) -> Mapping[str, LazyTensor]:
    """The source's tensors by the names that the rules use."""
    if not rules.aliases:
        return source.tensors
    patterns = [(re.compile(pattern), ours) for pattern, ours in rules.aliases]
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in source.tensors.items():
        ours = name
        for pattern, replacement in patterns:
            ours = pattern.sub(replacement, ours)
        if ours in tensors:
            raise CorruptFile(f"{source.path}: tensors {tensors[ours].name} and {name} are the same weight")
        tensors[ours] = tensor
    return tensors


def _copies(spec: ModelSpec, rules: WeightNames, tensors: Mapping[str, LazyTensor]) -> set[str]:
    """Tensors that may be stored although another is used in their place."""
    names = {rules.outer["head"]} if spec.tied else set()
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, AttentionSpec) and layer.mixer.reuses is not None:
            names |= {rules.stored_name((index, weight)) for weight in ("k", "v", "k_norm")}
    return {tensors[name].name for name in names if name in tensors}


def _leftovers(source: ModelSource, spec: ModelSpec, rules: WeightNames, claimed: Collection[str]) -> tuple[str, ...]:
    """What is told of tensors that are no part of the model; one that has no such excuse is refused."""
    unused, depth = dict(rules.unused), len(spec.layers)
    if rules.mtp_marker and rules.mtp_marker.format(layer=depth) in source.tensors:
        unused[rf"blk\.{depth}\..*"] = MTP_NOTE
    counts = dict.fromkeys(unused, 0)
    ignored = re.compile(rules.ignored)
    for name in source.tensors:
        if name in claimed or ignored.fullmatch(name):
            continue
        pattern = next((pattern for pattern in unused if re.fullmatch(pattern, name)), None)
        if pattern is None:
            raise _unclaimed(source, name, f"{spec.family} model")
        counts[pattern] += 1
    return tuple(f"{unused[pattern]} ({count} tensors)" for pattern, count in counts.items() if count)


MTP_NOTE = "a head that guesses the token after the next: it drafts with --draft mtp and is no part of the model"


def find_tensor(source: ModelSource, name: str, shape: TensorShape) -> LazyTensor:
    return _find(str(source.path), source.tensors, name, shape)


def _find(origin: str, tensors: Mapping[str, LazyTensor], name: str, shape: TensorShape) -> LazyTensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise CorruptFile(f"{origin}: tensor {name} is missing")
    if tensor.shape != shape:
        raise CorruptFile(f"{origin}: tensor {tensor.name} has shape {list(tensor.shape)}, the model needs {list(shape)}")
    return tensor


def refuse_unused_tensors(source: ModelSource, claimed: Collection[str], *, ignored: str, kind: str) -> None:
    """A tensor nobody reads may be half of the model."""
    pattern = re.compile(ignored)
    for name in source.tensors:
        if name not in claimed and not pattern.fullmatch(name):
            raise _unclaimed(source, name, kind)


def _unclaimed(source: ModelSource, name: str, kind: str) -> UnsupportedModel:
    return UnsupportedModel(f"{source.path}: tensor {name} has no place in a {kind} of this description")
