"""A checkpoint's words about rotary positions → RopeSpec.

In: the keys of config.json (both dialects: `rope_parameters`, or `rope_theta` with `rope_scaling`) or of a GGUF file,
and its rope_freqs tensor. Out: RopeSpec. A rope type or key that is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onedraw.errors import Corrupt, UnsupportedModel
from onedraw.models.keys import Keys
from onedraw.models.source import Tensor
from onedraw.models.spec import RopeSpec

SUPPORTED = "default, linear, llama3, yarn"
DEFAULT_THETA = 10000.0


def rope_from_config(keys: Keys, *, head_dim: int, max_context: int, origin: str) -> RopeSpec:
    parameters, scaling = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    theta = keys.number("rope_theta", DEFAULT_THETA)
    keys.only("partial_rotary_factor", 1, 1.0)
    if parameters and scaling and parameters != scaling:
        raise Corrupt(f"{origin}: rope_parameters and rope_scaling contradict each other; keep one")
    name = "rope_parameters" if parameters else "rope_scaling"
    described: Mapping[str, Any] = parameters or scaling or {}
    if any(isinstance(value, dict) for value in described.values()):
        raise UnsupportedModel(f"{origin}: {name} per layer type is not supported for this family")
    inner = Keys(described, origin=f"{origin}: {name}")
    kind, older = inner.get("rope_type"), inner.get("type")
    inner.only("partial_rotary_factor", 1, 1.0)
    theta = inner.number("rope_theta", theta)
    rope = _rope(inner, kind or older or "default", theta=theta, dims=head_dim, max_context=max_context, origin=origin)
    inner.refuse_rest()
    return rope


def _rope(keys: Keys, kind: str, *, theta: float, dims: int, max_context: int, origin: str) -> RopeSpec:
    match kind:
        case "default":
            return RopeSpec(theta=theta, dims=dims)
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


def rope_from_metadata(keys: Keys, divisors: Tensor | None, *, head_dim: int, max_context: int, origin: str) -> RopeSpec:
    """`divisors` is the rope_freqs tensor: what a converter makes of llama3 scaling."""
    theta = keys.number("rope.freq_base", DEFAULT_THETA)
    keys.only("rope.dimension_count", head_dim)
    keys.only("rope.scaling.attn_factor", 1, 1.0)
    kind = keys.get("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    original = keys.whole("rope.scaling.original_context_length", max_context)
    fast, slow = keys.number("rope.scaling.yarn_beta_fast", 32.0), keys.number("rope.scaling.yarn_beta_slow", 1.0)
    keys.flag("rope.scaling.finetuned")
    if divisors is not None:
        if kind != "none" or divisors.shape != (head_dim // 2,):
            raise UnsupportedModel(f"{origin}: tensor {divisors.name} of shape {list(divisors.shape)} with rope type {kind}")
        return RopeSpec(theta=theta, dims=head_dim, kind="divisors", divisors=tuple(divisors.float32().tolist()))
    match kind:
        case "none" | "linear" if factor == 1:
            return RopeSpec(theta=theta, dims=head_dim)
        case "none" | "linear":
            return RopeSpec(theta=theta, dims=head_dim, kind="linear", factor=factor)
        case "yarn":
            return RopeSpec(
                theta=theta,
                dims=head_dim,
                kind="yarn",
                factor=factor,
                original_context=original,
                beta_fast=fast,
                beta_slow=slow,
            )
        case _:
            supported = "none, linear, yarn, and llama3 as a rope_freqs tensor"
            raise UnsupportedModel(f"{origin}: rope type {kind!r} is not supported; supported: {supported}")
