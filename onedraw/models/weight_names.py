"""Weight names as data: which tensor of a checkpoint is which weight of the model, and how it is transformed.

In: a checkpoint, a ModelSpec and the WeightNames of the checkpoint's format. Out: ModelWeights. Its constructor checks that every
weight is present in the right shape and that no tensor is unknown; the values are read later, layer by layer, to save memory.

Weights have the names and shapes of `spec.py` and the same form for every file format: float32, matrices as [outputs, inputs],
experts as [expert, outputs, inputs]; a norm multiplies by its weight unchanged, `decay` is negative, `conv` is
[channels, positions], value heads are grouped by key head, q and its gate are separate matrices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.source import LazyTensor, ModelSource, RowSelection
from onedraw.models.spec import AttentionSpec, LayerSpec, ModelSpec

WeightKey = tuple[int | None, str]  # (layer index, weight name); None for weights outside the layers
TensorShape = tuple[int, ...]
WeightArrays = dict[str, NDArray[np.float32]]
WeightTransform = Callable[["WeightLookup"], LazyTensor]  # builds a weight from one or several stored tensors


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Stored tensor names of one checkpoint format, by weight; {layer} is replaced by the layer index."""

    outer: Mapping[str, str]
    layer: Mapping[str, str]
    ignored: str = r"(?!)"  # pattern of tensors that are not needed
    transforms: Mapping[str, WeightTransform] = field(default_factory=dict)  # for weights that are stored in another form
    aliases: tuple[tuple[str, str], ...] = ()  # (pattern, replacement): alternative tensor names → those of this table
    stored: tuple[tuple[str, str], ...] = ()  # (pattern, replacement): names of this table → those of the file, for errors
    unused: tuple[tuple[str, str], ...] = ()  # (pattern, note) of tensors outside the text model; the note is shown to the user
    mtp_marker: str = ""  # if this tensor exists in the block after the last layer, that block is an MTP head

    def stored_name(self, key: WeightKey) -> str:
        layer, weight = key
        return self.outer[weight] if layer is None else self.layer[weight].format(layer=layer)

    def transform(self, key: WeightKey) -> WeightTransform:
        return self.transforms.get(key[1]) or as_stored(self.stored_name(key))


class LayerStack(Protocol):
    """Anything with layers: a model or a drafter."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...

    @property
    def hidden(self) -> int: ...


def name_table(prefix: str, names: str) -> dict[str, str]:
    """'q=attn_q.weight k=…' as a table of weight → prefix + stored name."""
    return {weight: prefix + stored for weight, _, stored in (pair.partition("=") for pair in names.split())}


# ------------------------------------------------------------------ looking up one weight
@dataclass(frozen=True, slots=True)
class WeightLookup:
    """The context in which a transform finds the stored tensors of one weight."""

    origin: str  # path of the checkpoint, which errors name
    tensors: Mapping[str, LazyTensor]  # the stored tensors by name, after alternative names were replaced
    index: int | None  # number of the layer; None for weights outside the layers
    layer: LayerSpec | None
    shape: TensorShape  # the shape that the weight must have
    used: set[str]  # names of the tensors found so far
    stored: tuple[tuple[str, str], ...] = ()  # the same as `WeightNames.stored`

    def stored_name(self, name: str) -> str:
        return name.format(layer=self.index)

    def has(self, name: str) -> bool:
        return self.stored_name(name) in self.tensors

    def find(self, name: str, shape: TensorShape | None = None) -> LazyTensor:
        """The stored tensor of this name; it must have the given shape, by default that of the weight."""
        ours = stored = self.stored_name(name)
        for pattern, replacement in self.stored:
            stored = re.sub(pattern, replacement, stored)
        tensor = _find(self.origin, self.tensors, ours, self.shape if shape is None else shape, stored=stored)
        self.used.add(tensor.name)
        return tensor

    @property
    def attention(self) -> AttentionSpec:
        if self.layer is None:
            raise TypeError("this weight is outside the layers")
        return self.layer.attention


def as_stored(name: str) -> WeightTransform:
    return lambda lookup: lookup.find(name)


def unpermute_rows(name: str, heads: Callable[[AttentionSpec], int]) -> WeightTransform:
    """A transform for q or k of a GGUF file whose converter interleaved the rotary halves of every head."""

    def transform(lookup: WeightLookup) -> LazyTensor:
        return RowSelection(lookup.find(name), unpermuted_row_order(heads(lookup.attention), lookup.attention.head_dim))

    return transform


def unpermuted_row_order(heads: int, head_dim: int) -> NDArray[np.intp]:
    """The row order that undoes the interleaving: adjacent pairs become (i, i + head_dim / 2)."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


# ------------------------------------------------------------------ names common to most families


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
    ignored=r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?",  # rope_freqs is read with the rope
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


# ------------------------------------------------------------------ reading


def weight_shapes(spec: ModelSpec) -> dict[WeightKey, TensorShape]:
    """Shapes of all weights of a model."""
    shapes: dict[WeightKey, TensorShape] = {(None, weight): shape for weight, shape in spec.outer_shapes().items()}
    for index in range(len(spec.layers)):
        shapes |= {(index, weight): shape for weight, shape in spec.layers[index].shapes(spec.hidden).items()}
    return shapes


class NamedWeights:
    """Weights by layer and name, which are read when requested."""

    def __init__(self, tensors: Mapping[WeightKey, LazyTensor]) -> None:
        self._tensors = tensors

    def tensor(self, layer: int | None, weight: str) -> LazyTensor:
        """One weight, whose rows stay quantized until they are read. `layer` None: a weight outside the layers."""
        return self._tensors[layer, weight]

    def read(self, layer: int | None, weight: str) -> NDArray[np.float32]:
        return self.tensor(layer, weight).float32()

    def outer(self) -> WeightArrays:
        """All weights outside the layers."""
        return {weight: self.read(None, weight) for layer, weight in self._tensors if layer is None}

    def layer(self, index: int) -> WeightArrays:
        return {weight: self.read(index, weight) for layer, weight in self._tensors if layer == index}


class ModelWeights(NamedWeights):
    """The weights of one checkpoint. The constructor refuses missing, misshapen and unknown tensors."""

    def __init__(self, source: ModelSource, spec: ModelSpec, names: WeightNames) -> None:
        used: set[str] = set()
        super().__init__(find_weights(source, spec, names, shapes=weight_shapes(spec), used=used))
        used |= _redundant_tensors(spec, names, _resolve_aliases(source, names))
        self.spec = replace(spec, notes=(*spec.notes, *_notes_on_unused(source, spec, names, used)))


def find_weights(
    source: ModelSource, stack: LayerStack, names: WeightNames, *, shapes: Mapping[WeightKey, TensorShape], used: set[str]
) -> dict[WeightKey, LazyTensor]:
    """All weights of these shapes, checked but not read. The names of the tensors they are built from are added to `used`."""
    tensors = _resolve_aliases(source, names)
    found: dict[WeightKey, LazyTensor] = {}
    for key, shape in shapes.items():
        index = key[0]
        layer = None if index is None else stack.layers[index]
        lookup = WeightLookup(str(source.path), tensors, index=index, layer=layer, shape=shape, used=used, stored=names.stored)
        found[key] = names.transform(key)(lookup)
        if found[key].shape != shape:
            raise ValueError(f"the transform of {key} gives shape {found[key].shape}, the model needs {shape}")
        found[key].require_readable()
    return found


def _resolve_aliases(source: ModelSource, names: WeightNames) -> Mapping[str, LazyTensor]:
    """The source's tensors, with alternative names replaced."""
    if not names.aliases:
        return source.tensors
    patterns = [(re.compile(pattern), ours) for pattern, ours in names.aliases]
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in source.tensors.items():
        ours = name
        for pattern, replacement in patterns:
            ours = pattern.sub(replacement, ours)
        if ours in tensors:
            raise CorruptFile(f"{source.path}: tensors {tensors[ours].name} and {name} are the same weight")
        tensors[ours] = tensor
    return tensors


def _redundant_tensors(spec: ModelSpec, names: WeightNames, tensors: Mapping[str, LazyTensor]) -> set[str]:
    """Stored tensors that the model does not read: the head of a tied model, and k, v and k_norm of layers that reuse the keys
    and values of another layer."""
    redundant = {names.outer["head"]} if spec.tied else set()
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, AttentionSpec) and layer.mixer.reuses is not None:
            redundant |= {names.stored_name((index, weight)) for weight in ("k", "v", "k_norm")}
    return {tensors[name].name for name in redundant if name in tensors}


def _notes_on_unused(source: ModelSource, spec: ModelSpec, names: WeightNames, used: Collection[str]) -> tuple[str, ...]:
    """Notes on tensors outside the text model; UnsupportedModel for a tensor that is neither used nor known."""
    unused, depth = dict(names.unused), len(spec.layers)
    if names.mtp_marker and names.mtp_marker.format(layer=depth) in source.tensors:
        unused[rf"blk\.{depth}\..*"] = MTP_NOTE
    counts = dict.fromkeys(unused, 0)
    ignored = re.compile(names.ignored)
    for name in source.tensors:
        if name in used or ignored.fullmatch(name):
            continue
        pattern = next((pattern for pattern in unused if re.fullmatch(pattern, name)), None)
        if pattern is None:
            raise _unexpected(source, name, f"{spec.family} model")
        counts[pattern] += 1
    return tuple(f"{unused[pattern]} ({count} tensors)" for pattern, count in counts.items() if count)


MTP_NOTE = "an MTP head (multi-token prediction): it drafts with --draft mtp and is not part of the model"


def find_tensor(source: ModelSource, name: str, shape: TensorShape) -> LazyTensor:
    return _find(str(source.path), source.tensors, name, shape, stored=name)


def _find(origin: str, tensors: Mapping[str, LazyTensor], name: str, shape: TensorShape, *, stored: str) -> LazyTensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise CorruptFile(f"{origin}: tensor {stored} is missing")
    if tensor.shape != shape:
        raise CorruptFile(f"{origin}: tensor {tensor.name} has shape {list(tensor.shape)}, the model needs {list(shape)}")
    return tensor


def refuse_unused_tensors(source: ModelSource, used: Collection[str], *, ignored: str, kind: str) -> None:
    """Refuse a checkpoint with a tensor that is neither used nor matched by the pattern `ignored`: part of the model would be
    left out. `kind` says in the error what the tensor is not part of."""
    pattern = re.compile(ignored)
    for name in source.tensors:
        if name not in used and not pattern.fullmatch(name):
            raise _unexpected(source, name, kind)


def _unexpected(source: ModelSource, name: str, kind: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{source.path}: tensor {name} is unexpected: it is not part of the {kind} that the configuration describes"
    )
