"""build_llm: model name, rejected settings, packed weights on CPU and GPU, cleanup after a failed start."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from onedraw.backends.devices import Device
from onedraw.backends.placement import SplitPlan
from onedraw.backends.torch import device
from onedraw.build import llm as build
from onedraw.build.llm import build_llm, report_layers
from onedraw.checkpoints.open import open_checkpoint
from onedraw.errors import BadSetting, OutOfMemory, UnsupportedModel
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.models.registry import read_model_info
from onedraw.settings import Settings
from tests.support import tiny


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-0.5B-Instruct", "smollm2"])
def test_a_model_is_served_under_its_given_name(name: str) -> None:
    with build_llm(Settings(model=name, backend="fake")) as llm:
        assert llm.card.name == name


@pytest.mark.parametrize(("path", "name"), [("tiny-v1.5.gguf", "tiny-v1.5"), ("folder-0.6B", "folder-0.6B")])
def test_a_path_is_served_under_its_last_part(tmp_path: Path, path: str, name: str) -> None:
    (tmp_path / path).touch()
    with build_llm(Settings(model=str(tmp_path / path), backend="fake")) as llm:
        assert llm.card.name == name


def test_kv_memory_for_less_than_one_sequence_is_rejected_at_start() -> None:
    with pytest.raises(OutOfMemory, match="needs 4 pages"):
        build_llm(Settings(backend="fake", max_context=64, kv_memory=3))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_a_state_dtype_that_would_change_answers_is_rejected_at_start(dtype: str) -> None:
    with pytest.raises(BadSetting, match=rf"--state-dtype: {dtype} is not supported for the states of recurrent layers"):
        build_llm(Settings(backend="fake", state_dtype=dtype))


def test_the_fake_backend_rejects_a_kv_dtype() -> None:
    with pytest.raises(BadSetting, match="--kv-dtype: the fake backend has no keys and values"):
        build_llm(Settings(backend="fake", kv_dtype="int8"))


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "packed-kv-f16"),
        ({"kv_dtype": "f32"}, "packed"),
        ({"cpu_activations": "f32"}, "packed-f32"),
        ({"dtype": "f32"}, "f32"),
        ({"kv_dtype": "int8"}, "packed-kv-int8"),
        ({"devices": "cpu,cpu", "split": "1,2"}, "packed-kv-f16"),
    ],
)
def test_a_packed_file_stays_packed_on_a_cpu_by_default(tmp_path: Path, changes: dict[str, Any], dtype: str) -> None:
    file = tiny.write_gguf("llama31", tmp_path / "tiny.gguf", kind="Q8_0")
    place = {"device": "cpu"} if "devices" not in changes else {}
    with build_llm(Settings(model=str(file), draft=("none",), **place, **changes)) as llm:
        if "torch" in llm.card.device:
            pytest.skip("no C compiler")
        assert llm.card.dtype == dtype.partition("-kv-")[0]
        assert f"-{dtype}-c" in llm.card.fingerprint
        options = RequestOptions(temperature=0.0, max_tokens=8, ignore_eos=True, seed=1, checksums=True)
        (reply,) = llm.run(make_generation(options, llm=llm, prompt=(5, 6, 7)))
    assert len(reply.tokens) == 8


def test_packed_weights_give_the_same_answer_on_one_device_and_on_two(tmp_path: Path) -> None:
    file = tiny.write_gguf("llama", tmp_path / "tiny.gguf", kind="Q4_1")
    found = []
    for where in ({"device": "cpu"}, {"devices": "cpu,cpu", "split": "1,2"}, {"device": "cpu", "threads": 1}):
        with build_llm(Settings(model=str(file), draft=("none",), **where)) as llm:
            options = RequestOptions(temperature=1.0, max_tokens=12, ignore_eos=True, seed=3, checksums=True)
            found += llm.run(make_generation(options, llm=llm, prompt=tuple(range(5, 40))))
    assert [(c.token, c.checksum) for c in found[0].tokens] == [(c.token, c.checksum) for c in found[1].tokens]
    assert [(c.token, c.checksum) for c in found[0].tokens] == [(c.token, c.checksum) for c in found[2].tokens]


def test_a_failed_start_leaves_no_thread_running(tmp_path: Path) -> None:
    model, bad = tiny.write_safetensors("llama", tmp_path / "m"), tiny.write_safetensors("qwen3_5", tmp_path / "bad")
    before = set(threading.enumerate())
    with pytest.raises(UnsupportedModel, match="cannot draft"):
        build_llm(Settings(model=str(model), devices="cpu,cpu", overlap="on", dtype="f32", draft=(str(bad),)))
    assert {thread.name for thread in set(threading.enumerate()) - before} <= {"onedraw-engine"}  # it may still be ending


@pytest.mark.parametrize("below", ["", "under/it"])
def test_an_unusable_snapshot_folder_is_rejected_before_loading(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    flags: dict[str, Any] = {"cache_budget": 10**6, "snapshot_dir": tmp_path / "file" / below}
    for settings in (Settings(backend="fake", **flags), Settings(model=str(tmp_path / "no-model"), **flags)):
        with pytest.raises(BadSetting, match=r"--snapshot-dir: .* cannot be used .*; name a writable folder"):
            build_llm(settings)


def test_loading_many_layers_reports_every_quarter() -> None:
    lines: list[str] = []
    for done in range(1, 65):
        report_layers(lines.append, done, 64)
    assert lines == ["loaded 16 of 64 layers", "loaded 32 of 64 layers", "loaded 48 of 64 layers"]
    report_layers(lines.append, 2, 4)
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("why", "dtype"), [("", "packed-bf16"), ("torch is built for CUDA 13.0, the installed NVRTC is 12.8", "bf16")]
)
def test_packed_weights_are_dequantized_with_a_warning_if_a_gpu_has_no_kernels_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str, dtype: str
) -> None:
    """The dtype is decided before anything is allocated."""
    seen: list[str] = []
    caplog.set_level(logging.WARNING, logger="onedraw")  # a server of another test may have silenced the logger

    def stop(settings: Settings, split: SplitPlan, **given: Any) -> None:
        seen.extend(stage.dtype for stage in split.stages)
        raise StopAsyncIteration

    monkeypatch.setattr(device, "find_devices", lambda names: [Device("cuda:0", "cuda", "sm90", 8 * 2**30)])
    monkeypatch.setattr(device, "why_no_gpu_kernels", lambda: why)
    monkeypatch.setattr(build, "_stage_devices", stop)
    checkpoint = open_checkpoint(tiny.write_gguf("llama31", tmp_path / "tiny.gguf", kind="Q8_0"))
    with pytest.raises(StopAsyncIteration):
        build.torch_backend(Settings(draft=("none",)), read_model_info(checkpoint), print, None)
    assert seen == [dtype]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ([f"packed weights are dequantized to bf16, because their kernels cannot run: {why}"] if why else [])
