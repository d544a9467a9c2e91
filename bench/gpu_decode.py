"""How fast the kernels are on a GPU, next to what the memory allows. Weights are random and made on the device.

    python -m bench.gpu_decode [section ...] [--json out.json]

Sections: see SECTIONS. Every figure is a median of device-timed graph replays or, where it
says so, of whole turns with the copies to and from the host.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from onedraw.backends.torch.ops.cuda.sampling import SamplingTable, sample_tokens
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
FOUND: dict[str, Any] = {}
PART, PARTS = 0, 1  # which of the matrices to tune
SMALL = False  # a few layers only, to fill the compiler's cache


def say(name: str, value: Any) -> None:
    FOUND[name] = value
    shown = f"{value:.4g}" if isinstance(value, float) else value
    print(f"{name:64s} {shown}", flush=True)


# ------------------------------------------------------------------ measuring


def replay_ms(work: Callable[[], Any], *, repeats: int = 20, inner: int = 1) -> float:
    """Median time of a captured graph of `inner` calls, per call."""
    return timed_ms(captured(lambda: [work() for _ in range(inner)]).replay, repeats) / inner


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def timed_ms(work: Callable[[], Any], repeats: int = 20) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def normal(*shape: int, spread: float = 1.0) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE) * spread


# ------------------------------------------------------------------ a dense model


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
    """Layers of one shape, as a stack runs them."""

    def __init__(self, shape: DenseShape, ops: TritonOps, *, positions: int, pages: int) -> None:
        self.shape, self.ops = shape, ops
        self.mixer = AttentionSpec(shape.heads, shape.kv_heads, shape.dim, RopeSpec(5e5, shape.dim), scale=shape.dim**-0.5)
        self.turns = rope_table(self.mixer.rope, positions, dtype=DTYPE, device=DEVICE)
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
        """Rows of (start, tokens with drafts, drafts)."""
        spans, tables, first, page = [], [], 0, 0
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
    """Three delta layers and one attention layer in turn, in the 27B shape."""

    hidden, width, heads, kv_heads, dim = 5120, 17408, 24, 4, 256
    key_heads, value_heads, state_dim, taps = 16, 48, 128, 4

    def __init__(self, ops: TritonOps, *, positions: int, pages: int, layers: int = 64) -> None:
        self.ops, self.pages, self.shape = ops, pages, HybridShape()
        self.mixer = AttentionSpec(self.heads, self.kv_heads, self.dim, RopeSpec(1e7, 64), scale=self.dim**-0.5, qk_norm=True)
        self.turns = rope_table(self.mixer.rope, positions, dtype=DTYPE, device=DEVICE)
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
        places = 64
        self.held = [torch.zeros(places, *shape, device=DEVICE) for shape in ((48,), (16, 128), (48, 128), (self.channels,))]
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
        closing: dict[str, Any] = {"windows": self.windows, "sources": plan.window_sources}
        return gated_norm(out, projected, self.norm, 1e-6, channels=self.channels, pdl=True, **closing)

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


class CapturedTurn:
    """A turn of one layout as a graph, choosing included: words and wishes go in by one small copy each, tokens come out."""

    def __init__(self, model: DenseModel | HybridModel, inputs: Inputs, params: SamplingParams | None = None) -> None:
        host = host_attention_inputs(inputs, model.ops.heads(model.mixer))
        self.words, self.layout = torch.from_numpy(host.words).to(DEVICE), host.layout
        self.tokens = inputs.tokens.clone()
        self.prepared = TritonAttentionInputs(model.turns, device_attention_inputs(self.words, host.layout), pdl=model.ops._pdl)
        self.table: SamplingTable | None = None
        if params is not None:
            history = History((1, 2, 3), [])
            count = len(inputs.host_tokens)
            positions = [SamplingPosition(i, replace(params, seed=i), history, (), str(i)) for i in range(count)]
            sampler = TritonSampler(vocab=model.shape.vocab, lanes=count, device=DEVICE)
            self.table = sampler.sampling_table(positions)
        self.graph = captured(partial(self._work, model))

    def _work(self, model: DenseModel | HybridModel) -> None:
        self.logits = model.logits(self.tokens, self.prepared)
        if self.table is not None:
            vocab = model.shape.vocab
            chosen, _ = sample_tokens(self.logits, self.table, vocab=vocab, width=padded(vocab), pdl=True)
            self.tokens.copy_(chosen.tokens.clamp_(min=0))


SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


# ------------------------------------------------------------------ sections


def ceilings() -> None:
    source = torch.empty(2**32, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    copy = timed_ms(lambda: target.copy_(source))
    say("copy, TB/s read and written", 2 * source.nbytes / copy / 1e9)
    a, b = normal(8192, 8192), normal(8192, 8192)
    say("8192^3 bf16 product, TFLOP/s", 2 * 8192**3 / timed_ms(lambda: a @ b) / 1e9)


TUNED = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
TUNED += [(16480, 5120), (14336, 5120), (5120, 6144), (34816, 5120), (5120, 17408), (248320, 5120)]


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
    """Turns of the 8B shape: captured, replayed, against the floor."""
    shape = replace(LLAMA_8B, layers=4) if SMALL else LLAMA_8B
    model = DenseModel(shape, TritonOps(DEVICE, pdl=True), positions=140_000, pages=10_000)
    say("library bits equal, by shape", {f"{x.out_features}x{x.in_features}": x.library for x in [*model.layers[0], model.head]})
    _turns("8B", model, LLAMA_8B.matrix_bytes, 2 * 8 * 128 * 2 * 32)
    _whole_turns(model)


def _turns(name: str, model: DenseModel | HybridModel, weights: int, per_position: int) -> None:
    for case, rows in CASES.items():
        inputs = model.inputs(rows)
        read = weights + per_position * sum(start + count for start, count, _ in rows)
        ms = timed_ms(CapturedTurn(model, inputs).graph.replay)
        say(f"{name} turn, {case}, ms (bytes at 4.2 TB/s: {read / 4.2e9:.2f})", ms)
        sampled = timed_ms(CapturedTurn(model, inputs, SAMPLED).graph.replay)
        say(f"{name} turn, {case}, choosing with T 0.8, top-p .95, ms", sampled)


def _whole_turns(model: DenseModel) -> None:
    """Decode as a server would: words and keys in, replay, tokens out."""
    for rows in (1, 8, 32):
        turn = CapturedTurn(model, model.inputs([(960, 1, ())] * rows), SAMPLED)
        assert turn.table is not None
        steps_ = []
        for step in range(60):  # what the host would prepare while the turn before runs
            host = host_attention_inputs(model.inputs([(960 + step, 1, ())] * rows), model.ops.heads(model.mixer))
            assert host.layout == turn.layout
            table = turn.table.rows.cpu()
            table[:, 7:9] = torch.tensor([key(i, 961 + step) for i in range(rows)])
            steps_.append((torch.from_numpy(host.words).pin_memory(), table.pin_memory()))
        back = torch.empty(rows, dtype=torch.int64).pin_memory()
        times = []
        for words, table in steps_:
            begin = time.perf_counter()
            turn.words.copy_(words, non_blocking=True)
            turn.table.rows.copy_(table, non_blocking=True)
            turn.graph.replay()
            back.copy_(turn.tokens, non_blocking=True)
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - begin))
        ms = statistics.median(times[10:])
        say(f"8B, {rows} rows at about 1K, sampled, host to host, ms", ms)
        say(f"8B, {rows} rows at about 1K, sampled, host to host, tok/s", 1000 * rows / ms)


def hybrid() -> None:
    """Turns of the 27B shape with delta layers. The states of verify rows are stepped, not committed."""
    model = HybridModel(TritonOps(DEVICE, pdl=True), positions=140_000, pages=10_000, layers=4 if SMALL else 64)
    _turns("27B", model, model.matrix_bytes, 2 * 4 * 256 * 2 * 16)


STEP_CASES: dict[str, list[tuple[int, int, tuple[Draft, ...]]]] = {
    "1": [(100, 1, ())],
    "16 in one row": [(100, 16, CHAIN)],
    "tree of 22": [(100, 22, TREE)],
    "8 rows": [(100, 1, ())] * 8,
    "32 rows": [(100, 1, ())] * 32,
}


def delta() -> None:
    """The delta kernels of one 27B layer by themselves."""
    model = HybridModel(TritonOps(DEVICE), positions=4096, pages=800, layers=4)
    for case, rows in STEP_CASES.items():
        plan = model.step_plan(model.inputs(rows))
        projected = normal(sum(count for _, count, _ in rows), model.delta_width)
        say(f"27B delta layer, {case}, us", 1000 * replay_ms(partial(_mix_all, model, projected, plan)) / 12)
    for count in (2048, 8192):
        projected = normal(count, model.delta_width)
        say(f"27B delta layer, prompt of {count}, ms", timed_ms(partial(model.mix_prompt, projected), repeats=5))


def _mix_all(model: HybridModel, projected: Tensor, plan: DeltaTables) -> None:
    """Three times through the states of four layers."""
    for index in range(12):
        model.mix(projected, index % 4, plan)


def step_tiles() -> None:
    """The step kernel by columns of the state that a warp has: of drafts, and of many rows."""
    model = HybridModel(TritonOps(DEVICE), positions=4096, pages=800, layers=4)
    for columns in (16, 32):
        delta_recurrent.COLUMNS = delta_recurrent.MANY_COLUMNS = columns
        for case, rows in STEP_CASES.items():
            plan = model.step_plan(model.inputs(rows))
            projected = normal(sum(count for _, count, _ in rows), model.delta_width)
            us = 1000 * replay_ms(partial(_mix_all, model, projected, plan)) / 12
            say(f"27B delta layer, {columns} columns, {case}, us", us)


def inexact() -> None:
    """The 8B turn with the fastest library choices that promise nothing: cuBLAS products, library attention on dense keys."""
    shape = replace(LLAMA_8B, layers=4) if SMALL else LLAMA_8B
    model = DenseModel(shape, TritonOps(DEVICE, pdl=True), positions=30_000, pages=3400)
    weights = [[product._weight for product in layer] for layer in model.layers]
    scale = LLAMA_8B.layers / shape.layers
    for case in ("1 row at 1K", "8 rows at 1K", "32 rows at 1K", "16-row verify at 1K", "1 row at 24K", "16-row verify at 24K"):
        rows = CASES[case]
        inputs = model.inputs(rows)
        prepared = model.ops.prepare_attention(inputs, model.mixer, model.turns)
        count = rows[0][1]
        keys = [normal(len(rows), 8, rows[0][0] + count, 128) for _ in range(2)]
        found = []
        for products, attention in ((False, False), (True, False), (True, True)):
            work = partial(_loose_turn, model, weights, inputs.tokens, prepared, keys if attention else None, products, count)
            found.append(round(scale * replay_ms(work, repeats=10), 3))
        say(f"8B turn without choosing, {case}, ms: ours, cuBLAS products, cuBLAS and library attention", found)


def _loose_turn(
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

    def product(layer: int, which: int, given: Tensor, residual: Tensor | None = None) -> Tensor:
        if not library:
            return model.layers[layer][which](given, residual)
        y = given @ weights[layer][which].t()
        return y if residual is None else y + residual

    for index in range(len(model.layers)):
        wide = product(index, 0, ops.rms_norm(x, model.norms[2 * index], eps))
        settings: dict[str, Any] = {"spec": spec, "store": model.stores[index], "q_norm": None, "k_norm": None, "eps": eps}
        if dense is None:
            mixed = prepared.attend(wide, **settings)
        else:
            q = prepared.rotated_queries(wide, **settings, heads=spec.heads)
            q = q.view(-1, count, spec.heads, spec.head_dim).transpose(1, 2)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, *dense, enable_gqa=True)
            mixed = mixed.transpose(1, 2).reshape(len(x), -1)
        x = product(index, 1, mixed, x)
        hidden = ops.gated(product(index, 2, ops.rms_norm(x, model.norms[2 * index + 1], eps)), "silu")
        x = product(index, 3, hidden, x)
    return model.head(ops.rms_norm(x, model.norms[-1], eps))


def parts() -> None:
    """What each kind of kernel adds to a decode turn, per layer of the 8B shape at 1K."""
    for pdl in (False, True):
        model = DenseModel(replace(LLAMA_8B, layers=12), TritonOps(DEVICE, pdl=pdl), positions=4096, pages=200)
        for at in (200, 1000):
            inputs = model.inputs([(at, 1, ())])
            prepared = model.ops.prepare_attention(inputs, model.mixer, model.turns)
            for level in range(4):
                ms = replay_ms(partial(_partial_turn, model, inputs.tokens, prepared, level), repeats=10)
                what = ("products", "+ norms and gates", "+ rope and pages", "+ attention")[level]
                say(f"per layer at {at}, {what}, pdl {pdl}, us", round(1000 * ms / 12, 2))


def _partial_turn(model: DenseModel, tokens: Tensor, prepared: TritonAttentionInputs, level: int) -> Tensor:
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
    shape = replace(LLAMA_8B, layers=2) if SMALL else LLAMA_8B
    model = DenseModel(shape, TritonOps(DEVICE), positions=20_000, pages=1300)
    for count in (2048, 8192):
        inputs = model.inputs([(0, count, ())])
        prepared = model.ops.prepare_attention(inputs, model.mixer, model.turns)
        for use in (True, False):
            kept = {}
            if not use:
                for layer in model.layers:
                    for product in layer:
                        kept[product], product.library = product.library, False
            ms = timed_ms(lambda i=inputs, p=prepared: model.hidden(i.tokens, p), repeats=5)  # type: ignore[misc]
            for product, value in kept.items():
                product.library = value
            flops = 2 * count * (shape.matrix_bytes / 2 - shape.vocab * shape.hidden)
            flops += 2 * 2 * count * count / 2 * shape.heads * shape.dim * shape.layers
            name = f"8B prefill of {count}, {'library where equal' if use else 'Triton alone'}"
            say(name + ", ms", ms)
            say(name + ", TFLOP/s", flops / ms / 1e9)


def sampler() -> None:
    """Choosing alone: kernels captured, and the plain sampler as it is called."""
    for rows, vocab in ((1, 128_256), (16, 128_256), (64, 128_256), (32, 248_320)):
        logits = normal(rows, vocab, spread=3.0)
        history = History(tuple(range(100)), list(range(50)))
        kinds = {
            "T 0.8, top-p .95": SamplingParams(temperature=0.8, top_p=0.95, seed=5),
            "T 1, penalties": SamplingParams(frequency_penalty=0.3, repetition_penalty=1.1, seed=5),
            "T 0.8, top-k 40, top-p .95": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=5),
            "greedy": SamplingParams(temperature=0.0),
        }
        for name, params in kinds.items():
            positions = [SamplingPosition(i, replace(params, seed=i), history, (), str(i)) for i in range(rows)]
            fast = TritonSampler(vocab=vocab, lanes=rows, device=DEVICE)
            plain = Sampler(vocab=vocab, lanes=rows, device=DEVICE)
            table = fast.sampling_table(positions)
            work = partial(sample_tokens, logits, table, vocab=vocab, width=padded(vocab), pdl=True)
            say(f"choosing {rows} x {vocab}, {name}, captured, ms", replay_ms(work, repeats=10))
            say(f"choosing {rows} x {vocab}, {name}, with the host, ms", _wall_ms(partial(fast.sample, logits, positions)))
            wide = logits.float()
            say(f"choosing {rows} x {vocab}, {name}, plain sampler, ms", _wall_ms(partial(plain.sample, wide, positions)))


def choosing() -> None:
    """Choosing alone, captured: T 0.8, top-p .95, by rows; flat logits and peaked ones."""
    params = SamplingParams(temperature=0.8, top_p=0.95)
    for vocab in (248_320, 128_256):
        for spread in (1.0, 3.0):
            line = []
            for rows in (1, 8, 16, 24, 32):
                logits = normal(rows, vocab, spread=spread)
                positions = [SamplingPosition(i, replace(params, seed=i), History((1,), []), (), str(i)) for i in range(rows)]
                table = TritonSampler(vocab=vocab, lanes=rows, device=DEVICE).sampling_table(positions)
                work = partial(sample_tokens, logits, table, vocab=vocab, width=padded(vocab), pdl=True)
                line.append(round(1000 * replay_ms(work, repeats=10, inner=4), 1))
            say(f"choosing of {vocab}, logits spread {spread}, us: 1, 8, 16, 24, 32 rows", line)


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
    """One layer's attention, prompts and long contexts."""
    for heads, kv, dim in ((32, 8, 128), (24, 4, 256)):
        for start, count in ((1000, 1), (24_000, 1), (24_000, 16), (131_000, 1), (131_000, 16), (0, 8192)):
            launch, stores = _one_layer(heads, kv, dim, start, count)
            floor = 2 * (start + count) * kv * dim * 2 / 4.2e12 * 1e6
            us = 500 * replay_ms(partial(_through, launch, stores), repeats=5)
            say(f"attention {heads}/{kv} x {dim}, {count} at {start}, us (bytes at 4.2 TB/s: {floor:.1f})", us)


def chunks() -> None:
    """Chunks of a prompt by columns of the state and warps per program."""
    model = HybridModel(TritonOps(DEVICE), positions=4096, pages=400, layers=1)
    projected = normal(8192, model.delta_width)
    for columns, warps in ((32, 8), (32, 4), (64, 8), (64, 4), (16, 4))[PART::PARTS]:
        delta_chunked.CHUNK_COLUMNS, delta_chunked.CHUNK_WARPS = columns, warps
        ms = timed_ms(partial(model.mix_prompt, projected), repeats=5)
        say(f"27B delta layer, prompt of 8192, {columns} columns, {warps} warps, ms", ms)
    say("27B delta layer, gates alone, ms", timed_ms(partial(model.mix_prompt, projected, only_gates=True), repeats=5))


@lru_cache(maxsize=2)
def _stores(heads: int, kv: int, dim: int) -> list[PageStore]:
    spec = AttentionSpec(heads, kv, dim, RopeSpec(1e6, dim), scale=dim**-0.5)
    stores = [PageStore(spec, pages=8300, page_size=PAGE, dtype=DTYPE, device=DEVICE) for _ in range(2)]
    for store in stores:
        store.keys.normal_()
        store.values.normal_()
    return stores


def _one_layer(
    heads: int, kv: int, dim: int, start: int, count: int, *, merged: bool = True, **options: Any
) -> tuple[Callable[..., Any], list[PageStore]]:
    layout = InputLayout(PAGE, (8300,), RowRule(floor=1))
    inputs = lay_out([0] * count, [Span(0, count, start)], [(list(range(8300)),)], layout=layout, device=DEVICE)
    device = stage_attention_inputs(inputs, AttentionShape(heads, kv, dim, None, 264))
    q = normal(count, heads * dim)
    sets = [group if merged else replace(group, merge_tokens=group.merge_tokens[:0]) for group in device.tile_sets]
    launch = partial(
        attend, q, metadata=device.metadata, tile_sets=sets, heads=heads, kv_heads=kv, dim=dim, scale=dim**-0.5, **options
    )
    return launch, _stores(heads, kv, dim)


def peer() -> None:
    """transformers in the same run: the 8B shape, random weights, sampled."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # type: ignore[import-not-found, unused-ignore]

    shape = LLAMA_8B
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.width, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, max_position_embeddings=8192,
    )  # fmt: skip
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
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
        say(f"transformers, 8B, {rows} rows at 1K, sampled, tok/s", rows * 32 / (times[36] - times[4]))


def _through(launch: Callable[[Tensor, Tensor], Any], stores: list[PageStore]) -> None:
    for store in stores:
        launch(store.keys, store.values)


def _read(model: DenseModel, text: Tensor, cuts: list[int], drafts: tuple[Draft, ...] = (), strangers: int = 0) -> Tensor:
    """Logits of every position, the text cut into rows that run one turn after the other."""
    found = []
    for start, stop in itertools.pairwise(cuts):
        rows = [(start, stop - start, drafts if stop - start == 16 else ())]
        rows += [(40 + 31 * i, 1 + i % 3, ()) for i in range(strangers)]
        inputs = model.inputs(rows)
        tokens = inputs.tokens.clone()
        tokens[: stop - start] = text[start:stop]
        prepared = model.ops.prepare_attention(inputs, model.mixer, model.turns)
        found.append(model.logits(tokens, prepared)[: stop - start])
    return torch.cat(found)


def exact() -> None:
    """Logits of a text read as one chunk, in other chunks, token by token, as verify rows, and in a batch of strangers."""
    for pdl in (False, True):
        shape = replace(LLAMA_8B, layers=4)
        model = DenseModel(shape, TritonOps(DEVICE, pdl=pdl), positions=4096, pages=2000)
        length = 1100
        text = torch.randint(0, shape.vocab, (length,), device=DEVICE)
        chain = tuple(Draft(1, i - 1) for i in range(15))

        read = partial(_read, model, text)
        whole = read([0, length])
        ways = {
            "other chunks": read([0, 1, 64, 301, 1000, length]),
            "token by token from 1000": torch.cat([whole[:1000], read([0, *range(1000, length + 1)])[1000:]]),
            "rows of 16 from 1004": read([0, *range(1004, length + 1, 16)], chain),
            "among 31 strangers": read([0, 500, length], strangers=31),
            "token by token among 5 strangers": read([0, *range(1050, length + 1)], strangers=5),
        }
        for name, found in ways.items():
            say(f"exact: {name}{', pdl' if pdl else ''}, rows that differ", int((found != whole).any(1).sum()))


SECTIONS: dict[str, Callable[[], None]] = {
    "exact": exact,
    "ceilings": ceilings,
    "parts": parts,
    "attention": attention,
    "sampler": sampler,
    "choosing": choosing,
    "delta": delta,
    "step_tiles": step_tiles,
    "inexact": inexact,
    "chunks": chunks,
    "decode": decode,
    "hybrid": hybrid,
    "prefill": prefill,
    "peer": peer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS))
    parser.add_argument("--json")
    parser.add_argument("--small", action="store_true", help="a few layers only: fills the compiler's cache")
    parser.add_argument("--part", default="0/1", help="which of the matrices to tune")
    arguments = parser.parse_args()
    part, parts_ = (int(x) for x in arguments.part.split("/"))
    globals().update(SMALL=arguments.small, PART=part, PARTS=parts_)
    torch.manual_seed(0)
    np.random.seed(0)
    with torch.inference_mode():
        for section in arguments.sections:
            begin = time.perf_counter()
            SECTIONS[section]()
            print(f"-- {section}: {time.perf_counter() - begin:.1f} s", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as out:
            json.dump(FOUND, out, indent=1, default=str)


if __name__ == "__main__":
    main()
