"""Settings: contradictory or unsupported values are rejected with a message that names the flag."""

from __future__ import annotations

from pathlib import Path

import pytest

from onedraw.errors import BadSetting
from onedraw.settings import Settings


@pytest.mark.parametrize("draft", [("auto",), ("none",), ("ngram",), ("prediction", "ngram")])
def test_draft_accepts_drafters_by_name(draft: tuple[str, ...]) -> None:
    assert Settings(draft=draft).draft == draft


def test_draft_accepts_paths(tmp_path: Path) -> None:
    file = tmp_path / "drafter.gguf"
    file.touch()
    assert Settings(draft=("ngram", str(file), str(tmp_path))).draft[1:] == (str(file), str(tmp_path))


def test_folders_may_be_given_as_strings() -> None:
    given = Settings.of(cache_dir="here", snapshot_dir="there", cache_budget=2**20)
    assert (given.cache_dir, given.snapshot_dir) == (Path("here"), Path("there"))


def test_a_single_drafter_may_be_given_without_a_list() -> None:
    assert Settings.of(draft="ngram") == Settings.of(draft=["ngram"]) == Settings(draft=("ngram",)).with_environment()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"draft": ("",)}, "'' is neither auto, none"),
        ({"draft": ("n-gram",)}, "'n-gram' is neither auto, none, ngram, prediction, mtp nor the path or hub id"),
        ({"draft": ("no/such/drafter.gguf",)}, "no/such/drafter.gguf"),
        ({"draft": ("none", "ngram")}, "none .* cannot be combined"),
        ({"draft": ()}, "none .* cannot be combined"),
        ({"draft_tokens": 0}, "--draft-tokens: must be at least 1, or auto, not 0; --draft none turns"),
        ({"tree_budget": -1}, "--tree-budget: must be 0"),
    ],
)
def test_invalid_drafting_settings_are_rejected(flags: dict[str, object], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        Settings(**flags)  # type: ignore[arg-type]


def test_environment_variables_set_dtypes_unless_a_flag_does() -> None:
    environment = {"ONEDRAW_ACTIVATION_DTYPE": "f16"}
    assert Settings().with_environment(environment).activation_dtype == "f16"
    assert Settings(activation_dtype="f32").with_environment(environment).activation_dtype == "f32"
    assert Settings().with_environment({"ONEDRAW_KV_DTYPE": "int8"}).kv_dtype == "int8"
    assert Settings(kv_dtype="fp8").with_environment({"ONEDRAW_KV_DTYPE": "int8"}).kv_dtype == "fp8"
    assert Settings().with_environment({"ONEDRAW_KV_DTYPE": "int8"}, given={"kv_dtype"}).kv_dtype == "auto"
    with pytest.raises(
        BadSetting, match=r"ONEDRAW_ACTIVATION_DTYPE.*--activation-dtype: 'fp8' is not one of auto, f32, bf16, f16"
    ):
        Settings().with_environment({"ONEDRAW_ACTIVATION_DTYPE": "fp8"})


def test_device_names_is_a_list_for_one_device_too() -> None:
    assert Settings(device="cuda:1").device_names == ["cuda:1"]
    assert Settings(devices="cuda:0, cuda:0,cpu").device_names == ["cuda:0", "cuda:0", "cpu"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"backend": "jax"}, "--backend: 'jax' is not one of torch, xla, fake"),
        ({"backend": "xla", "xla_platform": "gpu"}, "--xla-platform: 'gpu' is not one of auto, cpu, cuda, tpu"),
        ({"backend": "torch", "xla_platform": "cpu"}, "--xla-platform: needs --backend xla"),
        ({"backend": "xla", "dtype": "packed"}, "--dtype packed: the xla backend computes in f32 or bf16"),
        ({"backend": "xla", "dtype": "f16"}, "--dtype f16: the xla backend"),
        ({"backend": "xla", "activation_dtype": "f16"}, "--activation-dtype f16: the xla backend"),
        ({"backend": "xla", "kv_dtype": "int8"}, "--kv-dtype: the xla backend"),
        ({"kv_dtype": "int3"}, "--kv-dtype: 'int3' is not one of auto, f32, bf16, f16, fp8, int8, int4"),
        ({"backend": "xla", "threads": 2}, "--threads: XLA uses all available cores"),
        ({"backend": "xla", "overlap": "on"}, "--overlap on: the xla backend"),
        ({"backend": "xla", "draft": ("mtp",)}, "--draft mtp: the xla backend runs no device drafters"),
    ],
)
def test_settings_that_the_xla_backend_does_not_support_are_rejected(flags: dict[str, object], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        Settings(**flags)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"overlap": "on", "device": "cpu"}, "--overlap on: needs several --devices"),
        ({"overlap": "on", "devices": "cpu"}, "--overlap on: needs several --devices"),
        ({"snapshot_dir": Path("x")}, "--snapshot-dir: needs --cache-budget"),
        ({"backend": "fake", "devices": "cpu,cpu"}, "--devices: the fake backend"),
        ({"backend": "fake", "devices": "cpu,cpu", "split": "1,2"}, "--devices: the fake backend"),
    ],
)
def test_settings_without_effect_are_rejected(flags: dict[str, object], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        Settings(**flags)  # type: ignore[arg-type]


def test_an_absurd_batch_size_is_rejected() -> None:
    with pytest.raises(BadSetting, match="--max-batch: must be at most 65536"):
        Settings(max_batch=99_999_999_999)
