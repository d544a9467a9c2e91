"""The contract with quantized weights that stay packed: tiny models of every block format, compared by tokens and checksums."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.ops.cpu import library as builder
from onedraw.backends.torch.ops.cpu.library import supported_instruction_sets
from onedraw.backends.torch.ops.cpu.ops import CpuOps, Packing
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.inputs import make_inputs
from onedraw.backends.torch.runner.pipeline import StageDevice
from onedraw.models.spec import ModelSpec
from onedraw.settings import default_cache_dir
from onedraw.types import Plan, Request
from tests.backends.torch.test_cpu_kernels import prompt_row
from tests.laws.harness import KnownAnswerProposer, Schedule, plain, random_requests, run, same
from tests.support.quantized_weights import QUANTIZED_KINDS, quantized_weights, tiny_spec

LIBRARY = builder.build(default_cache_dir()).library
if LIBRARY is None:
    pytest.skip("no C compiler", allow_module_level=True)
BEST, *OTHERS = supported_instruction_sets(LIBRARY)
MIXED = ("Q4_K", "Q6_K", "Q8_0", "F16", "Q5_1", "Q4_0", "BF16")
MODELS = {kind: (kind,) for kind in QUANTIZED_KINDS} | {"mixed": MIXED, "F16": ("F16",)}


def spec_of(name: str) -> ModelSpec:
    return tiny_spec(tied=name in ("Q8_0", "Q6_K", "Q4_1", "F16"), qk_norm=name == "mixed")


def ops_of(*, path: str = BEST, threads: int = 2, coded: bool = True, fuses: bool = True) -> CpuOps:
    assert LIBRARY is not None
    return CpuOps(LIBRARY, threads=threads, packing=Packing(as_stored=True, coded=coded), path=path, fuses=fuses)


def backend_of(
    name: str,
    ops: CpuOps,
    *,
    lanes: int = 4,
    pages: int = 200,
    stream: str | None = None,
    cuts: tuple[int, ...] = (),
    check: bool = True,
) -> TorchBackend:
    """`stream`: the dtype of the residual stream. `cuts`: the layers before which a stage ends."""
    spec = spec_of(name)
    sizes = {"lanes": lanes, "pages": pages, "page_size": 8, "max_context": 400, "rows": 8192, "check": check}
    stages = [StageDevice(torch.device("cpu"), ops, stop) for stop in (*cuts, None)]
    weights = quantized_weights(spec, MODELS[name])
    return TorchBackend(spec, weights, dtype="packed", activation=stream, stage_devices=stages, **sizes)


def requests_of(seed: int) -> list[Request]:
    requests = random_requests(np.random.default_rng(seed), count=5, vocab=300, longest=90, max_tokens=8)
    return [dataclasses.replace(r, id=f"{r.id}-{seed}") for r in requests]


def check_schedules(name: str, ops: CpuOps, *, seed: int = 3, stream: str | None = None) -> Counter[str]:
    requests = requests_of(seed)
    one_lane = backend_of(name, ops, lanes=1, stream=stream)
    assert one_lane.report is not None
    assert one_lane.report.passed, one_lane.report.results
    expected = plain(lambda: one_lane, requests)
    drafts = KnownAnswerProposer({r.id: a.tokens for r, a in zip(requests, expected, strict=True)}, 300)
    longest = max(len(r.prompt) + r.params.max_tokens for r in requests)
    variations = {
        "batched": (ops, Schedule(), 200),
        "small steps": (ops, Schedule(step_tokens=7), 200),
        "prefix hits": (ops, Schedule(reuse=True, arrivals=(0, 3, 6, 9, 12)), 200),
        "drafts, few pages": (ops, Schedule(proposer=drafts, step_tokens=40, reuse=True), -(-longest // 8) + 6),
        "trees": (ops, Schedule(proposer=dataclasses.replace(drafts, tree=True)), 200),
        "one thread": (ops_of(path=ops.name.removeprefix("cpu-"), threads=1), Schedule(), 200),
        "three threads, not fused": (ops_of(path=ops.name.removeprefix("cpu-"), threads=3, fuses=False), Schedule(), 200),
    }
    counted: Counter[str] = Counter()
    for what, (used, schedule, pages) in variations.items():
        got, stats = run(backend_of(name, used, pages=pages, stream=stream), requests, schedule)
        assert same(got, expected), what
        counted.update(kept=stats.accepted_tokens, rejected=stats.draft_tokens - stats.accepted_tokens)
        counted.update(chunks=stats.middle_chunks, mixed=stats.mixed_steps, hits=stats.prefix_hits)
    return counted


@pytest.mark.parametrize("name", MODELS)
def test_no_schedule_changes_a_bit(name: str) -> None:
    counted = check_schedules(name, ops_of())
    assert all(counted[what] > 0 for what in ("kept", "rejected", "chunks", "mixed", "hits")), counted


@pytest.mark.parametrize("path", OTHERS)
def test_no_schedule_changes_a_bit_on_lower_instruction_sets(path: str) -> None:
    check_schedules("mixed", ops_of(path=path))


@pytest.mark.parametrize("stream", ["bf16", "f16"])
def test_no_schedule_changes_a_bit_of_a_narrow_residual_stream(stream: str) -> None:
    counted = check_schedules("mixed", ops_of(), stream=stream)
    assert all(counted[what] > 0 for what in ("kept", "rejected", "chunks", "mixed", "hits")), counted


def split_and_whole(ops: CpuOps, stream: str) -> bool:
    """Whether two stages give the bits of one."""
    requests = requests_of(3)
    made = [backend_of("mixed", ops, stream=stream, cuts=cuts, check=False) for cuts in ((), (1,))]
    whole, split = (run(backend, requests, Schedule())[0] for backend in made)
    return same(split, whole)


@pytest.mark.parametrize("stream", ["bf16", "f16"])
def test_a_split_of_a_narrow_residual_stream_gives_the_bits_of_one_device(stream: str) -> None:
    assert split_and_whole(ops_of(), stream)
    assert split_and_whole(ops_of(fuses=False), stream)
    assert not same(*(run(backend_of("mixed", ops_of(), stream=s), requests_of(3), Schedule())[0] for s in (None, stream)))


def test_fused_layers_that_keep_the_stream_in_float32_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is rounded only where it leaves the kernel gives other bits when the layers are in two stages."""
    ops = faulty_ops(tmp_path, monkeypatch, "fused_layers.c", "if (l->stream != KV_F32) PARALLEL_FOR", "if (0) PARALLEL_FOR")
    assert not split_and_whole(ops, "bf16")


def mixed_backend(
    name: str = "mixed", *, packed_first: bool, cut: int = 1, stream: str = "f32", lanes: int = 4, pages: int = 200
) -> TorchBackend:
    """Two stages of different kinds: the C kernels with packed weights, and plain torch with bf16 products, as on a GPU."""
    kinds = [(ops_of(), "packed"), (TorchOps(torch.device("cpu")), "bf16")]
    (first, before), (last, dtype) = kinds if packed_first else reversed(kinds)
    spec = dataclasses.replace(spec_of(name), layers=(spec_of(name).layers[0],) * 3)
    stages = [StageDevice(torch.device("cpu"), first, cut), StageDevice(torch.device("cpu"), last)]
    sizes = {"lanes": lanes, "pages": pages, "page_size": 8, "max_context": 400, "rows": 8192, "activation": stream}
    weights = quantized_weights(spec, MODELS[name])
    return TorchBackend(spec, weights, dtype=dtype, kv_dtype="bf16", stage_devices=stages, stage_dtypes=[before, dtype], **sizes)


@pytest.mark.parametrize("stream", ["f32", "bf16"])
@pytest.mark.parametrize("packed_first", [True, False])
def test_no_schedule_changes_a_bit_of_a_split_over_different_kinds(packed_first: bool, stream: str) -> None:
    requests = requests_of(3)
    make = partial(mixed_backend, packed_first=packed_first, stream=stream)
    one_lane = make(lanes=1)
    assert one_lane.report is not None
    assert one_lane.report.passed, one_lane.report.results
    expected = plain(lambda: one_lane, requests)
    drafts = KnownAnswerProposer({r.id: a.tokens for r, a in zip(requests, expected, strict=True)}, 300)
    counted: Counter[str] = Counter()
    for what, schedule in {
        "batched": Schedule(),
        "small steps": Schedule(step_tokens=7),
        "prefix hits, drafts": Schedule(proposer=drafts, reuse=True, arrivals=(0, 3, 6, 9, 12)),
    }.items():
        got, stats = run(make(), requests, schedule)
        assert same(got, expected), what
        counted.update(kept=stats.accepted_tokens, chunks=stats.middle_chunks, mixed=stats.mixed_steps, hits=stats.prefix_hits)
    assert all(counted[what] > 0 for what in ("kept", "chunks", "mixed", "hits")), counted


@pytest.mark.parametrize("name", ["mixed", "Q8_0"])
@pytest.mark.parametrize("packed_first", [True, False])
def test_the_plan_of_different_kinds_is_part_of_the_fingerprint(name: str, packed_first: bool) -> None:
    """Another cut computes other bits, so a reply or a snapshot of one is not taken for that of the other."""
    made = [mixed_backend(name, packed_first=packed_first, cut=cut) for cut in (1, 2)]
    one, two = (run(backend, requests_of(3), Schedule())[0] for backend in made)
    assert not same(one, two)
    assert made[0].identity != made[1].identity
    names = [f"cpu-{BEST}", "cpu-torch"] if packed_first else ["cpu-torch", f"cpu-{BEST}"]
    assert [backend.capacity.device for backend in made] == [f"{names[0]}:1+{names[1]}:2", f"{names[0]}:2+{names[1]}:1"]
    assert made[0].capacity.dtype == ("packed+bf16" if packed_first else "bf16+packed")


def hidden_of(name: str, ops: CpuOps, dtype: str = "packed", stream: str | None = None) -> torch.Tensor:
    spec = spec_of(name)
    sizes = {"lanes": 2, "pages": 20, "page_size": 8, "max_context": 100, "check": False}
    weights = quantized_weights(spec, MODELS[name])
    made = TorchBackend(spec, weights, dtype=dtype, activation=stream, device="cpu", ops=ops, **sizes)
    plan = Plan((prompt_row(0, 0, 70, range(10)),))
    with torch.inference_mode():
        hidden = made.model.hidden(make_inputs(plan, layout=made.layout, device=torch.device("cpu")), made.states)
        return torch.cat([hidden, made.model.logits(hidden)], dim=1)


@pytest.mark.parametrize("stream", [None, "bf16", "f16"])
@pytest.mark.parametrize("name", ["Q4_1", "mixed"])
def test_fused_layers_have_the_bits_of_separate_operations(name: str, stream: str | None) -> None:
    separate = hidden_of(name, ops_of(fuses=False), stream=stream)
    assert torch.equal(hidden_of(name, ops_of(), stream=stream), separate)
    exact = hidden_of(name, ops_of())
    assert (separate - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("name", ["Q4_K", "mixed"])
def test_float_activations_have_the_bits_of_float32_weights(name: str) -> None:
    assert LIBRARY is not None
    exact = hidden_of(name, CpuOps(LIBRARY, threads=2), "f32")
    assert torch.equal(hidden_of(name, ops_of(coded=False), "packed-f32"), exact)
    coded = hidden_of(name, ops_of())
    assert not torch.equal(coded, exact)
    assert (coded - exact).norm() / exact.norm() < 0.05


def faulty_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, right: str, wrong: str, *, after: str = "") -> CpuOps:
    """The operations, compiled from sources in which `wrong` replaces the first `right` behind the text `after`."""
    folder = tmp_path / "kernels"
    shutil.copytree(builder.FOLDER, folder)
    source = (folder / file).read_text()
    place = source.index(right, source.index(after))
    (folder / file).write_text(source[:place] + wrong + source[place + len(right) :])
    monkeypatch.setattr(builder, "SOURCES", tuple(folder / file.name for file in builder.SOURCES))
    monkeypatch.setattr(builder, "INSTRUCTION_SETS", {BEST: builder.INSTRUCTION_SETS[BEST]})
    built = builder.build(tmp_path)
    assert built.library is not None, built.reason
    return CpuOps(built.library, threads=2, packing=Packing(as_stored=True, coded=True), path=BEST)


def test_a_kernel_whose_order_follows_the_rows_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of four and more rows add the blocks of a row in reverse order, which changes the last bit."""
    right = "for (long b = 0; b < blocks; b++) {"
    wrong = "for (long i = 0; i < blocks; i++) { const long b = count >= 4 ? blocks - 1 - i : i;"
    ops = faulty_ops(tmp_path, monkeypatch, "packed_linear.c", right, wrong, after="INLINE void coded_tile")
    report = backend_of("Q4_1", ops).report
    assert report is not None
    assert not report.passed or report.rule.block is not None  # only tiles of one fixed height can pass here
    requests = requests_of(3)
    free = {"lanes": 4, "pages": 200, "page_size": 8, "max_context": 400, "check": False}
    spec = spec_of("Q4_1")
    make = lambda: TorchBackend(spec, quantized_weights(spec, ("Q4_1",)), dtype="packed", device="cpu", ops=ops, **free)  # noqa: E731
    assert not same(run(make(), requests, Schedule())[0], plain(make, requests))
