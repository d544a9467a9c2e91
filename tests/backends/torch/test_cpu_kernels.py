"""The CPU kernels equal plain torch, and their results for a row do not depend on the other rows."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onedraw.backends.torch.ops.base import Ops
from onedraw.backends.torch.ops.cpu import library as builder
from onedraw.backends.torch.ops.cpu.library import build
from onedraw.backends.torch.ops.cpu.ops import CpuOps
from onedraw.backends.torch.ops.plain.elementwise import rope_table
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.inputs import InputLayout, make_inputs
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.models.spec import AttentionSpec, RopeSpec
from onedraw.settings import default_cache_dir
from onedraw.types import History, Plan, Row, SamplingParams


def kernels(threads: int = 2) -> CpuOps:
    if builder.find_compiler() is None:
        pytest.skip("no C compiler")
    built = build(default_cache_dir())
    assert built.library is not None, built.reason
    return CpuOps(built.library, threads=threads)


TWIN = TorchOps(torch.device("cpu"))
BUILDS = """
import sys; from pathlib import Path; import torch; from onedraw.backends.torch.ops.cpu import library as builder
builder.INSTRUCTION_SETS = {'portable': ()}  # the quickest
sys.exit(builder.build(Path(sys.argv[1])).library is None)
"""


@pytest.mark.parametrize(("out", "width"), [(32, 16), (960, 576), (100, 72), (1, 7), (576, 1536)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_is_correct_and_a_row_has_the_same_bits_in_any_batch(out: int, width: int, biased: bool) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(out, width), torch.randn(out), torch.randn(130, width)
    linear = kernels().linear(weight, bias if biased else None)
    whole = linear(x)
    exact = (x.double() @ weight.double().T + (bias if biased else 0)).float()
    assert (whole - exact).abs().max() < 1e-5 * width**0.5 * 4
    for rows in (1, 2, 3, 5, 11, 12, 13, 64):
        assert torch.equal(linear(x[:rows].contiguous()), whole[:rows])
        assert torch.equal(linear(x[7 : 7 + rows].contiguous()), whole[7 : 7 + rows])
    assert torch.equal(kernels(threads=1).linear(weight, bias if biased else None)(x), whole)


@pytest.mark.parametrize("width", [64, 576, 72, 7])
def test_norms_and_activations_equal_plain_torch(width: int) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(200, width) * 3, torch.randn(width)
    ours = kernels()
    normed = ours.rms_norm(x, weight, 1e-5)
    assert (normed - TWIN.rms_norm(x, weight, 1e-5)).abs().max() < 1e-5
    assert torch.equal(ours.rms_norm(x[3:4], weight, 1e-5), normed[3:4])
    both = torch.randn(200, 2 * width) * 8
    opened = ours.gated(both, "silu")
    exact = torch.nn.functional.silu(both[:, :width].double()) * both[:, width:].double()
    assert ((opened - exact).abs() / (1 + exact.abs())).max() < 1e-6
    assert torch.equal(ours.gated(both[5:6].contiguous(), "silu"), opened[5:6])


def test_an_activation_with_extreme_gates_is_finite() -> None:
    gates = torch.tensor([[-1e30, -200.0, -88.0, -87.0, 0.0, 87.0, 88.0, 200.0, 1e30, 1.0]])
    both = torch.cat([gates, torch.ones_like(gates)], dim=1)
    expected = torch.nn.functional.silu(gates)
    found = kernels().gated(both, "silu")
    assert torch.isfinite(found).all()
    assert ((found - expected).abs() <= 1e-5 * (1 + expected.abs())).all()


BROKEN = 100  # the position whose value a test makes infinite


def attention_case(
    ops: Ops,
    spec: AttentionSpec,
    cuts: list[int],
    seed: int = 0,
    beside: int = 0,
    kept: torch.dtype = torch.float32,
    broken: float | None = None,
) -> torch.Tensor:
    """Compute the attention of one text in parts, with `beside` other rows in every step and a KV cache of dtype `kept`. `broken`
    replaces a value of the first KV head at position BROKEN."""
    generator = torch.Generator().manual_seed(seed)
    length, page_size = cuts[-1], 8
    per = -(-length // page_size)
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    qkv = torch.randn(length, width, generator=generator)
    if broken is not None:
        qkv[BROKEN, (spec.heads + spec.kv_heads) * spec.head_dim + 3] = broken
    norms = [torch.randn(spec.head_dim, generator=generator) if spec.qk_norm else None for _ in range(2)]
    store = PageStore(spec, pages=per * (1 + beside), page_size=page_size, dtype=kept, device=torch.device("cpu"))
    turns = rope_table(spec.rope, length, dtype=torch.float32, device=torch.device("cpu"))
    out = []
    for start, stop in itertools.pairwise(cuts):
        rows = [prompt_row(i, start, stop, range(i * per, (i + 1) * per)) for i in range(1 + beside)]
        inputs = make_inputs(
            Plan(tuple(rows)), layout=InputLayout(page_size, (per * (1 + beside),), RowRule(1)), device=torch.device("cpu")
        )
        part = torch.cat([qkv[start:stop] * (i + 1) for i in range(1 + beside)])
        prepared = ops.prepare_attention(inputs, spec, turns)
        mixed = prepared.attend(part, spec=spec, store=store, q_norm=norms[0], k_norm=norms[1], eps=1e-6)
        out.append(mixed[: stop - start])
    return torch.cat(out)


def prompt_row(number: int, start: int, stop: int, pages: range) -> Row:
    return Row(
        str(number), number, (tuple(pages),), start, (1,) * (stop - start), (), stop, False, SamplingParams(), History((1,))
    )


SPECS = {
    "grouped": AttentionSpec(heads=6, kv_heads=2, head_dim=16, rope=RopeSpec(1e4, 16), scale=0.25),
    "one head each": AttentionSpec(heads=2, kv_heads=2, head_dim=64, rope=RopeSpec(1e4, 64), scale=0.125),
    "window": AttentionSpec(heads=4, kv_heads=1, head_dim=32, rope=RopeSpec(1e4, 32), scale=0.2, window=21),
    "norms, odd width": AttentionSpec(heads=4, kv_heads=2, head_dim=20, rope=RopeSpec(1e4, 20), scale=0.2, qk_norm=True),
    "normed values": AttentionSpec(heads=4, kv_heads=2, head_dim=16, rope=RopeSpec(1e4, 16), scale=1.0, v_norm=True),
    "keys as values": AttentionSpec(
        heads=4,
        kv_heads=2,
        head_dim=16,
        rope=RopeSpec(1e4, 16, kind="proportional", rotated_pairs=3),
        scale=1.0,
        qk_norm=True,
        v_norm=True,
        keys_as_values=True,
    ),
    "partial rope": AttentionSpec(heads=2, kv_heads=1, head_dim=32, rope=RopeSpec(1e4, 8), scale=0.2),
}


@pytest.mark.parametrize("name", SPECS)
def test_attention_equals_plain_torch_and_chunks_change_no_bit(name: str) -> None:
    spec = SPECS[name]
    ours = kernels()
    whole = attention_case(ours, spec, [0, 150])
    assert (whole - attention_case(TWIN, spec, [0, 150])).abs().max() < 2e-5
    assert torch.equal(whole, attention_case(ours, spec, [0, 1, 40, 63, 64, 65, 130, 149, 150]))
    assert torch.equal(whole, attention_case(ours, spec, [0, 90, 150], beside=2))
    assert torch.equal(whole, attention_case(kernels(threads=1), spec, [0, 150]))


LONG = [0, 700, 701, 702, 900, 901]  # steps of one token, whose spans threads share, and prompts, whose tiles they share


@pytest.mark.parametrize("kept", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("name", ["grouped", "norms, odd width"])
def test_spans_that_threads_share_change_no_bit(name: str, kept: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[name]
    whole = attention_case(kernels(threads=1), spec, [0, 901], kept=kept)
    assert torch.equal(whole, attention_case(kernels(), spec, LONG, kept=kept))
    assert torch.equal(whole, attention_case(kernels(threads=5), spec, LONG, beside=1, kept=kept))
    monkeypatch.setattr(builder, "WAITING", 3 * spec.heads * (32 + 2))  # room for the results of two or three spans
    assert torch.equal(whole, attention_case(kernels(), spec, LONG, kept=kept))


def test_spans_that_are_merged_in_another_order_are_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Planted fault: threads that share a context merge its last span first."""
    folder = tmp_path / "sources"
    shutil.copytree(builder.FOLDER, folder)
    source = folder / "attention.c"
    right, wrong = "waiting(a, d, tokens, s), at, width)", "waiting(a, d, tokens, count - 1 - s), at, width)"
    assert right in source.read_text()
    source.write_text(source.read_text().replace(right, wrong))
    for name in ("ONCE", "SOURCES"):
        monkeypatch.setattr(builder, name, tuple(folder / file.name for file in getattr(builder, name)))
    monkeypatch.setattr(builder, "INSTRUCTION_SETS", {"portable": ()})  # the quickest to compile
    if builder.find_compiler() is None:
        pytest.skip("no C compiler")
    built = build(tmp_path)
    assert built.library is not None, built.reason
    spec = SPECS["grouped"]
    whole, shared = (attention_case(CpuOps(built.library, threads=n), spec, LONG) for n in (1, 2))
    assert torch.equal(whole[:700], shared[:700])
    assert not torch.equal(whole, shared)


def test_a_value_that_is_not_finite_reaches_only_the_queries_that_see_it() -> None:
    """Tokens of a tile multiply its values by zero where they do not attend to them, so no value may be stored that is not
    finite."""
    spec = SPECS["grouped"]
    for kept in (torch.float32, torch.float16, torch.bfloat16, torch.int8):
        clean = attention_case(kernels(), spec, [0, 150], kept=kept)
        for broken in (float("nan"), float("inf"), 1e38):
            found = attention_case(kernels(), spec, [0, 150], kept=kept, broken=broken)
            assert torch.equal(found[:BROKEN], clean[:BROKEN]), (kept, broken)
            if broken != 1e38 or kept == torch.float16:  # other dtypes hold this number
                assert found[BROKEN:, : 3 * spec.head_dim].isnan().all(), (kept, broken)


def test_a_sliding_window_changes_the_result() -> None:
    """Otherwise the test above could not detect a window that is ignored."""
    spec = SPECS["window"]
    open_view = dataclasses.replace(spec, window=None)
    assert not torch.allclose(attention_case(kernels(), spec, [0, 60]), attention_case(kernels(), open_view, [0, 60]))


def test_without_a_compiler_the_error_names_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(builder.shutil, "which", lambda name: None)
    assert "no C compiler" in build(tmp_path).reason


def test_a_failed_compilation_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("this is not C")
    monkeypatch.setattr(builder, "SOURCES", (broken,))
    assert "failed" in build(tmp_path / "cache").reason
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_two_processes_can_compile_the_library_at_once(tmp_path: Path) -> None:
    runs = [subprocess.Popen([sys.executable, "-c", BUILDS, str(tmp_path)], env=os.environ) for _ in range(2)]
    assert [run.wait(120) for run in runs] == [0, 0]
    assert sorted(file.suffix for file in (tmp_path / "kernels").iterdir()) == [".sha256", ".so"]


def test_a_very_negative_gate_gives_zero() -> None:
    """The exponential overflows float32; the sigmoid must still be 0."""
    gate = torch.tensor(
        [[-1e30, -1000.0, -200.0, -100.0, -90.0, -89.0, -88.0, -80.0, 80.0, 88.0, 89.0, 90.0, 1000.0, 1e30, 0.0, 1.0]]
    )
    found = kernels().gated(torch.cat([gate, torch.ones_like(gate)], 1), "silu")
    assert (found - torch.nn.functional.silu(gate)).abs().max() < 1e-5


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64])
def test_another_default_dtype_of_torch_changes_nothing(default: torch.dtype) -> None:
    """A buffer allocated in a 16-bit default dtype would be written past its end."""
    torch.manual_seed(5)
    weight, x, gates = torch.randn(64, 32), torch.randn(7, 32), torch.randn(7, 64)
    linear = kernels().linear(weight)
    product, gated = linear(x), kernels().gated(gates, "silu")
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        again = linear(x), kernels().gated(gates, "silu")
    finally:
        torch.set_default_dtype(before)
    assert all(found.dtype == torch.float32 for found in again)
    assert torch.equal(again[0], product)
    assert torch.equal(again[1], gated)


@pytest.mark.parametrize("left", [0, 1000, None])
def test_a_truncated_library_is_compiled_again(tmp_path: Path, left: int | None) -> None:
    """Loading it would crash the process."""
    if builder.find_compiler() is None:
        pytest.skip("no C compiler")
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", BUILDS, str(tmp_path)], capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stderr
        (file,) = (tmp_path / "kernels").glob("*.so")
        whole = file.read_bytes()
        assert len(whole) > 10_000
        file.write_bytes(whole[:left] if left is not None else whole[:5000] + bytes(5000) + whole[10_000:])
