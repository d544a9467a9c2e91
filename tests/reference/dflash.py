"""Reference implementation of a DFlash drafter and of greedy speculative decoding: double precision, no cache, loops.

In: weights as they were read, features of the target, an anchor token. Out: logits of the block's open slots, and whole
greedy runs with drafts. Tests compare the fast drafter with it; it uses no code of the fast path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onedraw.models.dflash import DrafterWeights
from onedraw.models.weight_names import ModelWeights
from tests.reference.forward import forward

AnyWeights = Any  # DrafterWeights or Drafter
Spoil = Callable[[np.ndarray], np.ndarray]


def block_logits(weights: AnyWeights, features: np.ndarray, anchor: int, *, embed: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Logits [B - 1, Vd] of slots 1 … B - 1, for features [C, n·Ht] and the target's embedding and head, both [V, E].

    Where the drafter has an embedding or a head of its own, that one is used.
    """
    return head_logits(weights, block_hidden(weights, features, anchor, embed=embed), head=head)


def block_hidden(weights: AnyWeights, features: np.ndarray, anchor: int, *, embed: np.ndarray) -> np.ndarray:
    """The output of the last layer [B, E], before the final norm."""
    spec, outer = weights.spec, weights.outer()
    count, size = len(features), spec.block
    if spec.feature_norms:
        each = features.astype(np.float64).reshape(count, len(spec.target_layers), -1)
        features = (rms(each, spec.eps) * outer["feature_norms"]).reshape(count, -1)
    context = rms(features.astype(np.float64) @ outer["fc"].T, spec.eps) * outer["hidden_norm"]  # [C, E]
    tokens = [anchor] + [spec.mask_token] * (size - 1)
    x = outer.get("embed", embed)[tokens].astype(np.float64)  # [B, E]
    for index, layer in enumerate(spec.layers):
        w, a = weights.layer(index), layer.mixer
        assert a.rope.kind == "default"
        h = normed = rms(x, spec.eps) * w["attn_norm"]
        if spec.convolution is not None:
            h = convolve(h, normed, w, "attn_conv", side=0)
        read = rms(context, spec.eps) * w["attn_norm"] if spec.normed_context else context
        both = np.concatenate([read, h])  # input of keys and values
        positions = np.arange(count + size)
        q = rotate(rms((h @ w["q"].T).reshape(size, a.heads, -1), spec.eps) * w["q_norm"], positions[count:], a.rope.theta)
        k = rotate(rms((both @ w["k"].T).reshape(count + size, a.kv_heads, -1), spec.eps) * w["k_norm"], positions, a.rope.theta)
        v = (both @ w["v"].T).reshape(count + size, a.kv_heads, -1)
        mixed = np.empty((size, a.heads, v.shape[-1]))
        for slot in range(size):
            first = 0 if a.window is None else max(0, count - a.window)
            last = count + slot if spec.causal_in_block[index] else count + size - 1
            for number in range(a.heads):
                shared = number // (a.heads // a.kv_heads)
                scores = k[first : last + 1, shared] @ q[slot, number] / np.sqrt(q.shape[-1])
                shares = np.exp(scores - scores.max())
                mixed[slot, number] = shares @ v[first : last + 1, shared] / shares.sum()
        if a.gate is not None:
            gate = np.log1p(np.exp(h @ w["attn_gate"].T))  # softplus; one per head or per element
            mixed = mixed * gate.reshape(size, a.heads, -1)
        out = mixed.reshape(size, -1) @ w["o"].T
        x = x + (out if spec.convolution is None else convolve(out, normed, w, "attn_conv", side=1))
        h = normed = rms(x, spec.eps) * w["mlp_norm"]
        if spec.convolution is not None:
            h = convolve(h, normed, w, "mlp_conv", side=0)
        gate = h @ w["gate"].T
        out = (gate / (1 + np.exp(-gate)) * (h @ w["up"].T)) @ w["down"].T
        x = x + (out if spec.convolution is None else convolve(out, normed, w, "mlp_conv", side=1))
    return x


def convolve(z: np.ndarray, normed: np.ndarray, w: dict[str, np.ndarray], name: str, *, side: int) -> np.ndarray:
    """A convolution of DFlash2 over the slots of one block; its kernel depends on the sublayer's normed input."""
    base, delta = w[name], normed @ w[f"{name}_proj"].T
    _, taps, hidden = base.shape
    delta = delta.reshape(len(z), 2, taps, -1)
    group, out = hidden // delta.shape[-1], np.zeros_like(z)
    for slot in range(len(z)):
        for tap in range(min(taps, slot + 1)):
            for channel in range(hidden):
                factor = base[side, tap, channel] + delta[slot, side, tap, channel // group]
                out[slot, channel] += factor * z[slot - tap, channel]
    return out


def head_logits(weights: AnyWeights, hidden: np.ndarray, *, head: np.ndarray) -> np.ndarray:
    spec, outer = weights.spec, weights.outer()
    logits = spec.logit_scale * (rms(hidden[1:], spec.eps) * outer["norm"]) @ outer.get("head", head).T
    return logits if spec.softcap is None else spec.softcap * np.tanh(logits / spec.softcap)


def drafted(weights: AnyWeights, features: np.ndarray, anchor: int, *, embed: np.ndarray, head: np.ndarray) -> list[int]:
    """The tokens of a block when greedy: the likeliest of every slot, or the best candidate after the one before it."""
    hidden = block_hidden(weights, features, anchor, embed=embed)
    logits = head_logits(weights, hidden, head=head)
    spec, outer = weights.spec, weights.outer()
    if spec.selector is None:
        return proposals(weights, logits)
    found = [anchor]
    for row, state in zip(logits, rms(hidden[1:], spec.eps) * outer["norm"]):
        candidates = np.argsort(-row, kind="stable")[: spec.selector.top_k]
        wanted = outer["predecessor"][found[-1]] * (outer["selector"] @ state)
        scores = [row[token] + wanted @ outer["successor"][token] for token in candidates]
        found.append(int(candidates[int(np.argmax(scores))]))
    return found[1:]


def proposals(weights: AnyWeights, logits: np.ndarray) -> list[int]:
    """The most likely token of every slot, in the target's ids."""
    best = logits.argmax(-1)
    ids = weights.target_ids()
    return [int(i) for i in (best if ids is None else ids[best])]


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """x [T, heads, D] with the pair (i, i + D/2) rotated by position · theta^(-2i/D), as complex numbers."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * positions[:, None] * theta ** (-np.arange(half) / half))[:, None]
    pairs = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


# ------------------------------------------------------------------ with a target


class LoadedWeights:
    """Weights of a drafter or a target, read once."""

    def __init__(self, weights: Any) -> None:
        self.spec = weights.spec
        self._outer = {name: value.astype(np.float64) for name, value in weights.outer().items()}
        self._layers = [weights.layer(index) for index in range(len(self.spec.layers))]

    def outer(self) -> dict[str, np.ndarray]:
        return self._outer

    def layer(self, index: int) -> dict[str, np.ndarray]:
        return self._layers[index]


class Drafter(LoadedWeights):
    def __init__(self, weights: DrafterWeights) -> None:
        super().__init__(weights)
        self._ids = weights.target_ids()

    def target_ids(self) -> np.ndarray | None:
        return self._ids


class Target(LoadedWeights):
    def __init__(self, weights: ModelWeights) -> None:
        super().__init__(weights)
        self._last: tuple[list[int], list[int], list[np.ndarray]] = [], [], []  # cache: several runs use the same text

    @property
    def embed(self) -> np.ndarray:
        return self._outer["embed"]

    @property
    def head(self) -> np.ndarray:
        return self._outer["embed" if self.spec.tied else "head"]

    def run(self, tokens: list[int], layers: tuple[int, ...]) -> tuple[list[int], np.ndarray]:
        """The greedy token after every token, and the features [T, n·E] of every token."""
        if tokens != self._last[0]:
            logits, residuals = forward(self, tokens)  # type: ignore[arg-type]
            self._last = list(tokens), [int(i) for i in logits.argmax(-1)], residuals
        _, choices, residuals = self._last
        return choices, np.concatenate([residuals[i] for i in layers], axis=-1)


@dataclass(frozen=True)
class GreedyRun:
    tokens: list[int]  # generated
    kept: list[int]  # accepted drafts of each step

    @property
    def tokens_per_step(self) -> float:
        return sum(1 + kept for kept in self.kept) / len(self.kept)


def greedy_with_drafts(
    target: Target, drafter: Drafter, prompt: list[int], steps: int, *, spoil: Spoil = lambda x: x
) -> GreedyRun:
    """Draft a block, verify it with one pass of the target, keep the matching drafts, add the target's next token; repeat.

    `spoil` corrupts the features to measure their effect on acceptance; the tokens must stay the same.
    """
    layers = drafter.spec.target_layers
    choices, features = target.run(prompt, layers)
    committed, anchor, kept = list(prompt), choices[-1], []
    for _ in range(steps):
        drafts = drafted(drafter, spoil(features), anchor, embed=target.embed, head=target.head)
        choices, seen = target.run([*committed, anchor, *drafts], layers)
        after = choices[len(committed) :]  # after the anchor, after each draft
        agreed = next((i for i, draft in enumerate(drafts) if draft != after[i]), len(drafts))
        committed += [anchor, *drafts[:agreed]]
        features, anchor = seen[: len(committed)], after[agreed]
        kept.append(agreed)
    return GreedyRun([*committed[len(prompt) :], anchor], kept)


def draft_along(target: Target, drafter: Drafter, tokens: list[int], prompt: int, *, spoil: Spoil = lambda x: x) -> GreedyRun:
    """`greedy_with_drafts` when the greedy text is known: one pass of the target and one block per step.

    tokens[prompt:] must be the greedy answer to tokens[:prompt]. A step that runs over its end is not counted.
    """
    choices, features = target.run(tokens, drafter.spec.target_layers)
    assert choices[prompt - 1 : -1] == tokens[prompt:], "not the target's greedy text"
    position, kept = prompt, []  # position of the anchor
    while position + drafter.spec.block <= len(tokens):
        truth = tokens[position + 1 : position + drafter.spec.block]
        drafts = drafted(drafter, spoil(features[:position]), tokens[position], embed=target.embed, head=target.head)
        agreed = next((i for i, (draft, right) in enumerate(zip(drafts, truth)) if draft != right), len(truth))
        kept.append(agreed)
        position += agreed + 1
    return GreedyRun(tokens[prompt : position + 1], kept)
