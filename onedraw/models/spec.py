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
KV_BYTES = {**DTYPE_BYTES, "fp8": 1, "int8": 1}  # of a key's or value's number
KV_SCALE_BYTES = {"fp8": 4, "int8": 4}  # beside the numbers of one token's head

STATE_BYTES = 4  # recurrent states are float32, whatever the model's dtype

RopeKind = Literal["default", "linear", "llama3", "yarn", "divisors", "proportional"]
Activation = Literal["silu", "gelu_tanh"]
Norm = Literal["narrow", "wide"]  # x̂ meets the weight after it was rounded to the model's dtype, or before, in float32
Gate = Literal["sigmoid", "softplus"]
DrafterLayout = Literal["z-lab", "speculators", "gguf"]
Shapes = dict[str, tuple[int, ...]]


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
    turning: int = 0  # proportional: the first pairs turn, the others stand still

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
            case "proportional":
                return [f if i < self.turning else 0.0 for i, f in enumerate(plain)]

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
    v_norm: bool = False  # RMSNorm of every v head, without a weight
    keys_as_values: bool = False  # no v projection: values are what the k projection gave, before norm and rope
    reuses: int | None = None  # the layer whose keys and values it reads; it makes none of its own
    gate: Gate | None = None  # of what was attended, before the output projection
    gate_per: Literal["element", "head"] = "element"

    @property
    def gate_width(self) -> int:
        return 0 if self.gate is None else self.heads * (self.head_dim if self.gate_per == "element" else 1)

    def shapes(self, hidden: int) -> Shapes:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        own = self.reuses is None
        shapes: Shapes = {"q": (q, hidden), "o": (hidden, q)}
        if own:
            shapes |= {"k": (kv, hidden)} | ({} if self.keys_as_values else {"v": (kv, hidden)})
        if self.gate is not None:
            shapes |= {"attn_gate": (self.gate_width, hidden)}
        if self.qkv_bias:
            shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        if self.out_bias:
            shapes |= {"o_bias": (hidden,)}
        if self.qk_norm:
            shapes |= {"q_norm": (self.head_dim,)} | ({"k_norm": (self.head_dim,)} if own else {})
        return shapes


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Gated DeltaNet: a causal convolution, then a state that decays, is corrected and is read at every position.

    Value head i reads with key head i // (value_heads // key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int  # positions that the convolution reads, its own among them

    @property
    def channels(self) -> int:
        """What the convolution runs over: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        """The state and the convolution's window of one lane."""
        state = self.value_heads * self.key_dim * self.value_dim
        return (state + (self.conv - 1) * self.channels) * STATE_BYTES

    @property
    def draft_bytes(self) -> int:
        """What one drafted position did to the state: decay, key, correction, and the convolution's input."""
        values = self.value_heads + self.key_heads * self.key_dim + self.value_heads * self.value_dim + self.channels
        return values * STATE_BYTES

    def shapes(self, hidden: int) -> Shapes:
        values, heads = self.value_heads * self.value_dim, self.value_heads
        return {
            "delta_qkv": (self.channels, hidden),
            "delta_z": (values, hidden),
            "delta_a": (heads, hidden),
            "delta_b": (heads, hidden),
            "conv": (self.channels, self.conv),
            "decay": (heads,),  # negative: g = decay * softplus(a + delta_bias)
            "delta_bias": (heads,),
            "delta_norm": (self.value_dim,),
            "o": (hidden, values),
        }


@dataclass(frozen=True, slots=True)
class MlpSpec:
    width: int
    activation: Activation = "silu"
    bias: bool = False

    def shapes(self, hidden: int) -> Shapes:
        shapes: Shapes = {"gate": (self.width, hidden), "up": (self.width, hidden), "down": (hidden, self.width)}
        if self.bias:
            shapes |= {"gate_bias": (self.width,), "up_bias": (self.width,), "down_bias": (hidden,)}
        return shapes


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts: the router scores all, the best `used` answer, their answers are added in expert order."""

    experts: int
    used: int
    width: int  # of one expert
    activation: Activation = "silu"
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True  # the chosen experts' weights are divided by their sum
    scale: float = 1.0  # of the experts' sum
    softcap: float | None = None  # of the router's logits
    select_bias: bool = False  # added to the scores for selecting, not for weighing
    expert_scale: bool = False  # a learned factor per expert, after normalising
    own_router_norm: bool = False  # the router reads norm(residual) * router_scale / sqrt(hidden), not the layer's normed input
    shared: int = 0  # width of an expert that always answers
    shared_gate: bool = False  # its answer times sigmoid(shared_route · h)

    def shapes(self, hidden: int) -> Shapes:
        experts, width = self.experts, self.width
        shapes: Shapes = {
            "router": (experts, hidden),
            "expert_gate": (experts, width, hidden),
            "expert_up": (experts, width, hidden),
            "expert_down": (experts, hidden, width),
        }
        if self.select_bias:
            shapes |= {"select_bias": (experts,)}
        if self.expert_scale:
            shapes |= {"expert_scale": (experts,)}
        if self.own_router_norm:
            shapes |= {"router_scale": (hidden,)}
        if self.shared:
            shapes |= {"shared_gate": (self.shared, hidden), "shared_up": (self.shared, hidden)}
            shapes |= {"shared_down": (hidden, self.shared)}
        if self.shared_gate:
            shapes |= {"shared_route": (1, hidden)}
        return shapes


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """x += mixer(norm(x)); x += feed_forward(norm(x)); and what some families add to that.

    sandwich  what the mixer and the feed-forward give is normed before it is added
    beside    experts that read the residual next to the feed-forward: their answers are normed and added up
    inputs    width of an input of the layer's own: x += norm(inputs_out(act(inputs_gate(x)) * input))
    scaled    the residual is multiplied by a learned number at the layer's end
    """

    mixer: AttentionSpec | DeltaSpec
    feed_forward: MlpSpec | MoeSpec
    sandwich: bool = False
    beside: MoeSpec | None = None
    inputs: int = 0
    scaled: bool = False

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer that is known to attend."""
        if not isinstance(self.mixer, AttentionSpec):
            raise TypeError("this layer does not attend")
        return self.mixer

    def shapes(self, hidden: int) -> Shapes:
        """Every weight of the layer, as [outputs, inputs]; experts as [expert, outputs, inputs]."""
        shapes: Shapes = {"attn_norm": (hidden,), "mlp_norm": (hidden,)}
        shapes |= self.mixer.shapes(hidden) | self.feed_forward.shapes(hidden)
        if self.sandwich:
            shapes |= {"post_attn_norm": (hidden,), "post_mlp_norm": (hidden,)}
        if self.beside is not None:
            shapes |= self.beside.shapes(hidden)
            shapes |= {"dense_norm": (hidden,), "experts_norm": (hidden,), "post_experts_norm": (hidden,)}
        if self.inputs:
            shapes |= {"inputs_gate": (self.inputs, hidden), "inputs_out": (hidden, self.inputs), "inputs_norm": (hidden,)}
        if self.scaled:
            shapes |= {"layer_scale": (1,)}
        return shapes

    def parameters(self, hidden: int) -> int:
        """How many weights, where the residual stream is `hidden` wide."""
        return sum(math.prod(shape) for shape in self.shapes(hidden).values())


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
    norm: Norm = "narrow"
    embed_scale: float = 1.0  # of embeddings, rounded to the model's dtype first
    notes: tuple[str, ...] = ()  # what of the checkpoint is not used; `inspect` shows it

    @property
    def inputs(self) -> int:
        """Width of the layers' own inputs; 0 where they have none. All layers have them, or no layer."""
        return self.layers[0].inputs

    @property
    def recurrent(self) -> bool:
        """Has state that only moves forward."""
        return any(isinstance(layer.mixer, DeltaSpec) for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The page groups: what layers with keys and values of their own remember, everything first, then by window."""
        kept = {m.window for layer in self.layers if isinstance(m := layer.mixer, AttentionSpec) and m.reuses is None}
        return tuple(sorted(kept, key=lambda window: (window is not None, window or 0))) or (None,)

    def group(self, index: int) -> int | None:
        """The page group of a layer's keys and values; None where it has none of its own."""
        mixer = self.layers[index].mixer
        return self.windows.index(mixer.window) if isinstance(mixer, AttentionSpec) and mixer.reuses is None else None

    def outer_shapes(self) -> Shapes:
        """embed, norm and, unless tied, head; and what the layers' own inputs are made of."""
        shapes: Shapes = {"embed": (self.vocab, self.hidden), "norm": (self.hidden,)}
        if not self.tied:
            shapes |= {"head": (self.vocab, self.hidden)}
        if self.inputs:
            width = len(self.layers) * self.inputs
            shapes |= {"inputs_embed": (self.vocab, width), "inputs_project": (width, self.hidden)}
            shapes |= {"inputs_project_norm": (self.inputs,)}
        return shapes

    def layer_parameters(self, index: int) -> int:
        return self.layers[index].parameters(self.hidden)

    def weight_bytes(self, index: int, dtype: str = "f32") -> int:
        return self.layer_parameters(index) * DTYPE_BYTES[dtype]

    def page_bytes(self, index: int, page_size: int, dtype: str = "f32") -> int:
        """Keys and values of one page in one layer; 0 for a layer without keys and values of its own."""
        mixer = self.layers[index].mixer
        if isinstance(mixer, DeltaSpec) or mixer.reuses is not None:
            return 0
        return 2 * page_size * mixer.kv_heads * (mixer.head_dim * KV_BYTES[dtype] + KV_SCALE_BYTES.get(dtype, 0))

    def lane_bytes(self, index: int) -> int:
        """Per-sequence state beside the pages; attention has none."""
        mixer = self.layers[index].mixer
        return mixer.state_bytes if isinstance(mixer, DeltaSpec) else 0

    def draft_bytes(self) -> int:
        """What the rollback buffer holds per drafted position, over all layers."""
        return sum(layer.mixer.draft_bytes for layer in self.layers if isinstance(layer.mixer, DeltaSpec))

    def outer_parameters(self) -> int:
        """Embedding, last norm and head, and what the layers' own inputs are made of."""
        return sum(math.prod(shape) for shape in self.outer_shapes().values())

    @property
    def parameters(self) -> int:
        return self.outer_parameters() + sum(self.layer_parameters(i) for i in range(len(self.layers)))

    def group_page_bytes(self, group: int, page_size: int, dtype: str = "f32") -> int:
        """One page over all layers of a group."""
        members = [i for i in range(len(self.layers)) if self.group(i) == group]
        return sum(self.page_bytes(i, page_size, dtype) for i in members)

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
        return sum(2 * layer.attention.kv_heads * layer.attention.head_dim for layer in self.layers) * DTYPE_BYTES[dtype]
