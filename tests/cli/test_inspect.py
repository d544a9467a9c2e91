"""`onedraw inspect`: a model's layers and memory, read from a few kilobytes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from onedraw.cli.inspect import in_words
from tests.cli.running import Terminal
from tests.support import tiny, tiny_modern
from tests.support.empty_checkpoint import write_empty_checkpoint

HIDDEN, WIDTH, HEADS, KV_HEADS, VOCAB, LAYERS = 32, 64, 4, 2, 96, 3


def config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 2,
        **changes,
    }


def tensors() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (kv, HIDDEN) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (WIDTH, HIDDEN) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, WIDTH)
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "tiny"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config()))
    (place / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6, "eos_token_id": [2, 7]}))
    (place / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE"}}))
    save_file(tensors(), place / "model.safetensors")
    return place


def test_the_object_describes_the_model(terminal: Terminal, folder: Path) -> None:
    report = terminal.json("inspect", str(folder))
    assert report["architecture"] == "llama"
    assert report["parameters"] == sum(t.size for t in tensors().values())
    assert (report["vocabulary"], report["context"], report["tied_head"]) == (VOCAB, 256, True)
    assert [layer["count"] for layer in report["layers"]] == [LAYERS]
    assert report["defaults"] == {"temperature": 0.6}
    assert report["eos_ids"] == [2, 7]
    assert report["tokenizer"] == "BPE in tokenizer.json"
    assert report["stored"] == {"F32": len(tensors())}


def test_the_memory_plan_follows_the_flags(terminal: Terminal, folder: Path) -> None:
    given = ("inspect", str(folder), "--dtype", "bf16", "--max-context", "64", "--max-batch", "3", "--page-size", "8")
    memory = terminal.json(*given)["memory"]
    [group] = memory["groups"]
    assert group["page_bytes"] == 2 * 8 * KV_HEADS * (HIDDEN // HEADS) * 2 * LAYERS
    assert group["pages"] == 3 * 8
    assert memory["weight_bytes"] == 2 * sum(t.size for t in tensors().values())
    assert memory["total_bytes"] == memory["weight_bytes"] + memory["kv_bytes"] + memory["checkpoints_bytes"]


def test_the_out_of_memory_error_states_the_bytes_needed(terminal: Terminal, folder: Path) -> None:
    assert terminal.run("inspect", str(folder), "--kv-memory", "1KiB", "--max-context", "256") == 1
    assert "one sequence of 256 tokens needs" in terminal.err


def test_the_table_has_the_same_facts(terminal: Terminal, folder: Path) -> None:
    assert terminal.run("inspect", str(folder)) == 0
    for fact in ("llama", "3 × attention (4 heads, 2 for keys and values, 8 wide", "temperature 0.6", "2, 7", "256 tokens"):
        assert fact in terminal.out


def test_a_tokenizer_that_cannot_be_rebuilt_is_reported(terminal: Terminal, tmp_path: Path) -> None:
    file = tiny.write_gguf("llama", tmp_path / "m.gguf")
    fine = terminal.json("inspect", str(file))["tokenizer"]
    assert "not supported" not in fine
    head, key, rest = file.read_bytes().partition(b"tokenizer.ggml.pre")
    size = int.from_bytes(rest[4:12], "little")
    file.write_bytes(head + key + rest[:12] + size * b"x" + rest[12 + size :])
    assert f"tokenizer.ggml.pre '{size * 'x'}' is not supported" in terminal.json("inspect", str(file))["tokenizer"]


def test_a_missing_tokenizer_is_reported(terminal: Terminal, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert terminal.json("inspect", str(folder))["tokenizer"].startswith("missing")


def test_an_unsupported_architecture_is_named(terminal: Terminal, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config(architectures=["ElsewhereForCausalLM"], model_type="elsewhere")))
    assert terminal.run("inspect", str(folder)) == 1
    assert "lsewhere" in terminal.err
    assert "llama" in terminal.err.lower()


def test_no_weight_is_loaded_and_no_torch(folder: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from onedraw.cli.main import main; "
        f"sys.exit(main(['inspect', {str(folder)!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] > 0


def test_the_drafters_are_listed(folder: Path, terminal: Terminal) -> None:
    assert terminal.json("inspect", str(folder))["drafts"][:2] == ["prediction", "ngram"]
    assert terminal.json("inspect", str(folder), "--draft", "ngram", "--draft", str(folder))["drafts"] == ["ngram", str(folder)]
    assert terminal.run("inspect", str(folder), "--draft", "none") == 0
    assert "none: --draft none" in terminal.out


@pytest.mark.parametrize(
    ("name", "index", "words"),
    [
        ("qwen3_5", 0, ["Gated DeltaNet (2 key heads 16 wide, 6 value heads 16 wide, convolution over 4)", "(160 wide, silu)"]),
        (
            "qwen3_5_moe",
            3,
            ["over 8 of 32", "sigmoid gate per element", "2 of 8 experts (32 wide", "a shared expert (48 wide, gated)"],
        ),
        ("gemma4_31b", 5, ["rope 1e+06 proportional", "values are keys before norm and rope", "norms before and after, scaled"]),
        ("gemma4_26b", 0, ["window 24", "feed-forward (104 wide, gelu_tanh) + in parallel 2 of 8 experts (24 wide"]),
        ("gemma4_e4b", 4, ["normed q, keys and values of layer 3", "per-layer input (16 wide)"]),
        ("laguna", 1, ["6 heads", "softplus gate per head", "sigmoid routing) and a shared expert (48 wide)"]),
        ("laguna", 0, ["rope 500000 yarn over 8 of 16", "feed-forward (104 wide, silu)"]),
    ],
)
def test_every_kind_of_layer_is_described(name: str, index: int, words: list[str]) -> None:
    report = in_words(tiny_modern.spec(name).layers[index])
    assert [word for word in words if word not in report] == []


def test_devices_that_are_only_described_are_planned_for(folder: Path, terminal: Terminal) -> None:
    given = ("inspect", str(folder), "--devices", "cuda/sm86/24GiB,cuda/sm86/24GiB", "--max-context", "256")
    report = terminal.json(*given)
    first, second = report["stages"]
    assert (first["start"], first["stop"], second["start"], second["stop"]) in ((0, 1, 1, 3), (0, 2, 2, 3))
    assert report["activation_dtype"] == report["memory"]["dtype"] == "bf16"
    assert all(0 < stage["staging_bytes"] <= 64 * 2**20 for stage in (first, second))
    assert all(stage["total_bytes"] < stage["device"]["memory"] <= 24 * 2**30 for stage in (first, second))
    pages = sum(group["page_bytes"] * (group["pages"] + 1) for group in report["memory"]["groups"])
    assert first["page_bytes"] + second["page_bytes"] == pages
    assert terminal.run(*given) == 0
    assert "layers 0–" in terminal.out
    assert "stagings" in terminal.out


def test_the_weakest_device_decides_the_dtype_of_all(folder: Path, terminal: Terminal) -> None:
    given = ("inspect", str(folder), "--devices", "cuda/sm86/24GiB,cuda/sm75/8GiB", "--split", "2,1")
    assert terminal.json(*given)["activation_dtype"] == "f16"
    assert terminal.json(*given, "--activation-dtype", "bf16")["activation_dtype"] == "bf16"
    assert [s["stop"] for s in terminal.json(*given)["stages"]] == [2, 3]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--devices", "cuda/sm86/0.2MiB,cuda/sm86/0.2MiB"), "too many"),
        (("--devices", "cpu,tpu"), "'tpu' is not a device"),
        (("--devices", "cpu,cpu", "--split", "3,1"), "the nearest that does is 2,1"),
        (("--devices", "cpu,cpu", "--device", "cpu"), "give one of them"),
        (("--split", "2,1"), "needs --devices"),
    ],
)
def test_an_impossible_split_is_refused(folder: Path, terminal: Terminal, given: tuple[str, ...], message: str) -> None:
    assert terminal.run("inspect", str(folder), *given) != 0
    assert message in terminal.err


def test_packed_and_converted_weights_are_listed(terminal: Terminal, tmp_path: Path) -> None:
    file = tiny.write_gguf("llama", tmp_path / "tiny.gguf", kind="Q8_0")
    report = terminal.json("inspect", str(file), "--device", "cpu", "--json")
    assert report["memory"]["dtype"] == "packed"
    assert report["holding"]["packed"]["kept"] == [["Q8_0", 22]]
    assert report["holding"]["packed"]["converted"] == []
    assert report["memory"]["weight_bytes"] < report["parameters"] * 2
    assert terminal.run("inspect", str(file), "--device", "cpu") == 0
    assert "Q8_0 × 22; norms and biases are f32" in terminal.out
    assert terminal.json("inspect", str(file), "--device", "cpu", "--dtype", "f32", "--json")["holding"] == {}


def test_a_27b_model_in_four_bits_fits_a_card_of_24_gib(terminal: Terminal) -> None:
    model = ("inspect", "random:qwen3.6-27b-q4_k_m", "--devices", "cuda/sm86/24GiB", "--max-batch", "1")
    report = terminal.json(*model, "--max-context", "32768", "--json")
    assert report["memory"]["dtype"] == "packed-bf16"
    assert report["memory"]["kv_dtype"] == "bf16"
    assert 15e9 < report["memory"]["weight_bytes"] < 17.5e9
    assert report["stages"][0]["total_bytes"] < 24 * 2**30
    assert report["holding"]["packed-bf16"]["converted"] == []
    assert report["turns"]["opened"] == 256 << 20
    assert report["turns"]["parts"] == 160 << 20  # of a head that would take 303 MiB at 64 rows
    assert terminal.run(*model, "--max-context", "32768") == 0
    assert "dequantized weights 256.0 MiB, partial sums of packed products 160.0 MiB, CUDA graphs 512.0 MiB" in terminal.out


def test_if_the_context_does_not_fit_the_longest_that_does_is_stated(terminal: Terminal) -> None:
    model = ("inspect", "random:qwen3.6-27b-q4_k_m", "--devices", "cuda/sm86/24GiB", "--max-context", "131072")
    assert terminal.run(*model) != 0
    found = re.search(r"--max-context (\d+) fits here, (\d+) with --kv-dtype int8", terminal.err)
    assert found is not None
    assert 40_000 < int(found[1]) < int(found[2]) < 131_072
    assert terminal.run(*model, "--dtype", "bf16") != 0
    assert "no context fits here" in terminal.err
    assert " 0 with" not in terminal.err
    assert "sequence of 0 tokens" not in terminal.err


def test_the_longest_context_that_fits_is_stated_with_and_without_a_drafter(terminal: Terminal) -> None:
    """Without --draft, a drafter made for this shape is planned with."""
    model = ("inspect", "random:qwen3.6-27b-q4_k_m", "--devices", "cuda/sm86/24GiB")
    fits = {(fit["kv_dtype"], bool(fit["drafter"])): fit["context"] for fit in terminal.json(*model, "--json")["fits"]}
    assert fits["int8", False] > 131_072 > fits["bf16", False] > fits["bf16", True] > 32_768
    assert fits["int8", False] > fits["int8", True] > fits["bf16", True]
    assert fits["int4", True] > 131_072
    given = ("--max-batch", "1")
    assert terminal.run(*model, *given, "--max-context", str(fits["bf16", False])) == 0
    assert terminal.run(*model, *given, "--max-context", str(fits["bf16", False] + 64)) != 0
    assert "with random:qwen3.6-27b-dflash-q4_k_m" in terminal.err


def test_a_dtype_of_keys_and_values_is_planned_with_its_scales(terminal: Terminal) -> None:
    model = (
        "inspect",
        "random:qwen3.6-27b-q4_k_m",
        "--devices",
        "cuda/sm86/24GiB",
        "--max-batch",
        "1",
        "--max-context",
        "131072",
    )
    report = terminal.json(*model, "--kv-dtype", "int8", "--json")["memory"]
    assert report["kv_dtype"] == "int8"
    [group] = report["groups"]
    attending, kv_heads, dim = 16, 4, 256
    assert group["page_bytes"] == 16 * attending * 2 * kv_heads * (dim + 4)
    assert terminal.run(*model, "--kv-dtype", "int8") == 0
    assert "int8: 32.5 KiB per position, with scales" in terminal.out
    assert terminal.run(*model, "--kv-dtype", "fp8") != 0
    assert "--kv-dtype fp8: cuda/sm86/24GiB (sm86) has no fp8 conversion" in terminal.err
    ada = ("inspect", "random:qwen3.6-27b-q4_k_m", "--devices", "cuda/sm89/24GiB", "--max-context", "131072")
    assert terminal.run(*ada) != 0
    assert re.search(r" with --kv-dtype int8 or fp8 and \d+ with --kv-dtype int4", terminal.err)
    report = terminal.json(*model, "--kv-dtype", "int4", "--json")["memory"]
    assert report["groups"][0]["page_bytes"] == 16 * attending * 2 * kv_heads * (dim // 2 + 4)


CARDS = ("--devices", "cuda/sm86/24GiB,cuda/sm86/24GiB", "--max-context", "262144")


def test_a_long_context_over_two_described_cards_is_planned(terminal: Terminal, tmp_path: Path) -> None:
    report = terminal.json("inspect", str(write_empty_checkpoint("Qwen3.5-0.8B", tmp_path / "hf")), *CARDS)
    first, second = report["stages"]
    assert (first["start"], first["stop"], second["stop"]) == (0, second["start"], 24)
    assert all(2 * 2**30 < stage["total_bytes"] <= 0.95 * 24 * 2**30 for stage in (first, second))
    table = 248320 * 1024 * 2
    assert all(stage["weight_bytes"] > table for stage in (first, second))  # the tied head is copied to the second card
    assert report["memory"]["max_context"] == 262144
    assert report["activation_dtype"] == "bf16"
    rows = 1024 + 64  # of a step and a chunk, not of the context
    assert first["staging_bytes"] == second["staging_bytes"] == rows * 2 * 1024 * 2 < 64 * 2**20


def test_if_a_split_does_not_fit_the_error_states_what_would(terminal: Terminal, tmp_path: Path) -> None:
    folder = str(write_empty_checkpoint("Qwen3.6-27B", tmp_path / "hf"))
    assert terminal.run("inspect", folder, *CARDS) != 0
    assert "too many. Lower --max-context, --max-batch or --kv-memory" in terminal.err
    assert "no context fits here" in terminal.err  # 54 GB of weights on 48
    larger = ("--devices", "cuda/sm86/32GiB,cuda/sm86/32GiB", "--max-batch", "2")
    assert terminal.run("inspect", folder, *larger, "--max-context", "262144") != 0
    (context,) = re.findall(r"--max-context (\d+) fits here", terminal.err)
    report = terminal.json("inspect", folder, *larger, "--max-context", context)
    assert report["memory"]["max_context"] == int(context)
    assert terminal.run("inspect", folder, *larger, "--max-context", str(int(context) + 64)) != 0


def test_the_xla_backend_lists_its_programs(terminal: Terminal, tmp_path: Path) -> None:
    known = tiny.write_safetensors("qwen3", tmp_path / "qwen3")
    assert terminal.run("inspect", str(known), "--backend", "xla", "--max-batch", "5", "--json") == 0
    report = json.loads(terminal.out)
    assert report["compiled_turns"] == ["8 single tokens", "up to 576 tokens of any rows"]
    assert report["memory"]["dtype"] == "f32"
    there = ("--backend", "xla", "--max-batch", "5", "--devices", "cuda/sm90/80GiB")
    assert terminal.json("inspect", str(known), *there)["compiled_turns"][0] == "64 single tokens"


def test_several_cards_get_the_longest_context_that_fits_their_memory(terminal: Terminal) -> None:
    reports = []
    for devices in ("cuda/sm86/24GiB", "cuda/sm86/24GiB,cuda/sm86/24GiB"):
        assert terminal.run("inspect", "random:qwen3.6-27b-q4_k_m", "--devices", devices, "--json") == 0
        reports.append(json.loads(terminal.out))
    one, two = (report["memory"]["max_context"] for report in reports)
    assert two > 4 * one
    assert all(stage["total_bytes"] <= stage["device"]["memory"] for stage in reports[1]["stages"])


def test_several_cards_with_little_memory_get_a_short_context(terminal: Terminal) -> None:
    given = ("inspect", "random:qwen3.6-27b-q4_k_m", "--devices", "cuda/sm86/11GiB,cuda/sm86/11GiB", "--draft", "none", "--json")
    report = terminal.json(*given)
    assert 4096 < report["memory"]["max_context"] < 32_768


def test_the_bytes_of_a_drafter_are_part_of_the_total(terminal: Terminal) -> None:
    given = ("inspect", "random:qwen3.6-27b-q4_k_m", "--devices", "cuda/sm86/24GiB", "--max-context", "16384", "--json")
    totals = []
    for draft in ("none", "random:qwen3.6-27b-dflash-q4_k_m"):
        assert terminal.run(*given, "--draft", draft) == 0
        report = json.loads(terminal.out)
        memory = report["memory"]
        totals.append((memory["drafter_bytes"], memory["total_bytes"] - memory["drafter_bytes"]))
        assert abs(memory["total_bytes"] - sum(stage["total_bytes"] for stage in report["stages"])) < 1 << 22
    assert totals[0][0] == 0
    assert totals[1][0] > 10**9


def test_a_built_in_model_shows_what_its_authors_recommend(terminal: Terminal, tmp_path: Path) -> None:
    """Found by the file name of the built-in model, so its path has the same defaults as its short name."""
    file = tiny.write_gguf("llama", tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert terminal.json("inspect", str(file))["defaults"] == {"temperature": 0.2, "top_p": 0.9}
    other = file.rename(tmp_path / "another.gguf")
    assert terminal.json("inspect", str(other))["defaults"] == {}
