"""How fast the kernels are on a GPU, next to what the memory allows. Weights are random and made on the device.

    python -m bench.gpu_decode [section ...] [--json out.json]

Sections: exact, ceilings, tune, decode, prefill, attention. Every figure is a median of device-timed graph replays or, where it
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
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.torch.exact import padded
from onedraw.backends.torch.inputs import Inputs, Shape, Span, lay_out
from onedraw.backends.torch.kernels.cuda import Prepared, TritonLinear, TritonOps
from onedraw.backends.torch.kernels.sampler import TritonSampler
from onedraw.backends.torch.kernels.triton_attention import attend
from onedraw.backends.torch.kernels.triton_linear import Tile, linear
from onedraw.backends.torch.kernels.triton_sample import choose
from onedraw.backends.torch.kernels.views import Heads, device_view, host_view, to_view
from onedraw.backends.torch.layers.linear import RowRule
from onedraw.backends.torch.layers.rope import rope_table
from onedraw.backends.torch.sampler import Position, Sampler
from onedraw.backends.torch.state import PageStore
from onedraw.models.spec import AttentionSpec, RopeSpec
from onedraw.types import Draft, History, SamplingParams

DEVICE = torch.device("cuda:0")
DTYPE = torch.bfloat16
PAGE = 16
FOUND: dict[str, Any] = {}


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
            need = (start + count) // PAGE + 1
            spans.append(Span(first, count, start, drafts))
            tables.append(list(range(page, page + need)))
            first, page = first + count, page + need
        assert page <= self.pages, (page, self.pages)
        return lay_out([7] * first, spans, tables, shape=Shape(PAGE, self.pages, RowRule(floor=1)), device=DEVICE)

    def hidden(self, tokens: Tensor, prepared: Prepared) -> Tensor:
        ops, eps = self.ops, 1e-5
        x = self.embedding.index_select(0, tokens)
        for index, (qkv, out, gate_up, down) in enumerate(self.layers):
            mixed = ops.attention(
                qkv(ops.rms_norm(x, self.norms[2 * index], eps)),
                prepared,
                spec=self.mixer,
                store=self.stores[index],
                q_norm=None,
                k_norm=None,
                eps=eps,
            )
            x = out(mixed, x)
            x = down(gate_up.gated(ops.rms_norm(x, self.norms[2 * index + 1], eps), "silu"), x)
        return ops.rms_norm(x, self.norms[-1], eps)

    def logits(self, tokens: Tensor, prepared: Prepared) -> Tensor:
        return self.head(self.hidden(tokens, prepared))


class CapturedTurn:
    """A turn of one layout as a graph: tokens and words go in by one small copy each."""

    def __init__(self, model: DenseModel, inputs: Inputs) -> None:
        host = host_view(inputs, model.ops.heads(model.mixer))
        self.words = torch.from_numpy(host.words).to(DEVICE)
        self.tokens = inputs.tokens.clone()
        self.prepared = Prepared(model.turns, device_view(self.words, host.layout))
        self.graph = captured(self._work(model))

    def _work(self, model: DenseModel) -> Callable[[], None]:
        def work() -> None:
            self.logits = model.logits(self.tokens, self.prepared)

        return work


# ------------------------------------------------------------------ sections


def ceilings() -> None:
    source = torch.empty(2**32, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    copy = timed_ms(lambda: target.copy_(source))
    say("copy, TB/s read and written", 2 * source.nbytes / copy / 1e9)
    a, b = normal(8192, 8192), normal(8192, 8192)
    say("8192^3 bf16 product, TFLOP/s", 2 * 8192**3 / timed_ms(lambda: a @ b) / 1e9)


def tune() -> None:
    """The fastest tiles for the matrices of the shapes, with cold weights."""
    shapes = [(6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False), (128256, 4096, False)]
    for n, k, both in shapes:
        size = n * k * (4 if both else 2)
        copies = max(2, int(400e6 // size) + 1)
        weights = [normal(n * (2 if both else 1), k, spread=k**-0.5) for _ in range(copies)]
        x = normal(16, k)
        results = []
        for columns in (16, 32) if both else (16, 32, 64):
            for depth in (128, 256, 512):
                for warps in (4,):
                    for stages in (3, 4, 5):
                        tile = Tile(16, columns, depth, warps, stages)
                        bytes_ = tile.shared(2, 2 if both else 1)
                        if bytes_ > 220_000 or columns * depth > 16384:
                            continue
                        try:
                            ms = replay_ms(
                                lambda t=tile, ws=weights, x=x, g=both: [  # type: ignore[misc]
                                    linear(x[:1], w, activation="silu" if g else None, tile=t) for w in ws
                                ],
                                repeats=5,
                            )
                        except Exception as problem:
                            print("tile", tile, type(problem).__name__, flush=True)
                            continue
                        results.append((1000 * ms / copies, tile))
        results.sort(key=lambda r: r[0])
        best = results[0][1]
        sixteen = replay_ms(
            lambda t=best, ws=weights, x=x, g=both: [  # type: ignore[misc]
                linear(x, w, activation="silu" if g else None, tile=t) for w in ws
            ],
            repeats=5,
        )
        say(f"tile {n} x {k}{' gated' if both else ''}, us", [(round(t, 2), *_numbers(tile)) for t, tile in results[:4]])
        say(f"tile {n} x {k}{' gated' if both else ''}, 16 rows, us", round(1000 * sixteen / copies, 2))


def _numbers(tile: Tile) -> tuple[int, ...]:
    return tile.columns, tile.depth, tile.warps, tile.stages


def decode() -> None:
    """Turns of the 8B shape: captured, replayed, against the floor."""
    for pdl in (0, 2):
        try:
            _decode(pdl)
        except Exception as problem:
            print("decode failed", pdl, repr(problem)[:600], flush=True)


def _decode(pdl: int) -> None:
    model = DenseModel(LLAMA_8B, TritonOps(DEVICE, pdl=pdl), positions=140_000, pages=10_000)
    mark = f", pdl {pdl}" if pdl else ""
    say("library bits equal, by shape", {f"{x.out_features}x{x.in_features}": x.library for x in [*model.layers[0], model.head]})
    chain = tuple(Draft(1, i - 1) for i in range(15))
    tree = tuple(Draft(1, -1 if i < 4 else (i - 4) // 2) for i in range(21))
    cases = {
        "1 row at 200": [(200, 1, ())],
        "1 row at 1K": [(1000, 1, ())],
        "16-row verify at 1K": [(1000, 16, chain)],
        "tree of 22 at 1K": [(1000, 22, tree)],
        "8 rows at 1K": [(1000 + 3 * i, 1, ()) for i in range(8)],
        "32 rows at 1K": [(1000 + 3 * i, 1, ()) for i in range(32)],
        "1 row at 24K": [(24_000, 1, ())],
        "16-row verify at 24K": [(24_000, 16, chain)],
        "tree of 22 at 24K": [(24_000, 22, tree)],
        "1 row at 128K": [(131_000, 1, ())],
    }
    for name, rows in cases.items():
        inputs = model.inputs(rows)
        turn = CapturedTurn(model, inputs)
        ms = timed_ms(turn.graph.replay)
        read = sum(start + count for start, count, _ in rows) * 2 * 8 * 128 * 2 * 32
        say(f"8B turn, {name}{mark}, ms", ms)
        say(f"8B turn, {name}{mark}, GB read at least", (LLAMA_8B.matrix_bytes + read) / 1e9)
        del turn
    _whole_turns(model, mark)


def _whole_turns(model: DenseModel, mark: str) -> None:
    """Decode as a server would: words in, replay, one token out, greedy."""
    turn = CapturedTurn(model, model.inputs([(1000, 1, ())]))
    pick = captured(lambda: turn.tokens.copy_(turn.logits.float().argmax(1)))
    words = turn.words.cpu().pin_memory()
    back = torch.empty(1, dtype=torch.int64).pin_memory()
    times = []
    for step in range(60):
        begin = time.perf_counter()
        for place in (0, 1, 4):  # position, slot, end
            words[place] = 1000 + step
        turn.words.copy_(words, non_blocking=True)
        turn.graph.replay()
        pick.replay()
        back.copy_(turn.tokens, non_blocking=True)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    say(f"8B whole turn at 1K, host to host, argmax{mark}, ms", statistics.median(times[10:]))


def parts() -> None:
    """What each kind of kernel adds to a decode turn, per layer of the 8B shape at 1K."""
    for pdl in (0, 1, 2):
        model = DenseModel(replace(LLAMA_8B, layers=12), TritonOps(DEVICE, pdl=pdl), positions=4096, pages=200)
        for at in (200, 1000):
            inputs = model.inputs([(at, 1, ())])
            prepared = model.ops.prepare(inputs, model.mixer, model.turns)
            for level in range(5):
                ms = replay_ms(partial(_partial_turn, model, inputs.tokens, prepared, level), repeats=10)
                what = ("products", "+ norms", "+ rope and pages", "+ attention", "all, plain gate")[level]
                say(f"per layer at {at}, {what}, pdl {pdl}, us", round(1000 * ms / 12, 2))


def _partial_turn(model: DenseModel, tokens: Tensor, prepared: Prepared, level: int) -> Tensor:
    ops, eps, spec = model.ops, 1e-5, model.mixer
    x = model.embedding.index_select(0, tokens)
    for index, (qkv, out, gate_up, down) in enumerate(model.layers):
        wide = qkv(ops.rms_norm(x, model.norms[2 * index], eps) if level >= 1 else x)
        settings: dict[str, Any] = {"spec": spec, "store": model.stores[index], "q_norm": None, "k_norm": None, "eps": eps}
        if level >= 3:
            mixed = ops.attention(wide, prepared, **settings)
        elif level == 2:
            mixed = ops._heads(wide, prepared, **settings, heads=spec.heads)
        else:
            mixed = wide[:, : spec.heads * spec.head_dim]
        x = out(mixed, x)
        y = ops.rms_norm(x, model.norms[2 * index + 1], eps) if level >= 1 else x
        x = down(gate_up.gated(y, "silu") if level < 4 else ops.gated(gate_up(y), "silu"), x)
    return x


def prefill() -> None:
    model = DenseModel(LLAMA_8B, TritonOps(DEVICE), positions=20_000, pages=1300)
    shape = LLAMA_8B
    for count in (2048, 8192):
        inputs = model.inputs([(0, count, ())])
        prepared = model.ops.prepare(inputs, model.mixer, model.turns)
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
            positions = [Position(i, replace(params, seed=i), history, (), str(i)) for i in range(rows)]
            fast = TritonSampler(vocab=vocab, lanes=rows, device=DEVICE)
            plain = Sampler(vocab=vocab, lanes=rows, device=DEVICE)
            wishes = fast.wishes(positions)
            work = partial(choose, logits, wishes, vocab=vocab, width=padded(vocab))
            say(f"choosing {rows} x {vocab}, {name}, captured, ms", replay_ms(work, repeats=10))
            say(f"choosing {rows} x {vocab}, {name}, with the host, ms", _wall_ms(partial(fast.choose, logits, positions)))
            wide = logits.float()
            say(f"choosing {rows} x {vocab}, {name}, plain sampler, ms", _wall_ms(partial(plain.choose, wide, positions)))


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
    """One layer's attention at long contexts, by stages in flight."""
    for heads, kv, dim in ((32, 8, 128), (24, 4, 256)):
        spec = AttentionSpec(heads, kv, dim, RopeSpec(1e6, dim), scale=dim**-0.5)
        stores = [PageStore(spec, pages=8300, page_size=PAGE, dtype=DTYPE, device=DEVICE) for _ in range(2)]
        for store in stores:
            store.keys.normal_()
            store.values.normal_()
        tables = [list(range(8300))]
        for start, count in ((1000, 1), (1000, 16), (24_000, 1), (24_000, 16), (131_000, 1), (131_000, 16), (0, 8192)):
            spans = [Span(0, count, start)]
            shape = Shape(PAGE, 8300, RowRule(floor=1))
            inputs = lay_out([0] * count, spans, tables, shape=shape, device=DEVICE)
            device = to_view(inputs, Heads(heads, kv, dim, None, 264))
            q = normal(count, heads * dim)
            found: dict[tuple[int, int], Any] = {}
            for stages, warps in ((3, 4), (4, 4), (5, 4), (4, 8)):
                launch = partial(
                    attend, q, view=device.view, sets=list(device.sets), heads=heads, kv_heads=kv, dim=dim,
                    scale=spec.scale, stages=stages, warps=warps,
                )  # fmt: skip
                try:
                    ms = replay_ms(partial(_through, launch, stores), repeats=5)
                    found[stages, warps] = round(1000 * ms / 2, 1)
                except Exception as problem:
                    found[stages, warps] = type(problem).__name__
            floor = 2 * (start + count) * kv * dim * 2 / 4.2e12 * 1e6
            say(f"attention {heads}/{kv}x{dim}, {count} at {start}, us (floor {floor:.1f})", found)


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
        prepared = model.ops.prepare(inputs, model.mixer, model.turns)
        found.append(model.logits(tokens, prepared)[: stop - start])
    return torch.cat(found)


def exact() -> None:
    """Logits of a text read as one chunk, in other chunks, token by token, as verify rows, and in a batch of strangers."""
    for pdl in (0, 2):
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


SECTIONS = {
    "exact": exact,
    "ceilings": ceilings,
    "tune": tune,
    "decode": decode,
    "parts": parts,
    "sampler": sampler,
    "prefill": prefill,
    "attention": attention,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS))
    parser.add_argument("--json")
    wishes = parser.parse_args()
    torch.manual_seed(0)
    np.random.seed(0)
    with torch.inference_mode():
        for section in wishes.sections:
            begin = time.perf_counter()
            SECTIONS[section]()
            print(f"-- {section}: {time.perf_counter() - begin:.1f} s", flush=True)
    if wishes.json:
        with open(wishes.json, "w") as out:
            json.dump(FOUND, out, indent=1, default=str)


if __name__ == "__main__":
    main()
