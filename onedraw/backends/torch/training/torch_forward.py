"""A differentiable model whose logprobs have the bits of the sampler, in float32 on a CPU.

In: a dense model (Llama, Mistral, Qwen2, Qwen3). Out: a torch module with its parameters, named as in a folder of safetensors.
The forward pass is the server's own: its loader joins and packs the weights, its layers run on its kernels, its sampler's sums
give the logprobs. Beside each operation stands the same formula in plain torch, which autograd differentiates at the inputs of
the exact one: the value is the server's, the gradient that of the formula. The operations are products, norms, gated activations
and attention; additions to the residual stream are torch's own, and round as the server's do.

Axes: T tokens of all sequences, d rotary dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.model.layer import load_layer, rope_tables, run_layer
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.model.weight_loader import LANE, WeightLoader, padded
from onedraw.backends.torch.ops.base import AttentionInputs, Ops, PreparedInputs
from onedraw.backends.torch.ops.plain.linear import Linear, RowRule, strictest
from onedraw.backends.torch.runner.inputs import InputLayout, Inputs, make_inputs
from onedraw.backends.torch.runner.pipeline import StageDevice
from onedraw.backends.torch.selfcheck import self_check
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.backends.torch.state.model_state import ModelState, StateSizes
from onedraw.errors import BadParameter, UnsupportedModel
from onedraw.models.registry import ModelInfo
from onedraw.models.source import WeightSource
from onedraw.models.spec import Activation, AttentionSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.models.weight_names import WeightKey, weight_shapes
from onedraw.types import History, Plan, Row, SamplingParams

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PAGE = 16  # positions per page
CPU = torch.device("cpu")


class _Exact(torch.autograd.Function):
    """The value of the exact operation, with the gradient of the plain one."""

    @staticmethod
    def forward(ctx: Any, plain: Tensor, exact: Tensor) -> Tensor:
        return exact

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _exact(plain: Tensor, exact: Tensor) -> Tensor:
    found: Tensor = _Exact.apply(plain, exact.detach())  # type: ignore[no-untyped-call]
    return found


class DifferentiableLinear(Linear):
    """A product with a weight that has a gradient. `exact`: the server's product with the same weight."""

    def __init__(self, exact: Linear, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = exact.out_features, exact.in_features
        self.rule, self.dtype, self.device = exact.rule, exact.dtype, exact.device
        self.bias, self._product_of, self._matrix = bias, exact, weight

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            exact = self._product_of(x.detach())
        return _exact(F.linear(x[:, : self._matrix.shape[1]], self._matrix, self.bias), exact)


@dataclass(frozen=True, slots=True)
class DifferentiableAttention:
    """The attention of a step. `spans`: (first, stop) of each sequence's tokens; tokens after them are padding."""

    exact: AttentionInputs
    spans: Sequence[tuple[int, int]]
    rotation: Tensor  # [T, 2, d/2]: cos and sin of each token's position

    @property
    def page_table(self) -> Tensor:
        return self.exact.page_table

    def attend(
        self,
        qkv: Tensor,
        *,
        spec: AttentionSpec,
        store: PageStore,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        with torch.no_grad():
            # A kernel may rotate queries in the buffer that it reads, so it gets a copy.
            norms = [None if norm is None else norm.detach() for norm in (q_norm, k_norm)]
            exact = self.exact.attend(qkv.detach().clone(), spec=spec, store=store, q_norm=norms[0], k_norm=norms[1], eps=eps)
        return _exact(self._plain(qkv, spec, q_norm, k_norm, eps), exact)

    def write(self, kv: Tensor, *, spec: AttentionSpec, store: PageStore, k_norm: Tensor | None, eps: float) -> None:
        self.exact.write(kv, spec=spec, store=store, k_norm=k_norm, eps=eps)

    def _plain(self, qkv: Tensor, spec: AttentionSpec, q_norm: Tensor | None, k_norm: Tensor | None, eps: float) -> Tensor:
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        q = qkv[:, :queries].view(len(qkv), spec.heads, spec.head_dim)
        k = qkv[:, queries : queries + keys].view(len(qkv), spec.kv_heads, spec.head_dim)
        v = qkv[:, queries + keys : queries + 2 * keys].view(k.shape)
        q, k = _rotated(_normed(q, q_norm, eps), self.rotation), _rotated(_normed(k, k_norm, eps), self.rotation)
        out = []
        for first, stop in self.spans:
            queried, key, value = (x[first:stop].transpose(0, 1)[None] for x in (q, k, v))
            places = torch.arange(stop - first)
            hidden = places[None, :] > places[:, None]
            if spec.window is not None:
                hidden = hidden | (places[None, :] <= places[:, None] - spec.window)
            mixed = F.scaled_dot_product_attention(queried, key, value, attn_mask=~hidden, scale=spec.scale, enable_gqa=True)
            out.append(mixed[0].transpose(0, 1).reshape(stop - first, -1))
        rest = len(qkv) - self.spans[-1][1]
        return torch.cat([*out, qkv.new_zeros(rest, queries)])


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, eps)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    half = angles.shape[-1]
    cos, sin = angles[:, :1], angles[:, 1:]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class DifferentiableOps:
    """The server's operations on a CPU, each with the gradient of its formula. Only those that a dense layer calls are here."""

    reads_weight_rows = False

    def __init__(self, exact: Ops) -> None:
        self.exact = exact

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> DifferentiableLinear:
        fixed = None if bias is None else bias.detach()
        return DifferentiableLinear(self.exact.linear(weight.detach(), fixed), weight, bias)

    def packed_linear(self, *_: object, **__: object) -> None:
        return None

    def gated_product(self, *_: object) -> None:
        return None

    def fuse(self, *_: object) -> None:
        return None

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        with torch.no_grad():
            exact = self.exact.rms_norm(x.detach(), None if weight is None else weight.detach(), eps)
        return _exact(F.rms_norm(x, x.shape[-1:], weight, eps), exact)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        with torch.no_grad():
            exact = self.exact.gated(gate_up.detach(), activation)
        gate, up = gate_up.chunk(2, dim=1)
        return _exact((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up, exact)


class PreparedAttention(PreparedInputs):
    """The attention inputs of one forward pass, by spec."""

    def __init__(self, ops: Ops, inputs: Inputs, ropes: Mapping[RopeSpec, Tensor], spans: Sequence[tuple[int, int]]) -> None:
        super().__init__(ops, inputs, ropes)
        self._spans, self._tables, self._positions = spans, ropes, inputs.positions

    def attention(self, spec: AttentionSpec) -> AttentionInputs:
        rotation = self._tables[spec.rope].index_select(0, self._positions)
        return DifferentiableAttention(super().attention(spec), self._spans, rotation)


class ParameterLoader(WeightLoader):
    """Reads the parameters of a module as a model reads its weights: joined by rows, and padded with zeros."""

    def __init__(self, weights: WeightSource, parameters: Mapping[WeightKey, Tensor], ops: Any, spec: ModelSpec) -> None:
        super().__init__(weights, ops=ops, dtype=torch.float32, device=CPU, norm=spec.norm)
        self._parameters = parameters

    def kept(self, layer: int | None, *names: str, pad: int = 1) -> Tensor:
        return self.passing(layer, *names, pad=pad)

    def wide(self, layer: int | None, name: str) -> Tensor:
        return self.passing(layer, name)

    def passing(self, layer: int | None, *names: str, pad: int = 1, pad_columns: int = 1) -> Tensor:
        parts = []
        for name in names:
            value = self._parameters[layer, name]
            rows = padded(len(value), pad) - len(value)
            columns = [0, padded(value.shape[1], pad_columns) - value.shape[1]] if value.dim() == 2 else []
            parts.append(F.pad(value, [*columns, 0, rows]) if rows or any(columns) else value)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class TorchForward(nn.Module):
    """A dense model with the checkpoint's parameters. Calling it gives the logits of sequences; `logprobs` those of replies."""

    def __init__(self, info: ModelInfo, *, cache: Path) -> None:
        super().__init__()
        spec = info.spec
        dense = all(isinstance(one.mixer, AttentionSpec) and isinstance(one.feed_forward, MlpSpec) for one in spec.layers)
        if spec.family not in FAMILIES or not dense:
            raise UnsupportedModel(f"torch_forward: {spec.family} is not supported; supported: {', '.join(FAMILIES)}, dense")
        self.spec, self._weights = spec, info.weights
        self._names: dict[WeightKey, str] = {}
        self._exact_ops = pick_ops("cpu", "f32", cache=cache)
        self._ops: Any = DifferentiableOps(self._exact_ops)
        self._rule = self._row_rule()
        for key in weight_shapes(spec):
            tensor = info.weights.tensor(*key)
            stored = info.format == "safetensors"  # GGUF files name and arrange tensors differently
            self._names[key] = tensor.name if stored else ".".join(["layers", str(key[0]), key[1]][2 * (key[0] is None) :])
            _place(self, self._names[key], nn.Parameter(torch.from_numpy(tensor.float32().copy())))

    def _row_rule(self) -> RowRule:
        """The row rule of a server on this machine: with how many rows it calls matrix products."""
        place = StageDevice(CPU, self._exact_ops)
        model = Transformer(self.spec, self._weights, dtype=torch.float32, stage_devices=[place], max_context=512)
        sizes = StateSizes(pages=(64,) * len(self.spec.windows), page_size=PAGE, windows=self.spec.windows, lanes=4)
        layout = InputLayout(PAGE, sizes.pages, strictest([place.rule]), self.spec.windows)
        return self_check(model, model.states(sizes), layout=layout).rule

    def forward(self, sequences: Sequence[Sequence[int]] | Tensor) -> list[Tensor]:
        """The logits of each sequence of token ids, [tokens, vocabulary]. A tensor is [sequences, tokens]."""
        rows = [[int(token) for token in sequence] for sequence in sequences]
        if not rows or not all(rows):
            raise BadParameter("sequences", "must be sequences of at least one token id")
        if any(not 0 <= token < self.spec.vocab for row in rows for token in row):
            raise BadParameter("sequences", f"has a token id outside the vocabulary of {self.spec.vocab}")
        inputs, state, spans = self._lay_out(rows)
        spec = self.spec
        loader = ParameterLoader(self._weights, self.weights(), self._ops, spec)
        ropes = rope_tables(spec.layers, max(map(len, rows)) + LANE, dtype=torch.float32, device=CPU)
        prepared = PreparedAttention(self._exact_ops, inputs, ropes, spans)
        table = loader.kept(None, "embed", pad=LANE)
        x = table.index_select(0, inputs.tokens)
        x = x if spec.embed_scale == 1 else x * spec.embed_scale
        for index, layer_spec in enumerate(spec.layers):
            layer = load_layer(index, layer_spec, loader, self._ops, spec.eps)
            x = run_layer(x, layer, ops=self._ops, store=state.stores[index], prepared=prepared, eps=spec.eps)
        hidden = self._ops.rms_norm(x, loader.norm(None, "norm"), spec.eps)
        head = self._ops.linear(table if spec.tied else loader.kept(None, "head", pad=LANE))
        head.rule = self._rule
        logits = head(hidden)[:, : spec.vocab]
        return [logits[first:stop] for first, stop in spans]

    def weights(self) -> dict[WeightKey, nn.Parameter]:
        """The parameters by layer and weight, as `models/spec.py` names them."""
        parameters = dict(self.named_parameters())
        return {key: parameters[name] for key, name in self._names.items()}

    def logprobs(self, prompt: Sequence[int], reply: Sequence[int]) -> Tensor:
        """The logprobs of a reply's tokens after a prompt, [tokens of the reply], differentiable. With the parameters of a server
        they have the bits of its `logprobs`."""
        return self.batch_logprobs([(prompt, reply)])[0]

    def batch_logprobs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        """The `logprobs` of several pairs of prompt and reply, in one pass."""
        if not all(prompt and reply for prompt, reply in pairs):
            raise BadParameter("reply", "prompt and reply need at least one token each")
        found = self([[*prompt, *reply[:-1]] for prompt, reply in pairs])
        sampler = self._exact_ops.sampler(vocab=self.spec.vocab, lanes=1, device=CPU)
        values = []
        for (prompt, reply), logits in zip(pairs, found, strict=True):
            part = logits[len(prompt) - 1 :]
            ids = torch.tensor([int(token) for token in reply])
            plain = part.log_softmax(-1).gather(1, ids[:, None])[:, 0]
            scored = sampler.score(part.detach().contiguous(), ids.tolist(), 0)
            exact = torch.tensor([one.logprob for one in scored], dtype=torch.float64)
            values.append(_exact(plain.double(), exact))
        return values

    def _lay_out(self, rows: Sequence[Sequence[int]]) -> tuple[Inputs, ModelState, list[tuple[int, int]]]:
        """The inputs of one step that computes all sequences from their beginning, and empty pages for it."""
        counts = [-(-len(row) // PAGE) for row in rows]
        spec, groups = self.spec, len(self.spec.windows)
        sizes = StateSizes(pages=(sum(counts),) * groups, page_size=PAGE, windows=spec.windows, lanes=len(rows))
        layout = InputLayout(PAGE, sizes.pages, self._rule, spec.windows)
        planned, spans, page, first = [], [], 0, 0
        for lane, (row, count) in enumerate(zip(rows, counts, strict=True)):
            planned.append(
                Row(
                    request_id=f"{lane}",
                    lane=lane,
                    pages=(tuple(range(page, page + count)),) * groups,
                    start=0,
                    tokens=tuple(row),
                    drafts=(),
                    prompt_stop=len(row),
                    samples=False,
                    params=SamplingParams(),
                    history=History(tuple(row)),
                )
            )
            spans.append((first, first + len(row)))
            page, first = page + count, first + len(row)
        inputs = make_inputs(Plan(tuple(planned)), layout=layout, device=CPU)
        return inputs, ModelState(spec.layers, sizes, dtype=torch.float32, device=CPU), spans


def _place(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Add a parameter under a name with dots, as a module of modules, so that `named_parameters` gives the same name."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)
