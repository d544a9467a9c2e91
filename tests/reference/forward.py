"""Reference forward pass from a ModelSpec and its weights: double precision, no cache, plain loops.

It covers rope, windows, biases, norms, gates, delta layers in the recurrent form, experts one by one, shared keys and values,
per-layer inputs and softcap.
"""

from __future__ import annotations

import math

import numpy as np

from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from onedraw.models.weight_names import ModelWeights, WeightArrays

L2_EPS = 1e-6  # of the L2 norm of queries and keys in Gated DeltaNet layers
KeysValues = tuple[np.ndarray, np.ndarray]


def logits(weights: ModelWeights, tokens: list[int]) -> np.ndarray:
    return forward(weights, tokens)[0]


def forward(weights: ModelWeights, tokens: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The logits [T, V], and the residual stream [T, E] after every layer."""
    spec, outer = weights.spec, weights.outer()
    x = outer["embed"][tokens].astype(np.float64) * spec.embed_scale  # [T, E]
    inputs = layer_inputs(x, tokens, outer, spec) if spec.inputs else None
    residuals: list[np.ndarray] = []
    made: dict[int, KeysValues] = {}  # keys and values by layer
    for index, layer in enumerate(spec.layers):
        w = {name: value.astype(np.float64) for name, value in weights.layer(index).items()}
        x = run_layer(x, w, layer, spec, index=index, made=made, inputs=None if inputs is None else inputs[:, index])
        residuals.append(x)
    return head(norm(x, outer["norm"], spec), outer["embed" if spec.tied else "head"], spec), residuals


def head(h: np.ndarray, matrix: np.ndarray, spec: ModelSpec) -> np.ndarray:
    found = h @ matrix.T
    return found if spec.softcap is None else spec.softcap * np.tanh(found / spec.softcap)


def run_layer(
    x: np.ndarray,
    w: WeightArrays,
    layer: LayerSpec,
    spec: ModelSpec,
    *,
    index: int = 0,
    made: dict[int, KeysValues] | None = None,
    inputs: np.ndarray | None = None,
) -> np.ndarray:
    h = norm(x, w["attn_norm"], spec)
    if isinstance(layer.mixer, DeltaSpec):
        mixed = delta(h, w, layer.mixer, spec)
    else:
        mixed = attention(h, w, layer.mixer, spec, index=index, made={} if made is None else made)
    x = x + (norm(mixed, w["post_attn_norm"], spec) if layer.sandwich else mixed)
    fed = feed(norm(x, w["mlp_norm"], spec), w, layer.feed_forward, spec, residual=x)
    if layer.parallel_experts is not None:
        parallel = mixture(norm(x, w["experts_norm"], spec), w, layer.parallel_experts, spec, residual=x)
        fed = norm(fed, w["dense_norm"], spec) + norm(parallel, w["post_experts_norm"], spec)
    x = x + (norm(fed, w["post_mlp_norm"], spec) if layer.sandwich else fed)
    if inputs is not None:
        answer = (act(x @ w["inputs_gate"].T, layer.feed_forward.activation) * inputs) @ w["inputs_out"].T
        x = x + norm(answer, w["inputs_norm"], spec)
    return x * w["layer_scale"] if layer.scaled else x


def layer_inputs(x: np.ndarray, tokens: list[int], outer: WeightArrays, spec: ModelSpec) -> np.ndarray:
    """Per-layer input embeddings [T, L, P], from the token id and from its embedding."""
    shape = (len(tokens), len(spec.layers), spec.inputs)
    from_token = outer["inputs_embed"][tokens].reshape(shape) * math.sqrt(spec.inputs)
    projected = (x @ outer["inputs_project"].T).reshape(shape) / math.sqrt(spec.hidden)
    return (norm(projected, outer["inputs_project_norm"], spec) + from_token) / math.sqrt(2)


def norm(x: np.ndarray, weight: np.ndarray | float, spec: ModelSpec) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.eps) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0)


def act(x: np.ndarray, name: str) -> np.ndarray:
    if name == "silu":
        return x * sigmoid(x)
    assert name == "gelu_tanh"
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# ------------------------------------------------------------------ feed-forwards


def feed(h: np.ndarray, w: WeightArrays, f: MlpSpec | MoeSpec, spec: ModelSpec, *, residual: np.ndarray) -> np.ndarray:
    if isinstance(f, MoeSpec):
        return mixture(h, w, f, spec, residual=residual)
    gate = h @ w["gate"].T + w.get("gate_bias", 0)
    up = h @ w["up"].T + w.get("up_bias", 0)
    return (act(gate, f.activation) * up) @ w["down"].T + w.get("down_bias", 0)


def mixture(h: np.ndarray, w: WeightArrays, f: MoeSpec, spec: ModelSpec, *, residual: np.ndarray) -> np.ndarray:
    read = norm(residual, w["router_scale"], spec) / math.sqrt(spec.hidden) if f.own_router_norm else h
    scores = read @ w["router"].T
    if f.softcap is not None:
        scores = f.softcap * np.tanh(scores / f.softcap)
    if f.scores == "softmax":
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    else:
        scores = sigmoid(scores)
    out = np.zeros_like(h)
    for t in range(len(h)):
        ranked = np.argsort(-(scores[t] + w.get("select_bias", 0)), kind="stable")[: f.used]
        total = scores[t, ranked].sum() if f.normalised else 1.0
        for expert in sorted(ranked.tolist()):
            weight = scores[t, expert] / total * (w["expert_scale"][expert] if f.expert_scale else 1.0)
            gate, up = w["expert_gate"][expert] @ h[t], w["expert_up"][expert] @ h[t]
            out[t] += weight * (w["expert_down"][expert] @ (act(gate, f.activation) * up))
    out *= f.scale
    if f.shared:
        shared = (act(h @ w["shared_gate"].T, f.activation) * (h @ w["shared_up"].T)) @ w["shared_down"].T
        out += shared * (sigmoid(h @ w["shared_route"].T) if f.shared_gate else 1.0)
    return out


# ------------------------------------------------------------------ mixers


def attention(
    h: np.ndarray,
    w: WeightArrays,
    a: AttentionSpec,
    spec: ModelSpec,
    *,
    index: int = 0,
    made: dict[int, KeysValues] | None = None,
) -> np.ndarray:
    length, made = len(h), {} if made is None else made
    q = (h @ w["q"].T + w.get("q_bias", 0)).reshape(length, a.heads, a.head_dim)
    q = rotate(norm(q, w["q_norm"], spec) if a.qk_norm else q, a)
    if a.reuses is None:
        made[index] = keys_and_values(h, w, a, spec)
    k, v = made[index if a.reuses is None else a.reuses]
    out = np.empty_like(q)
    for head_index in range(a.heads):
        shared = head_index // (a.heads // a.kv_heads)
        for i in range(length):
            first = 0 if a.window is None else max(0, i - a.window + 1)
            scores = k[first : i + 1, shared] @ q[i, head_index] * a.scale
            shares = np.exp(scores - scores.max())
            out[i, head_index] = shares @ v[first : i + 1, shared] / shares.sum()
    if a.gate is not None:
        gate = (h @ w["attn_gate"].T).reshape(length, a.heads, -1)  # [T, H, D] or [T, H, 1]
        out = out * (sigmoid(gate) if a.gate == "sigmoid" else softplus(gate))
    return out.reshape(length, -1) @ w["o"].T + w.get("o_bias", 0)


def keys_and_values(h: np.ndarray, w: WeightArrays, a: AttentionSpec, spec: ModelSpec) -> KeysValues:
    shape = (len(h), a.kv_heads, a.head_dim)
    k = (h @ w["k"].T + w.get("k_bias", 0)).reshape(shape)
    v = k if a.keys_as_values else (h @ w["v"].T + w.get("v_bias", 0)).reshape(shape)
    if a.qk_norm:
        k = norm(k, w["k_norm"], spec)
    return rotate(k, a), norm(v, 1.0, spec) if a.v_norm else v


def rotate(x: np.ndarray, a: AttentionSpec) -> np.ndarray:
    angles = np.outer(np.arange(len(x)), a.rope.inverse_frequencies())[:, None]  # [T, 1, dims / 2]
    cos, sin = np.cos(angles) * a.rope.scale, np.sin(angles) * a.rope.scale
    first, second = np.split(x[..., : a.rope.dims], 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., a.rope.dims :]], axis=-1)


def delta(h: np.ndarray, w: WeightArrays, d: DeltaSpec, spec: ModelSpec) -> np.ndarray:
    length, keys = len(h), d.key_heads * d.key_dim
    u = h @ w["delta_qkv"].T  # [T, C]
    padded = np.concatenate([np.zeros((d.conv - 1, d.channels)), u])
    u = act(np.stack([(padded[t : t + d.conv] * w["conv"].T).sum(0) for t in range(length)]), "silu")
    q, k = (u[:, start : start + keys].reshape(length, d.key_heads, d.key_dim) for start in (0, keys))
    v = u[:, 2 * keys :].reshape(length, d.value_heads, d.value_dim)
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + L2_EPS) for x in (q, k))
    beta = sigmoid(h @ w["delta_b"].T)
    decay = np.exp(w["decay"] * softplus(h @ w["delta_a"].T + w["delta_bias"]))  # [T, heads]
    out = np.empty_like(v)
    for head_index in range(d.value_heads):
        key_head = head_index // (d.value_heads // d.key_heads)
        state = np.zeros((d.key_dim, d.value_dim))
        for t in range(length):
            state = state * decay[t, head_index]
            missed = v[t, head_index] - state.T @ k[t, key_head]
            state = state + np.outer(k[t, key_head], beta[t, head_index] * missed)
            out[t, head_index] = state.T @ q[t, key_head] / math.sqrt(d.key_dim)
    z = (h @ w["delta_z"].T).reshape(out.shape)
    return (norm(out, w["delta_norm"], spec) * act(z, "silu")).reshape(length, -1) @ w["o"].T
