"""What a model is, as data: layers, widths, rope, norms, and the bytes they need. No torch, no jax.

In: numbers read from a checkpoint's config by a family (`llama.py`, `qwen3.py` …). Out: a frozen ModelSpec that
every backend builds its stack from, or a DrafterSpec. A model is a list of layers; a layer is a mixer, a feed-forward
and norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DTYPE_BYTES = {"f32": 4, "bf16": 2, "f16": 2}

RopeKind = Literal["default", "linear", "llama3", "yarn", "divisors"]
Activation = Literal["silu", "gelu_tanh"]
DrafterLayout = Literal["z-lab", "speculators", "gguf"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions in the half-split form: (x[i], x[i + dims/2]) turn by position * inv_freq[i]."""

    theta: float
    dims: int  # how many of the head's first dimensions turn
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 0  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn
    divisors: tuple[float, ...] = ()  # what a GGUF's rope_freqs tensor holds

    def inverse_frequencies(self) -> list[float]:
        """One frequency per pair of dimensions, computed in double precision."""
        plain = [self.theta ** (-2 * i / self.dims) for i in range(self.dims // 2)]
        match self.kind:
            case "default":
                return plain
            case "linear":
                return [f / self.factor for f in plain]
            case "divisors":
                return [f / d for f, d in zip(plain, self.divisors, strict=True)]
            case "llama3":
                return [self._llama3(f) for f in plain]
            case "yarn":
                return self._yarn(plain)

    @property
    def scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def _llama3(self, f: float) -> float:
        wavelength = 2 * math.pi / f
        span = self.high_freq_factor - self.low_freq_factor
        s = (self.original_context / wavelength - self.low_freq_factor) / span
        s = min(max(s, 0.0), 1.0)
        return (1 - s) * f / self.factor + s * f

    def _yarn(self, plain: list[float]) -> list[float]:
        def edge(turns: float) -> float:
            return self.dims * math.log(self.original_context / (2 * math.pi * turns)) / (2 * math.log(self.theta))

        low, high = edge(self.beta_fast), edge(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, self.dims - 1.0)
        span = max(high - low, 1e-3)
        ramp = [min(max((i - low) / span, 0.0), 1.0) for i in range(len(plain))]
        return [f / self.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float  # of the scores
    window: int | None = None  # query i sees keys j with i - window < j <= i
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every q and k head before rope


@dataclass(frozen=True, slots=True)
class MlpSpec:
    width: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """x += mixer(norm(x)); x += feed_forward(norm(x))."""

    mixer: AttentionSpec
    feed_forward: MlpSpec

    def parameters(self, hidden: int) -> int:
        """How many weights, where the residual stream is `hidden` wide."""
        a, m = self.mixer, self.feed_forward
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        count = hidden * (q + 2 * kv) + q * hidden + 2 * hidden
        count += (q + 2 * kv) * a.qkv_bias + hidden * a.out_bias + 2 * a.head_dim * a.qk_norm
        count += 3 * hidden * m.width + (2 * m.width + hidden) * m.bias
        return count


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str
    layers: tuple[LayerSpec, ...]
    hidden: int
    vocab: int
    eps: float
    tied: bool  # the head is the embedding
    max_context: int
    softcap: float | None = None  # logits become cap * tanh(logits / cap)
    notes: tuple[str, ...] = ()  # what of the checkpoint is not used; `inspect` shows it

    def layer_parameters(self, index: int) -> int:
        return self.layers[index].parameters(self.hidden)

    def weight_bytes(self, index: int, dtype: str = "f32") -> int:
        return self.layer_parameters(index) * DTYPE_BYTES[dtype]

    def page_bytes(self, index: int, page_size: int, dtype: str = "f32") -> int:
        """Keys and values of one page in one layer."""
        a = self.layers[index].mixer
        return 2 * page_size * a.kv_heads * a.head_dim * DTYPE_BYTES[dtype]

    def lane_bytes(self, index: int) -> int:
        """Per-sequence state beside the pages; attention has none."""
        return 0

    def outer_parameters(self) -> int:
        """Embedding, last norm and head."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.outer_parameters() + sum(self.layer_parameters(i) for i in range(len(self.layers)))

    def total_page_bytes(self, page_size: int, dtype: str = "f32") -> int:
        return sum(self.page_bytes(i, page_size, dtype) for i in range(len(self.layers)))


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A block drafter: a stack of layers between features of the target and the target's (or its own) head."""

    layout: DrafterLayout  # what it was read from
    layers: tuple[LayerSpec, ...]  # a window W means: of the context, the last W positions before the anchor
    causal_in_block: tuple[bool, ...]  # per layer: a slot sees itself and the slots before it, or the whole block
    hidden: int
    target_hidden: int
    vocab: int  # the target's
    draft_vocab: int  # rows of the head
    eps: float
    block: int  # slots, the anchor's among them: a block drafts one token less
    mask_token: int
    target_layers: tuple[int, ...]  # 0-based; features are the residual stream after each, in this order
    max_context: int
    own_embedding: bool = False
    own_head: bool = False
    mapped: bool = False  # a draft id is not the target's id: see DrafterWeights.target_ids
    target_depth: int | None = None  # layers of the target, where the file says
    notes: tuple[str, ...] = ()

    @property
    def feature_width(self) -> int:
        """Numbers that fc reads per context position."""
        return len(self.target_layers) * self.target_hidden

    @property
    def parameters(self) -> int:
        own = self.vocab * self.own_embedding + self.draft_vocab * self.own_head
        return self.hidden * (self.feature_width + 2 + own) + sum(layer.parameters(self.hidden) for layer in self.layers)

    def position_bytes(self, dtype: str = "f32") -> int:
        """Keys and values of one context position, all layers together."""
        return sum(2 * layer.mixer.kv_heads * layer.mixer.head_dim for layer in self.layers) * DTYPE_BYTES[dtype]
