"""Reads the rotary embedding of a configuration as RopeSpec.

In: config.json (`rope_parameters`, or `rope_theta` with `rope_scaling`), or GGUF metadata and the rope_freqs tensor.
Out: RopeSpec. Unknown rope types and keys raise UnsupportedModel.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.config_reader import ConfigReader
from onedraw.models.source import LazyTensor
from onedraw.models.spec import RopeSpec

SUPPORTED = "default, linear, llama3, yarn, proportional"
DEFAULT_THETA = 10000.0
# Config keys of multimodal rope, safe to ignore: they assign rotary dimensions to time, height and width, and these three
# positions are equal for text.
MROPE_KEYS = ("mrope_section", "mrope_interleaved")


def rope_from_config(
    keys: ConfigReader,
    *,
    head_dim: int,
    max_context: int,
    origin: str,
    share: float | None = None,
    ignored: Collection[str] = (),
) -> RopeSpec:
    """Read one rope for all layers. `share`: the rotated share of a head if the config has no partial_rotary_factor; None if only
    full rotation is supported. `ignored`: keys of the rope parameters that are accepted and have no effect."""
    parameters, scaling = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    theta = keys.number("rope_theta", DEFAULT_THETA)
    if parameters and scaling and parameters != scaling:
        raise CorruptFile(f"{origin}: rope_parameters and rope_scaling contradict each other; keep one")
    name = "rope_parameters" if parameters else "rope_scaling"
    values: Mapping[str, Any] = parameters or scaling or {}
    if any(isinstance(value, dict) for value in values.values()):
        raise UnsupportedModel(f"{origin}: {name} per layer type is not supported for this family")
    inner = ConfigReader(values, origin=f"{origin}: {name}")
    if share is None:
        keys.expect("partial_rotary_factor", 1, 1.0)
        inner.expect("partial_rotary_factor", 1, 1.0)
    else:
        share = keys.number("partial_rotary_factor", share)
    rope = _rope_from_keys(inner, theta=theta, head_dim=head_dim, share=share or 1.0, max_context=max_context, origin=origin)
    inner.refuse_unknown(ignored)
    return rope


def ropes_by_layer_type(
    keys: ConfigReader, *, head_dims: Mapping[str, int], defaults: Mapping[str, Mapping[str, Any]], max_context: int, origin: str
) -> dict[str, RopeSpec]:
    """Read a rope for each layer type in `head_dims` (layer type → head size). If the config has no rope_parameters, `defaults`
    takes their place."""
    name = "rope_parameters"
    values: Mapping[str, Any] = keys.mapping(name) or defaults
    outer, ropes = ConfigReader(values, origin=f"{origin}: {name}"), {}
    for layer_type, head_dim in head_dims.items():
        parameters = outer.mapping(layer_type)
        if parameters is None:
            raise CorruptFile(f"{origin}: {name} has no entry for {layer_type}")
        inner = ConfigReader(parameters, origin=f"{origin}: {name}: {layer_type}")
        ropes[layer_type] = _rope_from_keys(
            inner, theta=DEFAULT_THETA, head_dim=head_dim, share=1.0, max_context=max_context, origin=origin
        )
        inner.refuse_unknown()
    # Accepted without effect: entries of layer types that no layer has, and original_max_position_embeddings, which belongs
    # inside an entry.
    outer.refuse_unknown({*defaults, "original_max_position_embeddings"})
    return ropes


def _rope_from_keys(keys: ConfigReader, *, theta: float, head_dim: int, share: float, max_context: int, origin: str) -> RopeSpec:
    kind, older = keys.get("rope_type"), keys.get("type")
    theta, share = keys.number("rope_theta", theta), keys.number("partial_rotary_factor", share)
    if share > 1:
        raise CorruptFile(f"{origin}: partial_rotary_factor = {share} is greater than 1")
    rope = _rope(
        keys, kind or older or "default", theta=theta, head_dim=head_dim, share=share, max_context=max_context, origin=origin
    )
    return _check_finite(rope, origin)


def _check_finite(rope: RopeSpec, origin: str) -> RopeSpec:
    """The rope; CorruptFile if its frequencies are not finite."""
    try:
        sound = all(map(math.isfinite, [*rope.inverse_frequencies(), rope.scale]))
    except (ArithmeticError, ValueError):
        sound = False
    if not sound:
        raise CorruptFile(f"{origin}: the parameters of this {rope.kind} rope give frequencies that are not finite: {rope}")
    return rope


def _rope(keys: ConfigReader, kind: str, *, theta: float, head_dim: int, share: float, max_context: int, origin: str) -> RopeSpec:
    dims = int(head_dim * share)
    match kind:
        case "default":
            return RopeSpec(theta=theta, dims=dims)
        case "proportional":
            keys.expect("factor", 1, 1.0)
            return RopeSpec(theta=theta, dims=head_dim, kind="proportional", rotated_pairs=int(share * head_dim // 2))
        case "linear":
            return RopeSpec(theta=theta, dims=dims, kind="linear", factor=keys.number("factor"))
        case "llama3":
            return RopeSpec(
                theta=theta,
                dims=dims,
                kind="llama3",
                factor=keys.number("factor"),
                low_freq_factor=keys.number("low_freq_factor"),
                high_freq_factor=keys.number("high_freq_factor"),
                original_context=keys.integer("original_max_position_embeddings"),
            )
        case "yarn":
            original = keys.integer("original_max_position_embeddings", max_context)
            return RopeSpec(
                theta=theta,
                dims=dims,
                kind="yarn",
                factor=keys.number("factor", max_context / original),
                original_context=original,
                beta_fast=keys.number("beta_fast", 32.0),
                beta_slow=keys.number("beta_slow", 1.0),
                attention_factor=keys.number("attention_factor") if keys.get("attention_factor") is not None else None,
                truncate=keys.flag("truncate", True),
            )
        case _:
            raise UnsupportedModel(f"{origin}: rope type {kind!r} is not supported; supported: {SUPPORTED}")


def rope_from_metadata(
    keys: ConfigReader, divisors: LazyTensor | None, *, head_dim: int, max_context: int, origin: str, partial: bool = False
) -> RopeSpec:
    """One rope for all layers, from the metadata of a GGUF file.

    `divisors` is the rope_freqs tensor, which converters write for llama3 scaling, or None if the file has none; `partial`:
    whether a head may be rotated in part.
    """
    return _check_finite(
        _rope_from_gguf_keys(keys, divisors, head_dim=head_dim, max_context=max_context, origin=origin, partial=partial), origin
    )


def _rope_from_gguf_keys(
    keys: ConfigReader, divisors: LazyTensor | None, *, head_dim: int, max_context: int, origin: str, partial: bool
) -> RopeSpec:

    theta = keys.number("rope.freq_base", DEFAULT_THETA)
    dims = rotary_dims(keys, "rope.dimension_count", head_dim=head_dim, partial=partial, origin=origin)
    keys.expect("rope.scaling.attn_factor", 1, 1.0)
    kind = keys.get("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    original = keys.integer("rope.scaling.original_context_length", max_context)
    fast, slow = keys.number("rope.scaling.yarn_beta_fast", 32.0), keys.number("rope.scaling.yarn_beta_slow", 1.0)
    attention = keys.number("rope.scaling.yarn_attn_factor") if keys.get("rope.scaling.yarn_attn_factor") is not None else None
    keys.flag("rope.scaling.finetuned")
    if divisors is not None:
        if kind != "none" or divisors.shape != (dims // 2,):
            raise UnsupportedModel(
                f"{origin}: tensor {divisors.name} of shape {list(divisors.shape)} is not supported with rope type {kind} "
                f"and {dims} rotary dimensions"
            )
        return rope_from_divisors(divisors, theta=theta, dims=dims)
    match kind:
        case "none" | "linear" if factor == 1:
            return RopeSpec(theta=theta, dims=dims)
        case "none" | "linear":
            return RopeSpec(theta=theta, dims=dims, kind="linear", factor=factor)
        case "yarn":
            return RopeSpec(
                theta=theta,
                dims=dims,
                kind="yarn",
                factor=factor,
                original_context=original,
                beta_fast=fast,
                beta_slow=slow,
                attention_factor=attention,
            )
        case _:
            supported = "none, linear, yarn, and llama3 as a rope_freqs tensor"
            raise UnsupportedModel(f"{origin}: rope type {kind!r} is not supported; supported: {supported}")


def rotary_dims(keys: ConfigReader, name: str, *, head_dim: int, partial: bool, origin: str) -> int:
    """Number of dimensions of a head that are rotated."""
    if not partial:
        keys.expect(name, head_dim)
        return head_dim
    dims = keys.integer(name, head_dim)
    if dims > head_dim or dims % 2:
        raise CorruptFile(f"{origin}: {name} = {dims} must be even and at most the head size {head_dim}")
    return dims


INFINITE_DIVISOR = 1e30  # converters write this divisor for pairs that are not rotated


def rope_from_divisors(divisors: LazyTensor, *, theta: float, dims: int) -> RopeSpec:
    """The rope of a rope_freqs tensor, whose values divide the frequencies of the pairs. Values of 1 followed by infinite ones
    are a proportional rope, which rotates only the first pairs."""
    values = divisors.float32().tolist()
    rotated = values.count(1.0)
    if rotated < len(values) and values[:rotated] == [1.0] * rotated and min(values[rotated:]) >= INFINITE_DIVISOR * 0.99:
        return RopeSpec(theta=theta, dims=dims, kind="proportional", rotated_pairs=rotated)
    return RopeSpec(theta=theta, dims=dims, kind="divisors", divisors=tuple(values))
