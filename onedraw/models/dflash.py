"""DFlash drafters: their spec, their weights, and whether a drafter fits a target.

In: an open checkpoint in one of three layouts (z-lab or speculators safetensors, GGUF `dflash`) and the ModelSpec of the target,
the model that it drafts for. Out: DrafterInfo, or UnsupportedModel.

A feature of a position is the target's residual stream there, after a layer that the drafter names. A block is the positions that
one pass of the drafter computes; its positions are called slots. Slot 0 holds the anchor, which is the last sampled token, and
the other slots hold mask tokens. Axes: n target layers with features, Ht hidden width of the target, E that of the drafter, C
committed positions, B slots of a block, V tokens of the target's vocabulary, Vd rows of the drafter's own head.

A drafter computes, for C committed positions with features F [C, n·Ht] and the anchor:
    c        = rms(F · fcᵀ) · hidden_norm                      once per position, shared by all layers, not normed again
    context  k = rope(rms(c · kᵀ) · k_norm, position)  v = c · vᵀ      per layer, at the position of the target token
    block    x = embed([anchor, mask, …, mask])                B tokens at positions C … C + B - 1
    layer    x += attention(rms(x) · attn_norm)                over the keys and values of the context and of the block
             x += down(silu(gate(h)) · up(h)), h = rms(x) · mlp_norm
    logits   head(rms(x) · norm) of slots 1 … B - 1; slot s drafts the token at position C + s
A layer with a window W attends to context positions C - W … C - 1, the same for every slot. Within the block every slot attends
to every slot, or with `causal_in_block` only to itself and the slots before it.

Weights, float32, matrices as [outputs, inputs]
    outer      fc [E, n·Ht]  hidden_norm [E]  norm [E]; embed [V, E] and head [Vd, E] if the drafter has its own
    layer      the names of `weight_names.py`, with q_norm and k_norm
    target_ids int64 [Vd]: the target's token id of every row of the head, if the drafter has a reduced vocabulary
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.config_reader import IGNORED_KEYS, MAX_LAYERS, ConfigReader, code_notes, default_head_dim, layer_types
from onedraw.models.family import IGNORED_METADATA, check_layer_sizes
from onedraw.models.rope import rope_from_config, rope_from_metadata
from onedraw.models.source import LazyTensor, ModelSource
from onedraw.models.spec import AttentionSpec, DrafterLayout, DrafterSpec, LayerSpec, MlpSpec, ModelSpec
from onedraw.models.weight_names import (
    GGUF_NAMES,
    SAFETENSORS_NAMES,
    TensorShape,
    WeightArrays,
    WeightKey,
    WeightNames,
    find_tensor,
    name_table,
    refuse_unused_tensors,
)

SUPPORTED = "DFlashDraftModel (z-lab), speculators of type dflash, GGUF of architecture dflash"
DEFAULT_BLOCK = 16  # block size of z-lab configs that name none
DEFAULT_HEAD_DIM = 128  # head size of Qwen3 configs that name none

# Unsupported variants of DFlash: pattern in a name of an architecture, model type or tensor → description. First match wins.
VARIANTS = {
    r"dflash2|candidate_selector|attention_conv|mlp_conv": "DFlash2, which adds convolutions and a candidate selector",
    r"laguna|aux_hidden_norms|aux_norm": "a Laguna draft, which norms every feature and gates its attention",
    r"dspark|markov|conf_proj|confidence": "DSpark, which adds a Markov head and a confidence head",
    r"domino": "Domino, which adds a recurrent head",
    r"dflare|fusion_": "DFlare, which fuses features per layer",
}
IGNORED_DRAFTER_KEYS = IGNORED_KEYS | {"auto_map", "tie_word_embeddings", "max_anchors", "mask_token"}
IGNORED_SPECULATOR_KEYS = {"speculators_version", "speculators_config", "has_no_defaults_at_init", *IGNORED_DRAFTER_KEYS}

_SAFETENSORS = WeightNames(
    outer=name_table("", "fc=fc.weight hidden_norm=hidden_norm.weight norm=norm.weight embed=embed_tokens.weight")
    | name_table("", "head=lm_head.weight d2t=d2t"),
    layer={weight: stored.removeprefix("model.") for weight, stored in SAFETENSORS_NAMES.layer.items()},
    ignored=r"t2d|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",  # t2d repeats what d2t says, and d2t is read
)
DRAFTER_WEIGHT_NAMES: dict[DrafterLayout, WeightNames] = {
    "z-lab": _SAFETENSORS,
    "speculators": _SAFETENSORS,
    "gguf": WeightNames(
        outer=name_table("", "fc=fc.weight hidden_norm=enc.output_norm.weight norm=output_norm.weight")
        | name_table("", "embed=token_embd.weight head=output.weight d2t=d2t"),
        layer=GGUF_NAMES.layer,
        ignored=GGUF_NAMES.ignored,
    ),
}


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    spec: DrafterSpec
    weights: DrafterWeights


def is_drafter(source: ModelSource) -> bool:
    """Whether a checkpoint is a DFlash-like drafter rather than a model; it may still be unsupported."""
    config = source.config
    return (
        "speculators_model_type" in config or "dflash_config" in config or bool(re.search("dflash|dspark", _name(source), re.I))
    )


def read_drafter_info(source: ModelSource) -> DrafterInfo:
    """Read the configuration, and check that the tensors match it. No weight is read."""
    layout = detect_layout(source)
    _refuse_variants(source)
    spec = read_drafter_spec(source, layout)
    return DrafterInfo(spec, DrafterWeights(source, spec, DRAFTER_WEIGHT_NAMES[layout]))


# ------------------------------------------------------------------ layouts and variants


def detect_layout(source: ModelSource) -> DrafterLayout:
    name = _name(source)
    if source.format == "gguf":
        if name == "dflash":
            return "gguf"
    elif "speculators_model_type" in source.config:  # checked first: such files may name z-lab's architecture too
        name = f"speculators_model_type {source.config['speculators_model_type']}"
        if source.config["speculators_model_type"] == "dflash":
            return "speculators"
    elif name == "DFlashDraftModel":
        return "z-lab"
    raise UnsupportedModel(
        f"{source.path}: {name or 'a nameless model'}{_variant(name)} is not supported as a drafter; supported: {SUPPORTED}"
    )


def _refuse_variants(source: ModelSource) -> None:
    """Refuse drafters with parts that plain DFlash does not have."""
    for name in (_name(source), *source.tensors):
        if variant := _variant(name):
            raise UnsupportedModel(f"{source.path}: {name}{variant} is not supported; supported drafters: {SUPPORTED}")
    if (source.path / "mask_embedding.pt").exists():  # this file would replace the embedding of the mask token
        raise UnsupportedModel(
            f"{source.path}: mask_embedding.pt is a pickle, which can run code and is never opened; this drafter is not supported"
        )


def _name(source: ModelSource) -> str:
    """The architecture that the checkpoint names."""
    if source.format == "gguf":
        return str(source.config.get("general.architecture", ""))
    names = source.config.get("architectures") or [source.config.get("model_type", "")]
    return str(names[0]) if isinstance(names, list) else str(names)


def _variant(name: str) -> str:
    for pattern, description in VARIANTS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return f" ({description})"
    return ""


def read_drafter_spec(source: ModelSource, layout: DrafterLayout) -> DrafterSpec:
    match layout:
        case "z-lab":
            spec = _from_zlab(source)
        case "speculators":
            spec = _from_speculators(source)
        case "gguf":
            spec = _from_metadata(source)
        case _:
            assert_never(layout)
    return _validated(spec, str(source.path))


# ------------------------------------------------------------------ safetensors


def _from_zlab(source: ModelSource) -> DrafterSpec:
    origin = str(source.path / "config.json")
    keys = ConfigReader(source.config, origin=origin)
    inner = ConfigReader(keys.mapping("dflash_config") or {}, origin=f"{origin}: dflash_config")
    layers = _layers(keys, origin)
    window = inner.optional_integer("swa_window_size") or keys.optional_integer("sliding_window")
    if inner.flag("use_swa"):  # every layer has a window, regardless of layer_types
        if window is None:
            raise CorruptFile(f"{origin}: dflash_config.use_swa is set, but neither swa_window_size nor sliding_window is")
        layers = tuple(replace(layer, mixer=replace(layer.attention, window=window)) for layer in layers)
    depth = _either(keys, inner, "num_target_layers", origin)
    ids = _target_layers(keys, inner, count=len(layers), depth=depth, origin=origin)
    inner_causal = inner.flag("causal") if inner.get("causal") is not None else None
    causal = keys.flag("is_causal") if keys.get("is_causal") is not None else inner_causal
    _refuse_switches(keys)
    _refuse_switches(inner)
    spec = DrafterSpec(
        layout="z-lab",
        layers=layers,
        causal_in_block=tuple(layer.attention.window is not None if causal is None else causal for layer in layers),
        hidden=keys.integer("hidden_size"),
        target_hidden=keys.integer("target_hidden_size", keys.integer("hidden_size")),
        vocab=keys.integer("vocab_size"),
        draft_vocab=keys.integer("draft_vocab_size", keys.integer("vocab_size")),
        eps=keys.number("rms_norm_eps", 1e-6),
        block=_either(keys, inner, "block_size", origin, least=2) or DEFAULT_BLOCK,
        mask_token=_mask(_either(keys, inner, "mask_token_id", origin, least=0), origin),
        target_layers=ids,
        max_context=keys.integer("max_position_embeddings"),
        target_depth=depth,
        notes=code_notes(keys),
    )
    keys.refuse_unknown(IGNORED_DRAFTER_KEYS)
    inner.refuse_unknown({"mask_token"})
    return _with_own_tensors(spec, source, embed="embed_tokens.weight", head="lm_head.weight")


def _from_speculators(source: ModelSource) -> DrafterSpec:
    origin = str(source.path / "config.json")
    keys = ConfigReader(source.config, origin=origin)
    stack = ConfigReader(keys.mapping("transformer_layer_config") or {}, origin=f"{origin}: transformer_layer_config")
    layers = _layers(stack, f"{origin}: transformer_layer_config")
    non_causal = keys.flag("sliding_window_non_causal")
    counted = keys.get("aux_hidden_state_layer_ids")
    if counted is None:
        raise CorruptFile(f"{origin}: aux_hidden_state_layer_ids is missing")
    _refuse_switches(keys)
    _refuse_switches(stack)
    keys.expect("pure_draft_prefix_len", 1)
    hidden, vocab = stack.integer("hidden_size"), stack.integer("vocab_size")
    spec = DrafterSpec(
        layout="speculators",
        layers=layers,
        causal_in_block=tuple(layer.attention.window is not None and not non_causal for layer in layers),
        hidden=hidden,
        target_hidden=keys.integer("target_hidden_size", hidden),
        vocab=vocab,
        draft_vocab=keys.integer("draft_vocab_size", vocab),
        eps=stack.number("rms_norm_eps", 1e-6),
        block=keys.integer("block_size", least=2),
        mask_token=_mask(keys.optional_integer("mask_token_id", least=0), origin),
        target_layers=_zero_based(counted, "aux_hidden_state_layer_ids", offset=1, origin=origin),
        max_context=stack.integer("max_position_embeddings"),
        notes=code_notes(keys),
    )
    keys.get("speculators_model_type")
    keys.refuse_unknown(IGNORED_SPECULATOR_KEYS)
    stack.refuse_unknown(IGNORED_DRAFTER_KEYS)
    return _with_own_tensors(spec, source, embed="embed_tokens.weight", head="lm_head.weight")


def _layers(keys: ConfigReader, origin: str) -> tuple[LayerSpec, ...]:
    """The Qwen3-style layers, which both safetensors layouts describe with transformers' keys."""
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    keys.expect("quantization_config")
    count, head_dim = keys.integer("num_hidden_layers", most=MAX_LAYERS), keys.integer("head_dim", DEFAULT_HEAD_DIM)
    heads, max_context = keys.integer("num_attention_heads"), keys.integer("max_position_embeddings")
    info: Mapping[str, Any] = keys.mapping("rope_parameters") or keys.mapping("rope_scaling") or {}
    if keys.get("rope_theta") is None and "rope_theta" not in info:
        raise CorruptFile(f"{origin}: rope_theta is missing; with a wrong value drafts would be rejected more often, unnoticed")
    mixer = AttentionSpec(
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=rope_from_config(keys, head_dim=head_dim, max_context=max_context, origin=origin),
        scale=head_dim**-0.5,
        qk_norm=True,
    )
    feed_forward = MlpSpec(keys.integer("intermediate_size"))
    return tuple(LayerSpec(replace(mixer, window=window), feed_forward) for window in _windows(keys, count, origin))


def _windows(keys: ConfigReader, count: int, origin: str) -> list[int | None]:
    """The window of every layer: by layer_types, or by Qwen3's rule (use_sliding_window from max_window_layers on)."""
    full, sliding = kinds = ("full_attention", "sliding_attention")
    window, used = keys.optional_integer("sliding_window"), keys.flag("use_sliding_window")
    first = keys.integer("max_window_layers", 0, least=0)
    by_index = [sliding if window and used and index >= first else full for index in range(count)]
    types = layer_types(keys, count, accepted=kinds, default=by_index, origin=origin)
    if window is None and sliding in types:
        raise CorruptFile(f"{origin}: layer_types has sliding_attention layers, but no sliding_window is set")
    return [window if kind == sliding else None for kind in types]


def _target_layers(keys: ConfigReader, inner: ConfigReader, *, count: int, depth: int | None, origin: str) -> tuple[int, ...]:
    """The target layers whose outputs are the features: as listed, or z-lab's default."""
    listed, named = keys.get("target_layer_ids"), inner.get("target_layer_ids")
    if listed is not None and named is not None and listed != named:
        raise CorruptFile(f"{origin}: target_layer_ids and dflash_config.target_layer_ids contradict each other; keep one")
    if listed is not None or named is not None:
        return _zero_based(named if listed is None else listed, "target_layer_ids", offset=0, origin=origin)
    if depth is None:
        raise CorruptFile(f"{origin}: target_layer_ids and num_target_layers are both missing")
    return default_target_layers(count, depth)


def default_target_layers(count: int, depth: int) -> tuple[int, ...]:
    """The layers with features that z-lab uses by default for `count` draft layers and a target of `depth` layers: spread
    evenly."""
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + index * (depth - 4) / (count - 1)) for index in range(count))


def _refuse_switches(keys: ConfigReader) -> None:
    """Refuse settings that change the computation, in any object that may contain them."""
    keys.expect("sample_from_anchor", False)
    keys.expect("use_aux_hidden_state", True)
    keys.expect("attention_sink_bias", False)
    keys.expect("is_neox_style", True)
    keys.expect("rope_is_neox_style", True)
    keys.expect("logit_scale", 1, 1.0)
    keys.expect("final_logit_softcapping")


# ------------------------------------------------------------------ GGUF


def _from_metadata(source: ModelSource) -> DrafterSpec:
    metadata, tensors, origin = source.config, source.tensors, source.path.name
    keys = ConfigReader(metadata, origin=origin, prefix="dflash.")
    vocabulary = ConfigReader(metadata, origin=origin, prefix="tokenizer.ggml.")
    keys.expect("sample_from_anchor", False)
    hidden, layers = keys.integer("embedding_length"), _metadata_layers(keys, source)
    ids = _zero_based(keys.get("target_layers"), "dflash.target_layers", offset=1, origin=origin)
    fc, head, tokens = tensors.get("fc.weight"), tensors.get("output.weight"), metadata.get("tokenizer.ggml.tokens")
    vocab = keys.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None)
    spec = DrafterSpec(
        layout="gguf",
        layers=layers,
        causal_in_block=tuple(layer.attention.window is not None for layer in layers),
        hidden=hidden,
        # No key names the target's hidden size: fc's input width divided by the number of features.
        target_hidden=fc.shape[-1] // len(ids) if fc is not None and fc.shape else hidden,
        vocab=vocab,
        draft_vocab=head.shape[0] if head is not None and head.shape else vocab,
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        block=keys.integer("block_size", least=2),
        mask_token=_mask(vocabulary.optional_integer("mask_token_id", least=0), origin),
        target_layers=ids,
        max_context=keys.integer("context_length"),
    )
    keys.refuse_unknown(IGNORED_METADATA)
    return _with_own_tensors(spec, source, embed="token_embd.weight", head="output.weight")


def _metadata_layers(keys: ConfigReader, source: ModelSource) -> tuple[LayerSpec, ...]:
    origin, divisors = source.path.name, source.tensors.get("rope_freqs.weight")
    count, max_context = keys.integer("block_count", most=MAX_LAYERS), keys.integer("context_length")
    heads = keys.integers("attention.head_count", count)
    kv_heads = keys.integers("attention.head_count_kv", count, heads)
    widths = keys.integers("feed_forward_length", count)
    head_dim = keys.optional_integer("attention.key_length") or default_head_dim(
        keys.integer("embedding_length"), heads[0], origin
    )
    keys.expect("attention.value_length", head_dim)
    keys.number("rope.freq_base")  # required: it depends on the target, so no default is right
    rope = rope_from_metadata(keys, divisors, head_dim=head_dim, max_context=max_context, origin=origin)
    windows = _metadata_windows(keys, count, origin)
    return tuple(
        LayerSpec(
            AttentionSpec(heads[i], kv_heads[i], head_dim, rope, head_dim**-0.5, window=windows[i], qk_norm=True),
            MlpSpec(widths[i]),
        )
        for i in range(count)
    )


def _metadata_windows(keys: ConfigReader, count: int, origin: str) -> list[int | None]:
    window, pattern = (
        keys.optional_integer("attention.sliding_window", least=0) or None,
        keys.get("attention.sliding_window_pattern"),
    )
    if pattern is None:
        return [window] * count
    if not isinstance(pattern, list) or len(pattern) != count or not all(isinstance(slides, bool) for slides in pattern):
        raise CorruptFile(
            f"{origin}: dflash.attention.sliding_window_pattern must be a list of {count} booleans, not {pattern!r}"
        )
    if window is None and any(pattern):
        raise CorruptFile(f"{origin}: dflash.attention.sliding_window_pattern has sliding layers, but no sliding_window is set")
    return [window if slides else None for slides in pattern]


# ------------------------------------------------------------------ shared by all layouts


def _either(keys: ConfigReader, inner: ConfigReader, name: str, origin: str, *, least: int = 1) -> int | None:
    """A number at the top level or in dflash_config; if it is in both, the two must be equal."""
    outside, inside = keys.optional_integer(name, least=least), inner.optional_integer(name, least=least)
    if outside is not None and inside is not None and outside != inside:
        raise CorruptFile(f"{origin}: {name} is {outside}, but dflash_config.{name} is {inside}; keep one")
    return inside if outside is None else outside


def _mask(token: int | None, origin: str) -> int:
    if token is None:
        raise CorruptFile(f"{origin}: mask_token_id is missing: the token in the slots to be drafted")
    return token


def _zero_based(ids: Any, name: str, *, offset: int, origin: str) -> tuple[int, ...]:
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) and i >= offset for i in ids)
    if not whole or not ids:
        raise CorruptFile(f"{origin}: {name} must be a list of layers counted from {offset}, not {ids!r}")
    return tuple(i - offset for i in ids)


def _with_own_tensors(spec: DrafterSpec, source: ModelSource, *, embed: str, head: str) -> DrafterSpec:
    """The spec with the fields that say whether the drafter has its own embedding, head and id map. Its tensors show it, since
    the configuration does not."""
    tensors = source.tensors
    return replace(spec, own_embedding=embed in tensors, own_head=head in tensors, mapped="d2t" in tensors)


def _validated(spec: DrafterSpec, origin: str) -> DrafterSpec:
    """Raise CorruptFile if sizes do not fit together."""
    check_layer_sizes(spec.layers, origin)
    if spec.mask_token >= spec.vocab:
        raise CorruptFile(f"{origin}: mask token {spec.mask_token} is outside the vocabulary of {spec.vocab}")
    reduced = spec.draft_vocab != spec.vocab
    if (spec.mapped and not spec.own_head) or (reduced and not spec.mapped):
        raise CorruptFile(
            f"{origin}: a draft vocabulary of {spec.draft_vocab} tokens for a target of {spec.vocab} needs a head and d2t tensor"
        )
    return spec


# ------------------------------------------------------------------ weights


def outer_shapes(spec: DrafterSpec) -> dict[str, TensorShape]:
    """Shapes of the weights outside the layers."""
    hidden = spec.hidden
    shapes: dict[str, TensorShape] = {"fc": (hidden, spec.feature_width)}
    shapes |= {"hidden_norm": (hidden,), "norm": (hidden,)}
    if spec.own_embedding:
        shapes |= {"embed": (spec.vocab, hidden)}
    if spec.own_head:
        shapes |= {"head": (spec.draft_vocab, hidden)}
    return shapes


class DrafterWeights:
    """The weights of one drafter. The constructor refuses missing, misshapen and unknown tensors."""

    def __init__(self, source: ModelSource, spec: DrafterSpec, names: WeightNames) -> None:
        self.spec = spec
        self._origin = str(source.path)
        shapes: dict[WeightKey, TensorShape] = {(None, weight): shape for weight, shape in outer_shapes(spec).items()}
        for index in range(len(spec.layers)):
            shapes |= {(index, weight): shape for weight, shape in spec.layers[index].shapes(spec.hidden).items()}
        self._tensors = {key: find_tensor(source, names.stored_name(key), shape) for key, shape in shapes.items()}
        for tensor in self._tensors.values():
            tensor.require_readable()
        self._map = find_tensor(source, names.outer["d2t"], (spec.draft_vocab,)) if spec.mapped else None
        used = {tensor.name for tensor in self._tensors.values()} | ({self._map.name} if self._map else set())
        refuse_unused_tensors(source, used, ignored=names.ignored, kind="DFlash drafter")

    def tensor(self, layer: int | None, weight: str) -> LazyTensor:
        """One weight, whose rows stay quantized until they are read."""
        return self._tensors[layer, weight]

    def outer(self) -> WeightArrays:
        """All weights outside the layers."""
        return {weight: self._tensors[None, weight].float32() for weight in outer_shapes(self.spec)}

    def layer(self, index: int) -> WeightArrays:
        return {weight: self._tensors[index, weight].float32() for weight in self.spec.layers[index].shapes(self.spec.hidden)}

    def target_ids(self) -> NDArray[np.int64] | None:
        """The target's token id of every draft id; None if they are the same."""
        if self._map is None:
            return None
        ids = self._map.int64()
        if self.spec.layout != "gguf":  # safetensors store target id - draft id, GGUF stores the target id
            ids = ids + np.arange(len(ids))
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= self.spec.vocab:
            worst = ids.max() if ids.max() >= self.spec.vocab else ids.min()
            raise CorruptFile(f"{self._origin}: d2t has token id {worst}, outside the vocabulary of {self.spec.vocab}")
        return ids


# ------------------------------------------------------------------ drafter and target


def check_drafter_fits(spec: DrafterSpec, target: ModelSpec) -> None:
    """Refuse a drafter that was made for another model."""
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
