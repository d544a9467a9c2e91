"""A forward pass written from a ModelSpec and its weights alone: slow, obvious, no cache, double precision.

It judges that a description was understood, rope, windows, biases and norms included.
"""

from __future__ import annotations

import numpy as np

from onedraw.models.spec import AttentionSpec, ModelSpec
from onedraw.models.weights import Read, Weights


def logits(weights: Weights, tokens: list[int]) -> np.ndarray:
    return forward(weights, tokens)[0]


def forward(weights: Weights, tokens: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The logits [T, V], and the residual stream [T, E] after every layer."""
    spec, outer = weights.spec, weights.outer()
    x = outer["embed"][tokens].astype(np.float64)  # [T, E]
    residuals = []
    for index, layer in enumerate(spec.layers):
        w = weights.layer(index)
        x = x + attention(norm(x, w["attn_norm"], spec), w, layer.mixer, spec)
        h = norm(x, w["mlp_norm"], spec)
        gate = h @ w["gate"].T + w.get("gate_bias", 0)
        up = h @ w["up"].T + w.get("up_bias", 0)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"].T + w.get("down_bias", 0)
        residuals.append(x)
    return norm(x, outer["norm"], spec) @ outer["embed" if spec.tied else "head"].T, residuals


def norm(x: np.ndarray, weight: np.ndarray, spec: ModelSpec) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.eps) * weight


def attention(h: np.ndarray, w: Read, a: AttentionSpec, spec: ModelSpec) -> np.ndarray:
    length = len(h)
    q = (h @ w["q"].T + w.get("q_bias", 0)).reshape(length, a.heads, a.head_dim)
    k = (h @ w["k"].T + w.get("k_bias", 0)).reshape(length, a.kv_heads, a.head_dim)
    v = (h @ w["v"].T + w.get("v_bias", 0)).reshape(length, a.kv_heads, a.head_dim)
    if a.qk_norm:
        q, k = norm(q, w["q_norm"], spec), norm(k, w["k_norm"], spec)
    q, k = rotate(q, a), rotate(k, a)
    out = np.empty_like(q)
    for head in range(a.heads):
        shared = head // (a.heads // a.kv_heads)
        for i in range(length):
            first = 0 if a.window is None else max(0, i - a.window + 1)
            scores = k[first : i + 1, shared] @ q[i, head] * a.scale
            shares = np.exp(scores - scores.max())
            out[i, head] = shares @ v[first : i + 1, shared] / shares.sum()
    return out.reshape(length, -1) @ w["o"].T + w.get("o_bias", 0)


def rotate(x: np.ndarray, a: AttentionSpec) -> np.ndarray:
    angles = np.outer(np.arange(len(x)), a.rope.inverse_frequencies())[:, None]  # [T, 1, D/2]
    cos, sin = np.cos(angles) * a.rope.scale, np.sin(angles) * a.rope.scale
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
