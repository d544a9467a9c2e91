"""Measure the kernels of decode steps on a GPU and compare them with the memory bandwidth. Weights are random.

    python -m bench.gpu_decode [SECTION ...] [--json out.json]

Each function of SECTIONS is one section. A figure is the median device time of CUDA graph replays, or of whole steps with the
copies from and to the host where its name says "host to host".
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measuring import capture, device_ms, replay_ms, report, write_figures
from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.ops.cuda import delta_chunked, delta_recurrent
from onedraw.backends.torch.ops.cuda.attention import attend
from onedraw.backends.torch.ops.cuda.attention_inputs import (
    AttentionShape,
    device_attention_inputs,
    host_attention_inputs,
    stage_attention_inputs,
)
from onedraw.backends.torch.ops.cuda.delta import DeltaQkv, DraftIncrements, conv_and_gates, gated_norm
from onedraw.backends.torch.ops.cuda.delta_chunked import chunked_delta
from onedraw.backends.torch.ops.cuda.delta_inputs import DeltaTables, run_paths
from onedraw.backends.torch.ops.cuda.norm import apply_gate
from onedraw.backends.torch.ops.cuda.ops import TritonAttentionInputs, TritonLinear, TritonOps
from onedraw.backends.torch.ops.cuda.sampler import TritonSampler
from onedraw.backends.torch.ops.cuda.sampling_kernels import SamplingTable, sample_tokens
from onedraw.backends.torch.ops.plain.elementwise import rope_table
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.runner.inputs import InputLayout, Inputs, Span, lay_out
from onedraw.backends.torch.sampling.exact import padded
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.backends.torch.state.recurrent_state import recurrent_spans
from onedraw.models.spec import AttentionSpec, RopeSpec
from onedraw.sampling.noise import key
from onedraw.types import Draft, History, SamplingParams

DEVICE = torch.device("cuda:0")
DTYPE = torch.bfloat16
PAGE = 16
PART, PARTS = 0, 1  # run this share of the variants of `chunks`
SMALL = False  # use few layers, to fill the compile cache


def normal(*shape: int, spread: float = 1.0) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE) * spread


# ------------------------------------------------------------------ models with random weights


@dataclass(frozen=True)
class DenseShape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    width: int
    vocab: int

    @property
    def matrix_bytes(self) -> int:
        per = (self.heads + 2 * self.kv_heads) * self.dim * self.hidden + self.heads * self.dim * self.hidden
        per += 3 * self.width * self.hidden
        return 2 * (self.layers * per + self.vocab * self.hidden)


LLAMA_8B = DenseShape(layers=32, hidden=4096, heads=32, kv_heads=8, dim=128, width=14336, vocab=128256)


class DenseModel:
    """A Llama-like model whose layers call the GPU operations directly, without the backend."""

    def __init__(self, shape: DenseShape, ops: TritonOps, *, positions: int, pages: int) -> None:
        self.shape, self.ops = shape, ops
        self.mixer = AttentionSpec(shape.heads, shape.kv_heads, shape.dim, RopeSpec(5e5, shape.dim), scale=shape.dim**-0.5)
        self.rope = rope_table(self.mixer.rope, positions, dtype=DTYPE, device=DEVICE)
        self.pages = pages
        hidden, inner = shape.hidden, shape.heads * shape.dim
        self.embedding = normal(shape.vocab, hidden, spread=0.5)
        self.head = ops.linear(normal(shape.vocab, hidden, spread=2 * hidden**-0.5))
        self.norms = 1 + 0.1 * normal(2 * shape.layers + 1, hidden)
        self.layers: list[tuple[TritonLinear, TritonLinear, TritonLinear, TritonLinear]] = []
        for _ in range(shape.layers):
            self.layers.append(
                (
                    ops.linear(normal(inner + 2 * shape.kv_heads * shape.dim, hidden, spread=hidden**-0.5)),
                    ops.linear(normal(hidden, inner, spread=inner**-0.5)),
                    ops.linear(normal(2 * shape.width, hidden, spread=hidden**-0.5)),
                    ops.linear(normal(hidden, shape.width, spread=shape.width**-0.5)),
                )
            )
        self.stores = [
            PageStore(self.mixer, pages=pages, page_size=PAGE, dtype=DTYPE, device=DEVICE) for _ in range(shape.layers)
        ]

    def inputs(self, rows: list[tuple[int, int, tuple[Draft, ...]]]) -> Inputs:
        """Return the inputs of a step with rows of (start, number of tokens with drafts, drafts)."""
        spans: list[Span] = []
        tables: list[list[int]] = []
        first = page = 0
        for start, count, drafts in rows:
            need = -(-(start + count + 1) // 256) * 16
            held = sum(len(span.drafts) for span in spans)
            spans.append(Span(first, count, start, drafts, lane=len(spans), held=held))
            tables.append(list(range(page, page + need)))
            first, page = first + count, page + need
        assert page <= self.pages, (page, self.pages)
        return lay_out(
            [7] * first,
            spans,
            [(table,) for table in tables],
            layout=InputLayout(PAGE, (self.pages,), RowRule(floor=1)),
            device=DEVICE,
        )

    def hidden(self, tokens: Tensor, prepared: TritonAttentionInputs) -> Tensor:
        ops, eps = self.ops, 1e-5
        x = self.embedding.index_select(0, tokens)
        for index, (qkv, out, gate_up, down) in enumerate(self.layers):
            mixed = prepared.attend(
                qkv(ops.rms_norm(x, self.norms[2 * index], eps)),
                spec=self.mixer,
                store=self.stores[index],
                q_norm=None,
                k_norm=None,
                eps=eps,
            )
            x = out(mixed, x)
            x = down(ops.gated(gate_up(ops.rms_norm(x, self.norms[2 * index + 1], eps)), "silu"), x)
        return ops.rms_norm(x, self.norms[-1], eps)

    def logits(self, tokens: Tensor, prepared: TritonAttentionInputs) -> Tensor:
        return self.head(self.hidden(tokens, prepared))


@dataclass(frozen=True)
class HybridShape:
    vocab: int = 248_320


class HybridModel:
    """A model of the Qwen3.6-27B shape: three Gated DeltaNet layers, then one attention layer, repeated."""

    hidden, width, heads, kv_heads, dim = 5120, 17408, 24, 4, 256
    key_heads, value_heads, state_dim, taps = 16, 48, 128, 4

    def __init__(self, ops: TritonOps, *, positions: int, pages: int, layers: int = 64) -> None:
        self.ops, self.pages, self.shape = ops, pages, HybridShape()
        self.mixer = AttentionSpec(self.heads, self.kv_heads, self.dim, RopeSpec(1e7, 64), scale=self.dim**-0.5, qk_norm=True)
        self.rope = rope_table(self.mixer.rope, positions, dtype=DTYPE, device=DEVICE)
        self.channels = 2 * self.key_heads * self.state_dim + self.value_heads * self.state_dim
        inner = self.value_heads * self.state_dim
        self.delta_width = self.channels + inner + 2 * self.value_heads
        hidden, attended = self.hidden, self.heads * self.dim
        self.embedding = normal(self.shape.vocab, hidden, spread=0.5)
        self.head = self._product(self.shape.vocab, hidden)
        self.norms = 1 + 0.1 * normal(2 * layers + 1, hidden)
        self.head_norm = 1 + 0.1 * normal(self.dim)
        self.conv, self.decay = 0.5 * torch.randn(4, self.channels, device=DEVICE), -torch.rand(48, device=DEVICE)
        self.bias, self.norm = torch.randn(48, device=DEVICE), torch.ones(128, device=DEVICE)
        self.layers = []
        for index in range(layers):
            into = 2 * attended + 2 * self.kv_heads * self.dim if index % 4 == 3 else self.delta_width
            out = attended if index % 4 == 3 else inner
            self.layers.append(
                (
                    self._product(into, hidden),
                    self._product(hidden, out),
                    self._product(2 * self.width, hidden),
                    self._product(hidden, self.width),
                )
            )
        self.stores = [PageStore(self.mixer, pages=pages, page_size=PAGE, dtype=DTYPE, device=DEVICE) for _ in range(layers // 4)]
        lanes = 32
        self.states = [torch.zeros(lanes, 48, 128, 128, device=DEVICE) for _ in range(layers)]
        self.windows = torch.zeros(lanes, 3, self.channels, device=DEVICE)
        draft_slots = 64
        self.held = [torch.zeros(draft_slots, *shape, device=DEVICE) for shape in ((48,), (16, 128), (48, 128), (self.channels,))]
        self.plan: DeltaTables | None = None

    def _product(self, n: int, k: int) -> TritonLinear:
        return self.ops.linear(normal(n, k, spread=k**-0.5))

    @property
    def matrix_bytes(self) -> int:
        products = [product for layer in self.layers for product in layer]
        return sum(2 * p.out_features * p.in_features for p in [*products, self.head])

    def inputs(self, rows: list[tuple[int, int, tuple[Draft, ...]]]) -> Inputs:
        found = DenseModel.inputs(self, rows)  # type: ignore[arg-type]
        self.plan = self.step_plan(found)
        return found

    def step_plan(self, inputs: Inputs) -> DeltaTables:
        return DeltaTables(recurrent_spans(inputs, conv=self.taps), staging=inputs.staging)

    def mix(self, projected: Tensor, index: int, plan: DeltaTables) -> Tensor:
        drafts = None if plan.draft_slots is None else DraftIncrements(plan.draft_slots, *self.held)
        qkv = self._gate(projected, plan.taps, drafts)
        out = torch.empty(len(projected), 48, 128, device=DEVICE)
        run_paths(qkv, self.states[index], out, plan.paths, drafts=drafts, pdl=True)
        window_update: dict[str, Any] = {"windows": self.windows, "sources": plan.window_sources}
        return gated_norm(out, projected, self.norm, 1e-6, channels=self.channels, pdl=True, **window_update)

    def mix_prompt(self, projected: Tensor, *, only_gates: bool = False) -> Tensor:
        count = len(projected)
        taps = torch.arange(count, device=DEVICE)[:, None] + torch.arange(-3, 1, device=DEVICE)
        qkv = self._gate(projected, taps.clamp(min=-1).to(torch.int32))
        out = torch.empty(count, 48, 128, device=DEVICE)
        chunks = torch.tensor([[i, 64] for i in range(0, count, 64)], dtype=torch.int32, device=DEVICE)
        spans = torch.tensor([[0, 0, len(chunks), 1]], dtype=torch.int32, device=DEVICE)
        save_slots = torch.full((len(chunks),), -1, dtype=torch.int32, device=DEVICE)
        if not only_gates:
            chunked_delta(qkv, self.states[0], self.states[0], out, chunks=chunks, spans=spans, save_slots=save_slots)
        return gated_norm(out, projected, self.norm, 1e-6, channels=self.channels, pdl=True)

    def _gate(self, projected: Tensor, taps: Tensor, drafts: DraftIncrements | None = None) -> DeltaQkv:
        return conv_and_gates(
            projected, self.windows, taps, conv=self.conv, decay=self.decay, bias=self.bias, key_heads=16, value_heads=48,
            key_dim=128, value_dim=128, drafts=drafts, pdl=True,
        )  # fmt: skip

    def logits(self, tokens: Tensor, prepared: TritonAttentionInputs) -> Tensor:
        ops, eps, attended = self.ops, 1e-6, self.heads * self.dim
        x = self.embedding.index_select(0, tokens)
        for index, (into, out, gate_up, down) in enumerate(self.layers):
            wide = into(ops.rms_norm(x, self.norms[2 * index], eps))
            if index % 4 == 3:
                mixed = prepared.attend(
                    wide, spec=self.mixer, store=self.stores[index // 4], q_norm=self.head_norm,
                    k_norm=self.head_norm, eps=eps,
                )  # fmt: skip
                mixed = apply_gate(mixed, wide[:, -attended:], "sigmoid", pdl=True)
            else:
                assert self.plan is not None
                mixed = self.mix(wide, index, self.plan)
            x = out(mixed, x)
            x = down(ops.gated(gate_up(ops.rms_norm(x, self.norms[2 * index + 1], eps)), "silu"), x)
        return self.head(ops.rms_norm(x, self.norms[-1], eps))


class CapturedForward:
    """A CUDA graph of one step, with sampling if `params` is given. Attention metadata and the sampling table are its inputs."""

    def __init__(self, model: DenseModel | HybridModel, inputs: Inputs, params: SamplingParams | None = None) -> None:
        host = host_attention_inputs(inputs, model.ops.heads(model.mixer))
        self.metadata, self.layout = torch.from_numpy(host.words).to(DEVICE), host.layout
        self.tokens = inputs.tokens.clone()
        self.prepared = TritonAttentionInputs(model.rope, device_attention_inputs(self.metadata, host.layout), pdl=model.ops._pdl)
        self.table: SamplingTable | None = None
        if params is not None:
            history = History((1, 2, 3), [])
            count = len(inputs.host_tokens)
            positions = [SamplingPosition(i, replace(params, seed=i), history, (), str(i)) for i in range(count)]
            sampler = TritonSampler(vocab=model.shape.vocab, lanes=count, device=DEVICE)
            self.table = sampler.sampling_table(positions)
        self.graph = capture(partial(self._work, model))

    def _work(self, model: DenseModel | HybridModel) -> None:
        self.logits = model.logits(self.tokens, self.prepared)
        if self.table is not None:
            vocab = model.shape.vocab
            sampled, _ = sample_tokens(self.logits, self.table, vocab=vocab, width=padded(vocab), pdl=True)
            self.tokens.copy_(sampled.tokens.clamp_(min=0))


SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


# ------------------------------------------------------------------ sections


def ceilings() -> None:
    """Measure the copy bandwidth and the speed of a large matrix product: the limits that other figures are compared with."""
    source = torch.empty(2**32, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    copy = device_ms(lambda: target.copy_(source))
    report("copy bandwidth, read and written, TB/s", 2 * source.nbytes / copy / 1e9)
    a, b = normal(8192, 8192), normal(8192, 8192)
    report("8192^3 bf16 product, TFLOP/s", 2 * 8192**3 / device_ms(lambda: a @ b) / 1e9)


# Output and input widths of the matrices of the two models.
MATRICES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
MATRICES += [(16480, 5120), (14336, 5120), (5120, 6144), (34816, 5120), (5120, 17408), (248320, 5120)]


CHAIN = tuple(Draft(1, i - 1) for i in range(15))
TREE = tuple(Draft(1, -1 if i < 4 else (i - 4) // 2) for i in range(21))
CASES: dict[str, list[tuple[int, int, tuple[Draft, ...]]]] = {
    "1 row at 200": [(200, 1, ())],
    "1 row at 1K": [(1000, 1, ())],
    "16-row verify at 1K": [(1000, 16, CHAIN)],
    "tree of 22 at 1K": [(1000, 22, TREE)],
    "8 rows at 1K": [(1000 + 3 * i, 1, ()) for i in range(8)],
    "32 rows at 1K": [(1000 + 3 * i, 1, ()) for i in range(32)],
    "1 row at 24K": [(24_000, 1, ())],
    "16-row verify at 24K": [(24_000, 16, CHAIN)],
    "tree of 22 at 24K": [(24_000, 22, TREE)],
    "1 row at 128K": [(131_000, 1, ())],
}


def decode() -> None:
    """Time captured steps of the 8B shape and compare them with the time to read their bytes."""
    shape = replace(LLAMA_8B, layers=4) if SMALL else LLAMA_8B
    model = DenseModel(shape, TritonOps(DEVICE, pdl=True), positions=140_000, pages=10_000)
    report(
        "uses the library kernel, by shape",
        {f"{x.out_features}x{x.in_features}": x.library_rows for x in [*model.layers[0], model.head]},
    )
    _time_steps("8B", model, LLAMA_8B.matrix_bytes, 2 * 8 * 128 * 2 * 32)
    _time_steps_with_host(model)


def _time_steps(name: str, model: DenseModel | HybridModel, weights: int, per_position: int) -> None:
    for case, rows in CASES.items():
        inputs = model.inputs(rows)
        read = weights + per_position * sum(start + count for start, count, _ in rows)
        ms = device_ms(CapturedForward(model, inputs).graph.replay)
        report(f"{name} step, {case}, ms (bytes at 4.2 TB/s: {read / 4.2e9:.2f})", ms)
        sampled = device_ms(CapturedForward(model, inputs, SAMPLED).graph.replay)
        report(f"{name} step, {case}, with sampling (T 0.8, top-p .95), ms", sampled)


def _time_steps_with_host(model: DenseModel) -> None:
    """Time decode steps with the host: copy the metadata and the random keys in, replay the graph, copy the tokens out."""
    for rows in (1, 8, 32):
        step = CapturedForward(model, model.inputs([(960, 1, ())] * rows), SAMPLED)
        assert step.table is not None
        prepared = []
        for index in range(60):  # a server prepares these inputs while the previous step runs
            host = host_attention_inputs(model.inputs([(960 + index, 1, ())] * rows), model.ops.heads(model.mixer))
            assert host.layout == step.layout
            table = step.table.rows.cpu()
            table[:, 7:9] = torch.tensor([key(i, 961 + index) for i in range(rows)])
            prepared.append((torch.from_numpy(host.words).pin_memory(), table.pin_memory()))
        back = torch.empty(rows, dtype=torch.int64).pin_memory()
        times = []
        for words, table in prepared:
            begin = time.perf_counter()
            step.metadata.copy_(words, non_blocking=True)
            step.table.rows.copy_(table, non_blocking=True)
            step.graph.replay()
            back.copy_(step.tokens, non_blocking=True)
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - begin))
        ms = statistics.median(times[10:])
        report(f"8B, {rows} rows at about 1K, sampled, host to host, ms", ms)
        report(f"8B, {rows} rows at about 1K, sampled, host to host, tok/s", 1000 * rows / ms)


def hybrid() -> None:
    """Time captured steps of the 27B shape with Gated DeltaNet layers. The recurrent states of drafts are not committed."""
    model = HybridModel(TritonOps(DEVICE, pdl=True), positions=140_000, pages=10_000, layers=4 if SMALL else 64)
    _time_steps("27B", model, model.matrix_bytes, 2 * 4 * 256 * 2 * 16)


DELTA_CASES: dict[str, list[tuple[int, int, tuple[Draft, ...]]]] = {
    "1": [(100, 1, ())],
    "16 in one row": [(100, 16, CHAIN)],
    "tree of 22": [(100, 22, TREE)],
    "8 rows": [(100, 1, ())] * 8,
    "32 rows": [(100, 1, ())] * 32,
}


def delta() -> None:
    """Time the Gated DeltaNet kernels of one 27B layer."""
    model = HybridModel(TritonOps(DEVICE), positions=4096, pages=800, layers=4)
    for case, rows in DELTA_CASES.items():
        plan = model.step_plan(model.inputs(rows))
        projected = normal(sum(count for _, count, _ in rows), model.delta_width)
        report(f"27B delta layer, {case}, us", 1000 * replay_ms(partial(_mix_all, model, projected, plan)) / 12)
    for count in (2048, 8192):
        projected = normal(count, model.delta_width)
        report(f"27B delta layer, prompt of {count}, ms", device_ms(partial(model.mix_prompt, projected), repeats=5))


def _mix_all(model: HybridModel, projected: Tensor, plan: DeltaTables) -> None:
    """Run the kernels 12 times on the states of four layers, so that no state stays in the GPU cache."""
    for index in range(12):
        model.mix(projected, index % 4, plan)


def recurrent_tiles() -> None:
    """Time the recurrent kernel with different numbers of state columns per warp."""
    model = HybridModel(TritonOps(DEVICE), positions=4096, pages=800, layers=4)
    for columns in (16, 32):
        delta_recurrent.COLUMNS = delta_recurrent.MANY_COLUMNS = columns
        for case, rows in DELTA_CASES.items():
            plan = model.step_plan(model.inputs(rows))
            projected = normal(sum(count for _, count, _ in rows), model.delta_width)
            us = 1000 * replay_ms(partial(_mix_all, model, projected, plan)) / 12
            report(f"27B delta layer, {columns} columns, {case}, us", us)


def inexact() -> None:
    """Compare the 8B step with library kernels that are not batch-invariant: cuBLAS products and attention on dense keys."""
    shape = replace(LLAMA_8B, layers=4) if SMALL else LLAMA_8B
    model = DenseModel(shape, TritonOps(DEVICE, pdl=True), positions=30_000, pages=3400)
    weights = [[product._weight for product in layer] for layer in model.layers]
    scale = LLAMA_8B.layers / shape.layers
    for case in ("1 row at 1K", "8 rows at 1K", "32 rows at 1K", "16-row verify at 1K", "1 row at 24K", "16-row verify at 24K"):
        rows = CASES[case]
        inputs = model.inputs(rows)
        prepared = model.ops.prepare_attention(inputs, model.mixer, model.rope)
        count = rows[0][1]
        keys = [normal(len(rows), 8, rows[0][0] + count, 128) for _ in range(2)]
        found = []
        for products, attention in ((False, False), (True, False), (True, True)):
            work = partial(_library_step, model, weights, inputs.tokens, prepared, keys if attention else None, products, count)
            found.append(round(scale * replay_ms(work, repeats=10), 3))
        report(f"8B step without sampling, {case}, ms: onedraw, cuBLAS products, cuBLAS and library attention", found)


def _library_step(
    model: DenseModel,
    weights: list[list[Tensor]],
    tokens: Tensor,
    prepared: TritonAttentionInputs,
    dense: list[Tensor] | None,
    library: bool,
    count: int,
) -> Tensor:
    ops, eps, spec = model.ops, 1e-5, model.mixer
    x = model.embedding.index_select(0, tokens)

    def product(layer: int, which: int, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if not library:
            return model.layers[layer][which](x, residual)
        y = x @ weights[layer][which].t()
        return y if residual is None else y + residual

    for index in range(len(model.layers)):
        wide = product(index, 0, ops.rms_norm(x, model.norms[2 * index], eps))
        settings: dict[str, Any] = {"spec": spec, "store": model.stores[index], "q_norm": None, "k_norm": None, "eps": eps}
        if dense is None:
            mixed = prepared.attend(wide, **settings)
        else:
            q = prepared.rotated_queries(wide, **settings, heads=spec.heads)
            q = q.view(-1, count, spec.heads, spec.head_dim).transpose(1, 2)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, dense[0], dense[1], enable_gqa=True)
            mixed = mixed.transpose(1, 2).reshape(len(x), -1)
        x = product(index, 1, mixed, x)
        hidden = ops.gated(product(index, 2, ops.rms_norm(x, model.norms[2 * index + 1], eps)), "silu")
        x = product(index, 3, hidden, x)
    return model.head(ops.rms_norm(x, model.norms[-1], eps))


def parts() -> None:
    """Measure what each kind of kernel adds to a decode step, per layer of the 8B shape."""
    for pdl in (False, True):
        model = DenseModel(replace(LLAMA_8B, layers=12), TritonOps(DEVICE, pdl=pdl), positions=4096, pages=200)
        for at in (200, 1000):
            inputs = model.inputs([(at, 1, ())])
            prepared = model.ops.prepare_attention(inputs, model.mixer, model.rope)
            for level in range(4):
                ms = replay_ms(partial(_partial_step, model, inputs.tokens, prepared, level), repeats=10)
                kernels = ("products", "+ norms and gates", "+ rope and pages", "+ attention")[level]
                report(f"per layer at {at}, {kernels}, pdl {pdl}, us", round(1000 * ms / 12, 2))


def _partial_step(model: DenseModel, tokens: Tensor, prepared: TritonAttentionInputs, level: int) -> Tensor:
    ops, eps, spec = model.ops, 1e-5, model.mixer
    x = model.embedding.index_select(0, tokens)
    for index, (qkv, out, gate_up, down) in enumerate(model.layers):
        wide = qkv(ops.rms_norm(x, model.norms[2 * index], eps) if level >= 1 else x)
        settings: dict[str, Any] = {"spec": spec, "store": model.stores[index], "q_norm": None, "k_norm": None, "eps": eps}
        if level >= 3:
            mixed = prepared.attend(wide, **settings)
        elif level == 2:
            mixed = prepared.rotated_queries(wide, **settings, heads=spec.heads)
        else:
            mixed = wide[:, : spec.heads * spec.head_dim]
        x = out(mixed, x)
        y = ops.rms_norm(x, model.norms[2 * index + 1], eps) if level >= 1 else x
        y = gate_up(y)
        x = down(ops.gated(y, "silu") if level >= 1 else y[:, : model.shape.width], x)
    return x


def prefill() -> None:
    """Time prompts of the 8B shape, with library products where these give equal bits and with Triton products alone."""
    shape = replace(LLAMA_8B, layers=2) if SMALL else LLAMA_8B
    model = DenseModel(shape, TritonOps(DEVICE), positions=20_000, pages=1300)
    for count in (2048, 8192):
        inputs = model.inputs([(0, count, ())])
        prepared = model.ops.prepare_attention(inputs, model.mixer, model.rope)
        for use_library in (True, False):
            replaced: dict[TritonLinear, tuple[int, ...]] = {}
            if not use_library:
                for layer in model.layers:
                    for product in layer:
                        replaced[product], product.library_rows = product.library_rows, ()
            ms = device_ms(lambda i=inputs, p=prepared: model.hidden(i.tokens, p), repeats=5)  # type: ignore[misc]
            for product, value in replaced.items():
                product.library_rows = value
            flops = 2 * count * (shape.matrix_bytes / 2 - shape.vocab * shape.hidden)
            flops += 2 * 2 * count * count / 2 * shape.heads * shape.dim * shape.layers
            name = f"8B prefill of {count}, {'library where equal' if use_library else 'Triton alone'}"
            report(name + ", ms", ms)
            report(name + ", TFLOP/s", flops / ms / 1e9)


def sampler() -> None:
    """Time the sampler: captured kernels, kernels with host time, and the plain PyTorch sampler."""
    for rows, vocab in ((1, 128_256), (16, 128_256), (64, 128_256), (32, 248_320)):
        logits = normal(rows, vocab, spread=3.0)
        history = History(tuple(range(100)), list(range(50)))
        settings = {
            "T 0.8, top-p .95": SamplingParams(temperature=0.8, top_p=0.95, seed=5),
            "T 1, penalties": SamplingParams(frequency_penalty=0.3, repetition_penalty=1.1, seed=5),
            "T 0.8, top-k 40, top-p .95": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=5),
            "greedy": SamplingParams(temperature=0.0),
        }
        for name, params in settings.items():
            positions = [SamplingPosition(i, replace(params, seed=i), history, (), str(i)) for i in range(rows)]
            kernels = TritonSampler(vocab=vocab, lanes=rows, device=DEVICE)
            plain = Sampler(vocab=vocab, lanes=rows, device=DEVICE)
            table = kernels.sampling_table(positions)
            work = partial(sample_tokens, logits, table, vocab=vocab, width=padded(vocab), pdl=True)
            report(f"sampling {rows} x {vocab}, {name}, captured, ms", replay_ms(work, repeats=10))
            report(f"sampling {rows} x {vocab}, {name}, with the host, ms", _wall_ms(partial(kernels.sample, logits, positions)))
            wide = logits.float()
            report(f"sampling {rows} x {vocab}, {name}, plain sampler, ms", _wall_ms(partial(plain.sample, wide, positions)))


def sampling() -> None:
    """Time the captured sampler by number of rows, at T 0.8 and top-p .95, on flat and on peaked logits."""
    params = SamplingParams(temperature=0.8, top_p=0.95)
    for vocab in (248_320, 128_256):
        for spread in (1.0, 3.0):
            line = []
            for rows in (1, 8, 16, 24, 32):
                logits = normal(rows, vocab, spread=spread)
                positions = [SamplingPosition(i, replace(params, seed=i), History((1,), []), (), str(i)) for i in range(rows)]
                table = TritonSampler(vocab=vocab, lanes=rows, device=DEVICE).sampling_table(positions)
                work = partial(sample_tokens, logits, table, vocab=vocab, width=padded(vocab), pdl=True)
                line.append(round(1000 * replay_ms(work, repeats=10, calls=4), 1))
            report(f"sampling from {vocab}, logits spread {spread}, us: 1, 8, 16, 24, 32 rows", line)


def _wall_ms(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def attention() -> None:
    """Time the attention of one layer for prompts and for long contexts."""
    for heads, kv, dim in ((32, 8, 128), (24, 4, 256)):
        for start, count in ((1000, 1), (24_000, 1), (24_000, 16), (131_000, 1), (131_000, 16), (0, 8192)):
            launch, stores = _attention_launch(heads, kv, dim, start, count)
            floor = 2 * (start + count) * kv * dim * 2 / 4.2e12 * 1e6
            us = 500 * replay_ms(partial(_run_on_all, launch, stores), repeats=5)
            report(f"attention {heads}/{kv} x {dim}, {count} at {start}, us (bytes at 4.2 TB/s: {floor:.1f})", us)


def chunks() -> None:
    """Time the chunked Gated DeltaNet kernel with different numbers of state columns and warps per program."""
    model = HybridModel(TritonOps(DEVICE), positions=4096, pages=400, layers=1)
    projected = normal(8192, model.delta_width)
    for columns, warps in ((32, 8), (32, 4), (64, 8), (64, 4), (16, 4))[PART::PARTS]:
        delta_chunked.CHUNK_COLUMNS, delta_chunked.CHUNK_WARPS = columns, warps
        ms = device_ms(partial(model.mix_prompt, projected), repeats=5)
        report(f"27B delta layer, prompt of 8192, {columns} columns, {warps} warps, ms", ms)
    report("27B delta layer, gates alone, ms", device_ms(partial(model.mix_prompt, projected, only_gates=True), repeats=5))


@lru_cache(maxsize=2)
def _stores(heads: int, kv: int, dim: int) -> list[PageStore]:
    spec = AttentionSpec(heads, kv, dim, RopeSpec(1e6, dim), scale=dim**-0.5)
    stores = [PageStore(spec, pages=8300, page_size=PAGE, dtype=DTYPE, device=DEVICE) for _ in range(2)]
    for store in stores:
        store.keys.normal_()
        store.values.normal_()
    return stores


def _attention_launch(heads: int, kv: int, dim: int, start: int, count: int) -> tuple[Callable[..., Any], list[PageStore]]:
    layout = InputLayout(PAGE, (8300,), RowRule(floor=1))
    inputs = lay_out([0] * count, [Span(0, count, start)], [(list(range(8300)),)], layout=layout, device=DEVICE)
    device = stage_attention_inputs(inputs, AttentionShape(heads, kv, dim, None, 264))
    q = normal(count, heads * dim)
    launch = partial(
        attend, q, metadata=device.metadata, tile_sets=list(device.tile_sets), heads=heads, kv_heads=kv, dim=dim, scale=dim**-0.5
    )
    return launch, _stores(heads, kv, dim)


def peer() -> None:
    """Time sampled decoding of transformers with random weights of the 8B shape."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # type: ignore[import-not-found, unused-ignore]

    shape = LLAMA_8B
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.width, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, max_position_embeddings=8192,
    )  # fmt: skip
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()  # type: ignore[no-untyped-call, unused-ignore]
    for rows in (1, 8):
        prompt = torch.randint(0, shape.vocab, (rows, 1000), device=DEVICE)
        mask = torch.ones_like(prompt)
        times = {}
        for new in (4, 36):
            settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
            for _ in range(2):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                model.generate(prompt, attention_mask=mask, pad_token_id=0, **settings)
                torch.cuda.synchronize()
                times[new] = time.perf_counter() - begin
        report(f"transformers, 8B, {rows} rows at 1K, sampled, tok/s", rows * 32 / (times[36] - times[4]))


def _run_on_all(launch: Callable[[Tensor, Tensor], Any], stores: list[PageStore]) -> None:
    for store in stores:
        launch(store.keys, store.values)


def _logits(model: DenseModel, text: Tensor, cuts: list[int], drafts: tuple[Draft, ...] = (), other_rows: int = 0) -> Tensor:
    """Return the logits of every position. The text is cut into rows that run in one step each, beside rows of other requests."""
    found = []
    for start, stop in itertools.pairwise(cuts):
        rows = [(start, stop - start, drafts if stop - start == 16 else ())]
        rows += [(40 + 31 * i, 1 + i % 3, ()) for i in range(other_rows)]
        inputs = model.inputs(rows)
        tokens = inputs.tokens.clone()
        tokens[: stop - start] = text[start:stop]
        prepared = model.ops.prepare_attention(inputs, model.mixer, model.rope)
        found.append(model.logits(tokens, prepared)[: stop - start])
    return torch.cat(found)


def exact() -> None:
    """Compare the logits of a text computed as one chunk with other chunks, single tokens, verify rows, and larger batches."""
    for pdl in (False, True):
        shape = replace(LLAMA_8B, layers=4)
        model = DenseModel(shape, TritonOps(DEVICE, pdl=pdl), positions=4096, pages=2000)
        length = 1100
        text = torch.randint(0, shape.vocab, (length,), device=DEVICE)
        chain = tuple(Draft(1, i - 1) for i in range(15))

        logits = partial(_logits, model, text)
        whole = logits([0, length])
        variants = {
            "other chunks": logits([0, 1, 64, 301, 1000, length]),
            "token by token from 1000": torch.cat([whole[:1000], logits([0, *range(1000, length + 1)])[1000:]]),
            "rows of 16 from 1004": logits([0, *range(1004, length + 1, 16)], chain),
            "in a batch with 31 other rows": logits([0, 500, length], other_rows=31),
            "token by token with 5 other rows": logits([0, *range(1050, length + 1)], other_rows=5),
        }
        for name, found in variants.items():
            report(f"exact: {name}{', pdl' if pdl else ''}, positions that differ", int((found != whole).any(1).sum()))


SECTIONS: dict[str, Callable[[], None]] = {
    "exact": exact,
    "ceilings": ceilings,
    "parts": parts,
    "attention": attention,
    "sampler": sampler,
    "sampling": sampling,
    "delta": delta,
    "recurrent_tiles": recurrent_tiles,
    "inexact": inexact,
    "chunks": chunks,
    "decode": decode,
    "hybrid": hybrid,
    "prefill": prefill,
    "peer": peer,
}
ALIASES = {"choosing": "sampling", "step_tiles": "recurrent_tiles"}  # earlier names of sections


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), choices=[*SECTIONS, *ALIASES], metavar="SECTION")
    parser.add_argument("--json")
    parser.add_argument("--small", action="store_true", help="use few layers, to fill the compile cache")
    parser.add_argument("--part", default="0/1", help="share of the variants of `chunks` to run, as INDEX/COUNT")
    arguments = parser.parse_args()
    part, parts_ = (int(x) for x in arguments.part.split("/"))
    globals().update(SMALL=arguments.small, PART=part, PARTS=parts_)
    torch.manual_seed(0)
    np.random.seed(0)
    with torch.inference_mode():
        for section in arguments.sections:
            begin = time.perf_counter()
            SECTIONS[ALIASES.get(section, section)]()
            print(f"-- {section}: {time.perf_counter() - begin:.1f} s", flush=True)
    if arguments.json:
        write_figures(arguments.json)


if __name__ == "__main__":
    main()
