"""The xla backend: arrays freed on close, the self-check with small sizes, progress, identity."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from jaxlib.version import __version__ as jaxlib_version

from tests.backends.xla.making import xla_backend

# isort: split
from onedraw.backends.devices import cpu_features_digest, cpu_model
from tests.laws.harness import Schedule, run
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
