"""A checkpoint's words about rotary positions → RopeSpec.

In: the keys of config.json (both dialects: `rope_parameters`, or `rope_theta` with `rope_scaling`) or of a GGUF file,
and its rope_freqs tensor. Out: RopeSpec. A rope type or key that is not known is refused by name.
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
TEXT_ALIKE = ("mrope_section", "mrope_interleaved")  # how images are placed; for text all sections say the same


def rope_from_config(
    keys: ConfigReader,
    *,
    head_dim: int,
    max_context: int,
    origin: str,
    share: float | None = None,
    harmless: Collection[str] = (),
) -> RopeSpec:
    """One rope for all layers. `share` is how much of a head turns where the config does not say; None: all, always."""
    parameters, scaling = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    theta = keys.number("rope_theta", DEFAULT_THETA)
    if parameters and scaling and parameters != scaling:
        raise CorruptFile(f"{origin}: rope_parameters and rope_scaling contradict each other; keep one")
    name = "rope_parameters" if parameters else "rope_scaling"
    described: Mapping[str, Any] = parameters or scaling or {}
    if any(isinstance(value, dict) for value in described.values()):
        raise UnsupportedModel(f"{origin}: {name} per layer type is not supported for this family")
    inner = ConfigReader(described, origin=f"{origin}: {name}")
    if share is None:
        keys.only("partial_rotary_factor", 1, 1.0)
        inner.only("partial_rotary_factor", 1, 1.0)
    else:
        share = keys.number("partial_rotary_factor", share)
    rope = _described(inner, theta=theta, head_dim=head_dim, share=share or 1.0, max_context=max_context, origin=origin)
    inner.refuse_rest(harmless)
    return rope


def ropes_by_layer_type(
    keys: ConfigReader, *, head_dims: Mapping[str, int], defaults: Mapping[str, Mapping[str, Any]], max_context: int, origin: str
) -> dict[str, RopeSpec]:
    """A rope for each layer type; the defaults hold where the config says nothing about ropes."""
    name = "rope_parameters"
    described: Mapping[str, Any] = keys.mapping(name) or defaults
    outer, ropes = ConfigReader(described, origin=f"{origin}: {name}"), {}
    for layer_type, head_dim in head_dims.items():
        parameters = outer.mapping(layer_type)
        if parameters is None:
            raise CorruptFile(f"{origin}: {name} says nothing about {layer_type}")
        inner = ConfigReader(parameters, origin=f"{origin}: {name}: {layer_type}")
        ropes[layer_type] = _described(
            inner, theta=DEFAULT_THETA, head_dim=head_dim, share=1.0, max_context=max_context, origin=origin
        )
        inner.refuse_rest()
    # Layer types that this model has no layer of, and a key that belongs inside, say nothing.
    outer.refuse_rest({*defaults, "original_max_position_embeddings"})
    return ropes


def _described(keys: ConfigReader, *, theta: float, head_dim: int, share: float, max_context: int, origin: str) -> RopeSpec:
    kind, older = keys.get("rope_type"), keys.get("type")
    theta, share = keys.number("rope_theta", theta), keys.number("partial_rotary_factor", share)
    if share > 1:
        raise CorruptFile(f"{origin}: partial_rotary_factor = {share} is more than all")
    rope = _rope(
        keys, kind or older or "default", theta=theta, head_dim=head_dim, share=share, max_context=max_context, origin=origin
    )
    return _sound(rope, origin)


def _sound(rope: RopeSpec, origin: str) -> RopeSpec:
    """The rope, if its frequencies are numbers."""
    try:
        sound = all(map(math.isfinite, [*rope.inverse_frequencies(), rope.scale]))
    except (ArithmeticError, ValueError):
        sound = False
    if not sound:
        raise CorruptFile(f"{origin}: the values of this {rope.kind} rope give frequencies that are no numbers: {rope}")
    return rope


def _rope(keys: ConfigReader, kind: str, *, theta: float, head_dim: int, share: float, max_context: int, origin: str) -> RopeSpec:
    dims = int(head_dim * share)
    match kind:
        case "default":
            return RopeSpec(theta=theta, dims=dims)
        case "proportional":
            keys.only("factor", 1, 1.0)
            return RopeSpec(theta=theta, dims=head_dim, kind="proportional", turning=int(share * head_dim // 2))
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
                original_context=keys.whole("original_max_position_embeddings"),
            )
        case "yarn":
            original = keys.whole("original_max_position_embeddings", max_context)
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
    """One rope for all layers, as a GGUF file has it."""
    return _sound(_stored(keys, divisors, head_dim=head_dim, max_context=max_context, origin=origin, partial=partial), origin)


def _stored(
    keys: ConfigReader, divisors: LazyTensor | None, *, head_dim: int, max_context: int, origin: str, partial: bool
) -> RopeSpec:
    """`divisors` is the rope_freqs tensor: what a converter makes of llama3 scaling. `partial`: not all of a head may turn."""
    theta = keys.number("rope.freq_base", DEFAULT_THETA)
    dims = turning_dims(keys, "rope.dimension_count", head_dim=head_dim, partial=partial, origin=origin)
    keys.only("rope.scaling.attn_factor", 1, 1.0)
    kind = keys.get("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    original = keys.whole("rope.scaling.original_context_length", max_context)
    fast, slow = keys.number("rope.scaling.yarn_beta_fast", 32.0), keys.number("rope.scaling.yarn_beta_slow", 1.0)
    attention = keys.number("rope.scaling.yarn_attn_factor") if keys.get("rope.scaling.yarn_attn_factor") is not None else None
    keys.flag("rope.scaling.finetuned")
    if divisors is not None:
        if kind != "none" or divisors.shape != (dims // 2,):
            raise UnsupportedModel(f"{origin}: tensor {divisors.name} of shape {list(divisors.shape)} with rope type {kind}")
        return rope_of_divisors(divisors, theta=theta, dims=dims)
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


def turning_dims(keys: ConfigReader, name: str, *, head_dim: int, partial: bool, origin: str) -> int:
    """How many dimensions of a head turn."""
    if not partial:
        keys.only(name, head_dim)
        return head_dim
    dims = keys.whole(name, head_dim)
    if dims > head_dim or dims % 2:
        raise CorruptFile(f"{origin}: {name} = {dims} dimensions of a head of {head_dim} cannot turn in pairs")
    return dims


STANDS_STILL = 1e30  # a divisor that stops a frequency


def rope_of_divisors(divisors: LazyTensor, *, theta: float, dims: int) -> RopeSpec:
    """A row of ones and then of divisors beyond all measure is a rope of which the first pairs turn."""
    values = divisors.float32().tolist()
    turning = values.count(1.0)
    if turning < len(values) and values[:turning] == [1.0] * turning and min(values[turning:]) >= STANDS_STILL * 0.99:
        return RopeSpec(theta=theta, dims=dims, kind="proportional", turning=turning)
    return RopeSpec(theta=theta, dims=dims, kind="divisors", divisors=tuple(values))
