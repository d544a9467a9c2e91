"""Model specifications as data: layers, widths, rope, norms, weight shapes and the bytes they need. No torch, no jax.

A family (`family.py`, `qwen3_5.py` …) builds a frozen ModelSpec from a checkpoint's configuration; every backend builds its
modules from the spec. A model is a list of layers; a layer is a mixer (attention or Gated DeltaNet), a feed-forward and norms.
A DrafterSpec describes a DFlash drafter in the same terms. The target is the model that a drafter drafts for. A block is the
positions that one pass of the drafter computes, and a slot is one position of it; `dflash.py` has the formulas. A lane holds the
recurrent state of one sequence on the device.

The fingerprint of `random:` models includes the repr of the spec: after renaming a field, add it to RENAMED_FIELDS in
`checkpoints/random_weights.py`, so that the fingerprint stays the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DTYPE_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
KV_BITS = {"f32": 32, "bf16": 16, "f16": 16, "fp8": 8, "int8": 8, "int4": 4}  # bits of one element of a cached key or value
KV_SCALE_BYTES = {"fp8": 4, "int8": 4, "int4": 4}  # bytes per head and position of the scale of a quantized key or value

STATE_BYTES = 4  # recurrent states are float32 for every model dtype

RopeKind = Literal["default", "linear", "llama3", "yarn", "divisors", "proportional"]
Activation = Literal["silu", "gelu_tanh"]
# RMSNorm multiplies by its weight after rounding to the model's dtype ("narrow"), or in float32 before rounding ("wide").
Norm = Literal["narrow", "wide"]
Gate = Literal["sigmoid", "softplus"]
DrafterLayout = Literal["z-lab", "speculators", "gguf", "gguf-draft"]
Shapes = dict[str, tuple[int, ...]]


def kv_head_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of one cached head of a key or of a value, with its scale if it is quantized."""
    return head_dim * KV_BITS[dtype] // 8 + KV_SCALE_BYTES.get(dtype, 0)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding in the half-split form: (x[i], x[i + dims/2]) is rotated by position * inv_freq[i]."""

    theta: float
    dims: int  # how many of the first dimensions of a head are rotated
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # for llama3: pairs with fewer rotations than this over the original context are scaled fully
    high_freq_factor: float = 4.0  # for llama3: pairs with more rotations than this are not scaled
    original_context: int = 0  # for llama3 and yarn: the context length before scaling
    beta_fast: float = 32.0  # for yarn: pairs with more rotations than this are not scaled
    beta_slow: float = 1.0  # for yarn: pairs with fewer rotations than this are scaled fully
    attention_factor: float | None = None  # for yarn: it multiplies cos and sin; None: 0.1 ln(factor) + 1, at least 1
    truncate: bool = True  # for yarn: round the bounds of the scaled range to whole pairs
    divisors: tuple[float, ...] = ()  # for the kind divisors: rope_freqs of a GGUF file, which divides the frequencies
    rotated_pairs: int = 0  # for the kind proportional: only the first pairs, this many, are rotated

    def inverse_frequencies(self) -> list[float]:
        """One frequency per pair of dimensions, in double precision."""
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
                return [f if i < self.rotated_pairs else 0.0 for i, f in enumerate(plain)]

    @property
    def scale(self) -> float:
        """The factor by which rope tables multiply cos and sin."""
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
    scale: float  # query times key is multiplied by it
    window: int | None = None  # query i attends to keys j with i - window < j <= i
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # whether every q and k head has an RMSNorm before rope
    v_norm: bool = False  # whether every v head has an RMSNorm, which has no weight
    keys_as_values: bool = False  # no v projection: values are the output of the k projection, before norm and rope
    reuses: int | None = None  # index of the layer whose keys and values this layer reads instead of computing its own
    gate: Gate | None = None  # activation of a gate on the attention output, before the output projection
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
    """Gated DeltaNet: a causal convolution, then a recurrent state that decays, is updated and is read at every position.

    Value head i uses key head i // (value_heads // key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int  # the number of positions that the convolution reads

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of one lane: the recurrent state and the convolution's window."""
        state = self.value_heads * self.key_dim * self.value_dim
        return (state + (self.conv - 1) * self.channels) * STATE_BYTES

    @property
    def draft_bytes(self) -> int:
        """Bytes of the rollback buffer for one drafted position: the decay, the key, the vector that the delta rule adds to the
        state under this key, and the convolution's input."""
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
            "decay": (heads,),  # negative: the state decays by exp(decay * softplus(delta_a · h + delta_bias))
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
    """A mixture of experts: the router scores all experts, the best `used` run, their outputs are added in expert order."""

    experts: int
    used: int
    width: int  # feed-forward width of one expert
    activation: Activation = "silu"
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True  # the routing weights of the selected experts are divided by their sum
    scale: float = 1.0  # the sum of the experts' outputs is multiplied by it
    softcap: float | None = None  # the router's logits become softcap * tanh(logits / softcap)
    select_bias: bool = False  # a bias added to the scores for selection only, not to the routing weights
    expert_scale: bool = False  # a learned factor per expert, which multiplies its routing weight after `normalised`
    own_router_norm: bool = False  # the router reads norm(residual) * router_scale / sqrt(hidden), not the layer's normed input
    shared: int = 0  # width of the shared expert, which every token passes; 0: the layer has none
    shared_gate: bool = False  # the shared expert's output is multiplied by sigmoid(shared_route · h)

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
    """A layer updates the residual stream x: x += mixer(norm(x)); x += feed_forward(norm(x)). Some families add optional parts:

    sandwich          the outputs of mixer and feed-forward are normed before they are added to the residual
    parallel_experts  experts in parallel with the feed-forward; both outputs are normed and added
    inputs            width of a per-layer input embedding: x += norm(inputs_out(act(inputs_gate(x)) * input)); 0: none
    scaled            the residual is multiplied by a learned scalar at the end of the layer
    """

    mixer: AttentionSpec | DeltaSpec
    feed_forward: MlpSpec | MoeSpec
    sandwich: bool = False
    parallel_experts: MoeSpec | None = None
    inputs: int = 0
    scaled: bool = False

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer that is known to be an attention layer."""
        if not isinstance(self.mixer, AttentionSpec):
            raise TypeError("this layer is not an attention layer")
        return self.mixer

    def shapes(self, hidden: int) -> Shapes:
        """Shapes of the layer's weights: [outputs, inputs], experts as [expert, outputs, inputs]."""
        shapes: Shapes = {"attn_norm": (hidden,), "mlp_norm": (hidden,)}
        shapes |= self.mixer.shapes(hidden) | self.feed_forward.shapes(hidden)
        if self.sandwich:
            shapes |= {"post_attn_norm": (hidden,), "post_mlp_norm": (hidden,)}
        if self.parallel_experts is not None:
            shapes |= self.parallel_experts.shapes(hidden)
            shapes |= {"dense_norm": (hidden,), "experts_norm": (hidden,), "post_experts_norm": (hidden,)}
        if self.inputs:
            shapes |= {"inputs_gate": (self.inputs, hidden), "inputs_out": (hidden, self.inputs), "inputs_norm": (hidden,)}
        if self.scaled:
            shapes |= {"layer_scale": (1,)}
        return shapes

    def parameters(self, hidden: int) -> int:
        """Number of parameters for a residual stream of width `hidden`."""
        return sum(math.prod(shape) for shape in self.shapes(hidden).values())


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str
    layers: tuple[LayerSpec, ...]
    hidden: int
    vocab: int
    eps: float
    tied: bool  # whether the output head is the embedding matrix
    max_context: int
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap); None: they stay as they are
    norm: Norm = "narrow"
    embed_scale: float = 1.0  # embeddings are multiplied by it, after it is rounded to the model's dtype
    notes: tuple[str, ...] = ()  # parts of the checkpoint that are not used; `inspect` shows them

    @property
    def inputs(self) -> int:
        """Width of the per-layer input embeddings; 0 if there are none. Either all layers have them or none."""
        return self.layers[0].inputs

    @property
    def recurrent(self) -> bool:
        """Whether any layer has a recurrent state, which cannot be rewound."""
        return any(isinstance(layer.mixer, DeltaSpec) for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of the page groups (layers that keep the same positions in pages): one group per distinct window of the
        layers that store keys and values. Full attention (None) comes first, and is the only one if no layer stores any."""
        kept = {m.window for layer in self.layers if isinstance(m := layer.mixer, AttentionSpec) and m.reuses is None}
        return tuple(sorted(kept, key=lambda window: (window is not None, window or 0))) or (None,)

    def group(self, index: int) -> int | None:
        """The index in `windows` of the page group of a layer; None for a layer that stores no keys and values."""
        mixer = self.layers[index].mixer
        return self.windows.index(mixer.window) if isinstance(mixer, AttentionSpec) and mixer.reuses is None else None

    def outer_shapes(self) -> Shapes:
        """Shapes of the weights outside the layers: embed, norm, head (unless tied), and the per-layer input embeddings."""
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
        """Bytes of one page of keys and values in one layer; 0 for a layer that stores none."""
        mixer = self.layers[index].mixer
        if isinstance(mixer, DeltaSpec) or mixer.reuses is not None:
            return 0
        return 2 * page_size * mixer.kv_heads * kv_head_bytes(mixer.head_dim, dtype)

    def lane_bytes(self, index: int) -> int:
        """Bytes of recurrent state per lane in one layer; 0 for attention."""
        mixer = self.layers[index].mixer
        return mixer.state_bytes if isinstance(mixer, DeltaSpec) else 0

    def draft_bytes(self) -> int:
        """Bytes of the rollback buffer per drafted position, over all layers."""
        return sum(layer.mixer.draft_bytes for layer in self.layers if isinstance(layer.mixer, DeltaSpec))

    def outer_parameters(self) -> int:
        """Number of parameters outside the layers."""
        return sum(math.prod(shape) for shape in self.outer_shapes().values())

    @property
    def parameters(self) -> int:
        return self.outer_parameters() + sum(self.layer_parameters(i) for i in range(len(self.layers)))

    def group_page_bytes(self, group: int, page_size: int, dtype: str = "f32") -> int:
        """Bytes of one page over all layers of a group."""
        members = [i for i in range(len(self.layers)) if self.group(i) == group]
        return sum(self.page_bytes(i, page_size, dtype) for i in members)


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """The grouped convolutions of a DFlash2 layer, before and after attention and feed-forward, over the slots of a block."""

    taps: int  # number of slots that the convolution reads: the slot itself and the taps - 1 before it
    group: int  # number of neighbouring channels that share the input-dependent part of their kernel

    def shapes(self, hidden: int) -> Shapes:
        base, projection = (2, self.taps, hidden), (2 * self.taps * (hidden // self.group), hidden)
        return {"attn_conv": base, "attn_conv_proj": projection, "mlp_conv": base, "mlp_conv_proj": projection}


@dataclass(frozen=True, slots=True)
class SelectorSpec:
    """The candidate selector of a DFlash2 drafter. It scores a slot's likeliest tokens, given the token drafted for the slot
    before."""

    rank: int
    top_k: int  # how many of a slot's likeliest tokens the selector scores

    def shapes(self, hidden: int, vocab: int) -> Shapes:
        return {"predecessor": (vocab, self.rank), "successor": (vocab, self.rank), "selector": (self.rank, hidden)}


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A DFlash drafter: layers that read hidden states of the target, followed by the target's head or a separate one."""

    layout: DrafterLayout  # format of the file from which it was read
    layers: tuple[LayerSpec, ...]  # a layer with a window reads the last `window` positions before the block
    causal_in_block: tuple[bool, ...]  # by layer: whether a slot attends to itself and earlier slots only, not to the whole block
    hidden: int
    target_hidden: int
    vocab: int  # size of the target's vocabulary
    draft_vocab: int  # number of tokens that the drafter's head scores
    eps: float
    block: int  # slots of a block. The first holds the last sampled token, so a block drafts block - 1 tokens
    mask_token: int
    # The layers of the target, counted from 0, after which the drafter reads the residual stream: each gives one feature.
    target_layers: tuple[int, ...]
    max_context: int
    own_embedding: bool = False
    own_head: bool = False
    mapped: bool = False  # draft token ids differ from the target's; DrafterWeights.target_ids maps them
    target_depth: int | None = None  # number of the target's layers; None if the file does not name it
    feature_norms: bool = False  # whether every feature is normed, with a weight of its own, before the first projection
    # Whether a layer applies its attn_norm to the target's features before it projects them to keys and values.
    normed_context: bool = False
    convolution: ConvolutionSpec | None = None
    selector: SelectorSpec | None = None
    logit_scale: float = 1.0  # logits are multiplied by it
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap); None: they stay as they are
    notes: tuple[str, ...] = ()

    @property
    def feature_width(self) -> int:
        """Number of inputs of the drafter's first projection (`fc`), which takes the features of all target layers at one
        position, concatenated."""
        return len(self.target_layers) * self.target_hidden

    def outer_shapes(self) -> Shapes:
        """Shapes of the weights outside the layers."""
        hidden = self.hidden
        shapes: Shapes = {"fc": (hidden, self.feature_width), "hidden_norm": (hidden,), "norm": (hidden,)}
        if self.feature_norms:
            shapes |= {"feature_norms": (len(self.target_layers), self.target_hidden)}
        if self.own_embedding:
            shapes |= {"embed": (self.vocab, hidden)}
        if self.own_head:
            shapes |= {"head": (self.draft_vocab, hidden)}
        return shapes if self.selector is None else shapes | self.selector.shapes(hidden, self.vocab)

    def layer_shapes(self, index: int) -> Shapes:
        """Shapes of one layer's weights."""
        shapes = self.layers[index].shapes(self.hidden)
        return shapes if self.convolution is None else shapes | self.convolution.shapes(self.hidden)

    @property
    def parameters(self) -> int:
        every = [self.outer_shapes(), *(self.layer_shapes(index) for index in range(len(self.layers)))]
        return sum(math.prod(shape) for shapes in every for shape in shapes.values())
