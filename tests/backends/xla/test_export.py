"""`onedraw export` and IREE: whole generations, greedy and sampled, equal those of the xla backend."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.backends.xla.making import xla_backend

# isort: split
pytest.importorskip("iree.runtime", reason='an export is run by IREE: pip install "onedraw[xla]"')

from onedraw.backends.xla.iree import IreeBackend, IreeRuntime
from onedraw.build.checkpoint import read_text
from onedraw.build.engine_process import EngineProcess
from onedraw.build.llm import build_llm
from onedraw.build.xla import export_graphs
from onedraw.checkpoints.open import open_checkpoint
from onedraw.cli.main import main
from onedraw.errors import BadSetting, CorruptFile, ModelNotFound, Unsupported, UnsupportedModel
from onedraw.llm.llm import LLM
from onedraw.llm.reply import Reply
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.settings import Settings
from onedraw.text.chat_template import ChatTemplate
from onedraw.text.tokenizer import Tokenizer
from onedraw.types import Request, SamplingParams
from tests.laws.harness import Schedule, plain, run, same
from tests.support import tiny, tiny_modern


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of one layer, and its export."""
    place = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.COMMON, "num_hidden_layers", 1)
        model = tiny.write_safetensors("qwen2", place / "model")
    out = place / "graphs"
    assert main(["export", str(model), "--out", str(out), "--max-context", "256"]) == 0
    return model, out


def requests() -> list[Request]:
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(0, tiny.VOCAB, n).tolist()) for n in (150, 7, 40, 20, 33)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12),
        SamplingParams(temperature=1.0, seed=42, max_tokens=12),
        SamplingParams(temperature=0.8, seed=7, top_p=0.9, repetition_penalty=1.2, max_tokens=12),
        SamplingParams(temperature=0.0, logit_bias=((5, 2.0),), max_tokens=12),
        SamplingParams(temperature=1.2, seed=1, min_p=0.05, max_tokens=12),
    ]
    return [Request(f"r{i}", prompt, own) for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))]


def test_iree_generates_the_tokens_of_the_xla_backend(folders: tuple[Path, Path]) -> None:
    model, out = folders
    loaded = IreeBackend(out)
    got, stats = run(loaded, requests(), Schedule())
    expected, _ = run(xla_backend(model), requests(), Schedule())
    assert [answer.tokens for answer in got] == [answer.tokens for answer in expected]
    assert stats.middle_chunks > 0  # prompts longer than a step
    assert stats.mixed_steps > 0
    alone = [run(loaded, [request], Schedule())[0][0].tokens for request in requests()[:2]]
    assert alone == [answer.tokens for answer in got[:2]]


def test_the_manifest_lists_arguments_and_results_of_the_graphs(folders: tuple[Path, Path]) -> None:
    _, out = folders
    manifest = json.loads((out / "manifest.json").read_text())
    for graph in manifest["graphs"].values():
        assert (out / graph["file"]).read_text().count("stablehlo.while") > 0
        names = [argument["name"] for argument in graph["arguments"]]
        assert {"weights/head", "state/0/keys", "inputs/tokens", "picks"} <= set(names)
        assert [result["name"] for result in graph["results"]] == ["logits", "state/0/keys", "state/0/values"]
    assert manifest["family"] == "qwen2"


def test_graphs_contain_no_paths_of_this_machine(folders: tuple[Path, Path]) -> None:
    model, out = folders
    for name in ("prefill", "decode"):
        text = (out / f"{name}.mlir").read_text()
        assert "loc(" not in text
        assert '"/' not in text
        assert ".py" not in text
        assert str(model.parent) not in text
        assert "custom_call" not in text
    assert jax.config.read("jax_include_debug_info_in_dumps") is True


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4_e2b"])
def test_what_cannot_be_exported_is_rejected_before_anything_is_written(name: str, tmp_path: Path) -> None:
    model = tiny.write_safetensors(name, tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="cannot be exported: IREE does not"):
        export_graphs(Settings(model=str(model), backend="xla", max_context=256), tmp_path / "graphs", print)
    assert not (tmp_path / "graphs").exists()


@pytest.mark.parametrize(("name", "dtype"), [("qwen3_5", "f32"), ("qwen3_5_odd", "bf16")])
def test_an_export_computes_a_request_alone_as_in_a_batch(name: str, dtype: str, tmp_path: Path) -> None:
    """Recurrent states, and bf16: tokens and the bits of their scores are those of the request alone; in float32 the tokens are
    also those of the xla backend."""
    with pytest.MonkeyPatch.context() as patch:
        for sizes in (tiny_modern.QWEN3_5, tiny_modern.QWEN3_5_ODD):
            patch.setitem(sizes, "num_hidden_layers", 2)
            patch.setitem(sizes, "layer_types", ["linear_attention", "full_attention"])
        model = tiny.write_safetensors(name, tmp_path / "model")
    out = tmp_path / "graphs"
    assert main(["export", str(model), "--out", str(out), "--max-context", "256", "--dtype", dtype]) == 0
    loaded = IreeBackend(out)
    assert loaded.capacity.dtype == dtype
    assert loaded.report is not None
    assert loaded.report.passed, loaded.report.results
    asked = [replace(request, params=replace(request.params, checksums=True)) for request in requests()]
    alone = plain(lambda: loaded, asked)
    batched, stats = run(loaded, asked, Schedule(reuse=True, arrivals=(0, 0, 3, 4, 4)))
    assert same(batched, alone)
    assert min(stats.middle_chunks, stats.mixed_steps) > 0
    again, stats = run(loaded, [*asked, replace(asked[0], id="again")], Schedule(reuse=True, arrivals=(0, 0, 0, 0, 0, 40)))
    assert same(again[-1:], alone[:1])
    assert bool(stats.prefix_hits) != loaded.capacity.recurrent  # an export has no checkpoints of recurrent states
    if dtype == "f32":
        expected, _ = run(xla_backend(model), asked, Schedule())
        assert [answer.tokens for answer in alone] == [answer.tokens for answer in expected]


def test_an_unwritable_folder_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, _ = folders
    (tmp_path / "file").write_text("")
    with pytest.raises(BadSetting, match=r"--out .*graphs: Not a directory; name a writable folder"):
        export_graphs(Settings(model=str(model), backend="xla", max_context=256), tmp_path / "file" / "graphs", print)


def test_a_cached_compiled_graph_is_complete_or_missing(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, out = folders
    compiled = out / "decode.vmfb"
    compiled.unlink(missing_ok=True)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            IreeRuntime().load(out / "decode.mlir")
    assert not compiled.exists()
    assert callable(IreeRuntime().load(out / "decode.mlir"))
    assert compiled.exists()


def generation(llm: LLM, **options: Any) -> Reply:
    prompt = tuple(llm.tokenizer.encode("Hello there."))
    (reply,) = llm.run(make_generation(RequestOptions.of(max_tokens=12, **options), llm=llm, prompt=prompt))
    return reply


@pytest.mark.parametrize("start_engine", [None, EngineProcess], ids=["one process", "engine process"])
def test_an_export_is_served_with_the_replies_of_its_model(
    folders: tuple[Path, Path], start_engine: type[EngineProcess] | None
) -> None:
    """Tokenizer, chat template, end tokens and sampling defaults come from the export alone."""
    model, out = folders
    with build_llm(Settings(model=str(out)), start_engine=start_engine) as served:
        with build_llm(Settings(model=str(model), backend="xla", max_batch=4, max_context=256, draft=("none",))) as plain:
            assert served.tokenizer.fingerprint == plain.tokenizer.fingerprint
            assert (served.card.family, served.card.eos_ids) == (plain.card.family, plain.card.eos_ids)
            for options in ({"temperature": 0}, {"temperature": 1, "seed": 3, "top_p": 0.9, "logprobs": 2}):
                ours, theirs = generation(served, **options), generation(plain, **options)
                assert (ours.text, ours.token_ids) == (theirs.text, theirs.token_ids)
        with pytest.raises(Unsupported, match="prompt_logprobs: this backend returns") as refused:
            generation(served, prompt_logprobs=1)
        assert refused.value.code == "sampling_unsupported"


@pytest.mark.parametrize(
    ("name", "value"),
    [("kv_dtype", "int8"), ("draft", ("mtp",)), ("dtype", "bf16"), ("max_context", 99), ("devices", "cpu:0,cpu:1")],
)
def test_settings_that_an_export_has_decided_are_refused(folders: tuple[Path, Path], name: str, value: Any) -> None:
    _, out = folders
    with pytest.raises(BadSetting, match=f"--{name.replace('_', '-')}.*omit"):
        build_llm(Settings(model=str(out), **{name: value}))


def test_a_damaged_manifest_is_one_error(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}", '{"format": 4}'):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(CorruptFile, match="export the model again"):
            build_llm(Settings(model=str(tmp_path)))
    (tmp_path / "manifest.json").write_text('{"format": 2}')
    with pytest.raises(UnsupportedModel, match="has format 2"):
        build_llm(Settings(model=str(tmp_path)))


def test_a_tokenizer_of_a_gguf_file_is_saved_and_read_as_it_was(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(Path(__file__).parents[2] / "fixtures" / "gguf" / "llama.gguf")
    tokenizer, template = read_text(checkpoint)
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert (again.fingerprint, again.bos_id, again.eos_id) == (tokenizer.fingerprint, tokenizer.bos_id, tokenizer.eos_id)
    assert again.encode("Hello <s> there, ünï\n 12") == tokenizer.encode("Hello <s> there, ünï\n 12")
    if template is not None:
        template.save(tmp_path)
        restored = ChatTemplate.from_folder(tmp_path)
        assert restored is not None
        assert restored.source == template.source
    checkpoint.close()


def test_a_folder_without_an_export_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no manifest\.json"):
        IreeBackend(tmp_path)
