"""The xla backend: arrays freed on close, the self-check with small sizes, progress, identity, programs that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from jaxlib.version import __version__ as jaxlib_version

from tests.backends.xla.making import xla_backend

# isort: split
from onedraw.backends.devices import cpu_features_digest, cpu_model
from onedraw.backends.xla import backend as backend_module
from onedraw.backends.xla.inputs import XlaInputs
from onedraw.backends.xla.model import XlaStage
from onedraw.backends.xla.sampler import XlaTokenCounts
from onedraw.types import Row
from tests.laws.harness import KnownAnswerProposer, Schedule, plain, run, same
from tests.laws.test_xla import conversation
from tests.support import tiny


@pytest.mark.parametrize("cuts", [(), (2,)])
def test_closing_a_backend_frees_all_arrays(cuts: tuple[int, ...], tmp_path: Path) -> None:
    """jax caches traced functions; these must not keep weights or pages alive."""
    path = tiny.write_safetensors("qwen3", tmp_path / "model")
    before = {id(array) for array in jax.live_arrays()}
    backend = xla_backend(path, cuts=cuts)
    run(backend, conversation()[:2], Schedule())
    arrays = [array for array in jax.live_arrays() if id(array) not in before]
    assert len(arrays) > 20
    del arrays
    backend.close()
    assert [array.shape for array in jax.live_arrays() if id(array) not in before] == []


@pytest.mark.parametrize("step_tokens", [1, 64])
def test_the_self_check_runs_with_a_small_token_budget(step_tokens: int, tmp_path: Path) -> None:
    path = tiny.write_safetensors("qwen2", tmp_path / "model")
    backend = xla_backend(path, step_tokens=step_tokens, check=True)
    assert backend.report is not None
    assert len(backend.report.results) == 3
    assert backend.report.passed
    answers, _ = run(backend, conversation()[:2], Schedule())
    assert all(answer.tokens for answer in answers)


@pytest.mark.parametrize("max_context", [1, 2, 3])
def test_a_context_too_short_for_the_self_check_is_not_an_error(max_context: int, tmp_path: Path) -> None:
    path = tiny.write_safetensors("qwen2", tmp_path / "model")
    report = xla_backend(path, max_context=max_context, check=True).report
    assert report is not None
    assert report.passed
    assert bool(report.results) == (max_context >= 3)


def test_progress_counts_loaded_layers_over_all_stages(tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    path = tiny.write_safetensors("qwen2", tmp_path / "model")
    xla_backend(path, cuts=(1,), progress=lambda done, layers: progress.append((done, layers)))
    assert progress == [(1, 3), (2, 3), (3, 3)]


def test_the_identity_names_the_cpu_and_both_libraries(tmp_path: Path) -> None:
    identity = xla_backend(tiny.write_safetensors("qwen2", tmp_path / "model")).identity
    assert f"cpu {cpu_model()} (vectors {cpu_features_digest()})" in identity
    assert f"jax {jax.__version__}, jaxlib {jaxlib_version}" in identity


@pytest.mark.parametrize(("owner", "program"), [(XlaStage, "run"), (XlaStage, "commit"), (XlaTokenCounts, "follow")])
def test_no_reply_ends_or_changes_when_a_program_fails(
    owner: Any, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that fails has taken its donated arrays, and has returned none in their place."""
    requests = conversation()[:4]
    backend = xla_backend(tiny.write_safetensors("qwen3_5_odd", tmp_path / "model"))
    expected = plain(lambda: backend, requests)
    proposer = KnownAnswerProposer({r.id: a.tokens for r, a in zip(requests, expected, strict=True)}, tiny.VOCAB)
    real, calls = getattr(owner, program), Counter[str]()

    def failing(self: Any, *given: Any) -> Any:
        before = dict(vars(self))
        found = real(self, *given)
        calls["all"] += 1
        if calls["all"] % 4 == 3 and calls["failed"] < 3:
            calls["failed"] += 1
            vars(self).update({name: before[name] for name in ("state", "output", "prompt") if name in before})
            raise RuntimeError("planted")
        return found

    monkeypatch.setattr(owner, program, failing)
    got, stats = run(backend, requests, Schedule(proposer=proposer, reuse=True))
    assert stats.state_losses == calls["failed"] == 3
    assert same(got, expected)


def test_an_error_that_takes_no_state_ends_only_the_requests_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = xla_backend(tiny.write_safetensors("qwen3", tmp_path / "model"))
    requests = conversation()[:2]
    expected = plain(lambda: backend, requests)
    real = backend_module.make_inputs

    def failing(rows: Sequence[Row], *given: Any, **named: Any) -> XlaInputs:
        if rows[0].request_id == requests[0].id:
            raise RuntimeError("planted")
        return real(rows, *given, **named)

    monkeypatch.setattr(backend_module, "make_inputs", failing)
    got, stats = run(backend, requests, Schedule(arrivals=(0, 9)))
    assert [answer.error for answer in got] == ["internal_error", None]
    assert same(got[1:], expected[1:])
    assert stats.state_losses == 0
