"""The GGUF reader: compared with the gguf package on converted models, and on broken files of every kind."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.checkpoints.gguf import GgufCheckpoint
from onedraw.errors import CorruptFile, ModelError, UnsupportedModel
from tests.support.count_calls import count_calls

FIXTURES = Path(__file__).parent.parent / "fixtures" / "gguf"
CONVERTED = [path for path in sorted(FIXTURES.glob("*.gguf")) if not path.stem.startswith("dflash")]


@pytest.mark.parametrize("path", CONVERTED, ids=lambda path: path.stem)
def test_a_converted_model_reads_like_the_gguf_package_reads_it(path: Path) -> None:
    ours, expected_file = GgufCheckpoint(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in expected_file.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert list(ours.tensors) == [tensor.name for tensor in expected_file.tensors]
    for tensor in expected_file.tensors:
        stored = ours.tensors[tensor.name]
        assert (stored.kind, stored.shape) == (tensor.tensor_type.name, tuple(tensor.shape.tolist())[::-1])
        np.testing.assert_array_equal(stored.data, np.asarray(tensor.data).view(np.uint8).reshape(-1))


def test_the_gguf_fixtures_exist() -> None:
    modern = ["gemma4_26b", "gemma4_31b", "gemma4_e4b", "laguna", "llama", "llama31", "qwen3", "qwen3_5", "qwen3_5_moe"]
    assert [path.stem for path in CONVERTED] == modern


def write(path: Path, *, tensors: int = 3, alignment: int | None = None, **extra: int) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in extra.items():
        writer.add_uint32(key.replace("__", "."), value)
    writer.add_array("words", ["a", "wörd", "", "𝄞"])
    writer.add_array("flags", [True, False, True])
    writer.add_array("scores", [0.5, -1.0])
    for index in range(tensors):
        values = np.random.default_rng(index).normal(size=(4, 32)).astype(np.float32)
        writer.add_tensor(f"part{index}.weight", gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_arrays_keep_their_types_and_alignment_is_respected(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write(tmp_path / "a.gguf", alignment=256))
    assert checkpoint.metadata["words"] == ["a", "wörd", "", "𝄞"]
    assert checkpoint.metadata["flags"] == [True, False, True]
    assert checkpoint.metadata["scores"] == [0.5, -1.0]
    expected_file = gguf.GGUFReader(tmp_path / "a.gguf")
    for tensor in expected_file.tensors:
        np.testing.assert_array_equal(checkpoint.tensors[tensor.name].data, tensor.data.reshape(-1))


def test_a_truncated_file_is_corrupt(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf").read_bytes()
    end = max(t.data_offset + t.n_bytes for t in gguf.GGUFReader(tmp_path / "whole.gguf").tensors)
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, end, 7), end - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CorruptFile, match=r"cut\.gguf"):
            GgufCheckpoint(cut)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    data = path.read_bytes()
    at = data.index(b"part1.weight") + len(b"part1.weight") + 4 + 2 * 8 + 4  # after name, dimensions and type
    assert int.from_bytes(data[at : at + 8], "little") == 160
    path.write_bytes(data[:at] + (128).to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(CorruptFile, match=r"the byte ranges of tensors part0\.weight and part1\.weight overlap"):
        GgufCheckpoint(path)


def test_the_error_about_a_truncated_file_names_the_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "short.gguf")
    last = gguf.GGUFReader(path).tensors[-1]
    path.write_bytes(path.read_bytes()[: last.data_offset + 100])
    with pytest.raises(CorruptFile, match=r"short\.gguf: tensor part2\.weight ends 36 bytes beyond the end"):
        GgufCheckpoint(path)


@settings(max_examples=300, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_flipped_byte_of_the_header_raises_only_model_errors(
    tmp_path_factory: pytest.TempPathFactory, place: float, value: int
) -> None:
    whole = bytearray((FIXTURES / "llama.gguf").read_bytes())
    header = len(whole) - sum(tensor.nbytes for tensor in GgufCheckpoint(FIXTURES / "llama.gguf").tensors.values())
    whole[int(place * header)] = value
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(whole)
    with contextlib.suppress(ModelError):  # most flips are valid: text, counts that still fit
        GgufCheckpoint(path)


@pytest.mark.parametrize(
    ("version", "words"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")], ids=["old", "new", "swapped"]
)
def test_other_versions_are_refused_by_name(tmp_path: Path, version: int, words: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0) + bytes(64))
    with pytest.raises(UnsupportedModel, match=words):
        GgufCheckpoint(path)


def test_another_file_format_named_gguf_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptFile, match="does not begin with GGUF"):
        GgufCheckpoint(path)


# ------------------------------------------------------------------ split files


def split(folder: Path) -> list[Path]:
    """One model in two files: the first has the metadata, both have tensors."""
    parts = [folder / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    write(parts[0], tensors=2, split__count=2, split__no=0, split__tensors__count=3)
    writer = gguf.GGUFWriter(str(parts[1]), "llama")
    writer.add_uint16("split.count", 2)
    writer.add_uint16("split.no", 1)
    writer.add_tensor("part2.weight", np.arange(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return parts


def test_a_split_model_opens_from_any_of_its_parts(tmp_path: Path) -> None:
    for part in split(tmp_path):
        checkpoint = GgufCheckpoint(part)
        assert list(checkpoint.tensors) == ["part0.weight", "part1.weight", "part2.weight"]
        assert checkpoint.metadata["words"] == ["a", "wörd", "", "𝄞"]
        np.testing.assert_array_equal(checkpoint.tensors["part2.weight"].float32(), np.arange(8))


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    second.unlink()
    with pytest.raises(CorruptFile, match=r"big-00002-of-00002\.gguf: the file is missing"):
        GgufCheckpoint(first)


@pytest.mark.parametrize("name", ["m-00000-of-00000.gguf", "m-00000-of-00002.gguf", "m-00003-of-00002.gguf"])
def test_an_impossible_part_number_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, tensors=1)
    with pytest.raises(CorruptFile, match=name):
        GgufCheckpoint(tmp_path / name)


def test_a_renamed_part_is_not_opened_as_the_model(tmp_path: Path) -> None:
    lone = split(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(CorruptFile, match="one of 2 parts"):
        GgufCheckpoint(lone)


# ------------------------------------------------------------------ fingerprint and speed


def test_the_fingerprint_changes_with_the_weights(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    first = GgufCheckpoint(path).fingerprint()
    assert GgufCheckpoint(path).fingerprint() == first
    changed = bytearray(path.read_bytes())
    changed[gguf.GGUFReader(path).tensors[1].data_offset + 70] ^= 1
    path.write_bytes(changed)
    assert GgufCheckpoint(path).fingerprint() != first
    assert GgufCheckpoint(write(path, tensors=2)).fingerprint() != first


def test_a_large_vocabulary_is_parsed_with_three_calls_per_token(tmp_path: Path) -> None:
    """The gguf package takes 19 s for this, our reader 0.1 s."""
    words = [f"word{index}".encode() for index in range(262_144)]
    blob = b"".join(struct.pack("<Q", len(word)) + word for word in words)
    key = b"tokenizer.ggml.tokens"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(header + struct.pack("<IIQ", 9, 8, len(words)) + blob + bytes(64))
    checkpoint, calls = count_calls(lambda: GgufCheckpoint(path))
    assert calls < 3 * len(words) + 10_000
    assert checkpoint.metadata["tokenizer.ggml.tokens"][-1] == "word262143"


def nvfp4_file(
    path: Path, *, arch: str = "llama", name: str = "blk.0.ffn_up.weight", factors: tuple[float, ...] = (0.5,)
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    stem = name.removesuffix(".weight")
    raw = np.random.default_rng(3).integers(0, 127, (6, 2 * 36), dtype=np.uint8)
    writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=gguf.GGMLQuantizationType.NVFP4)
    writer.add_tensor(f"{stem}.scale", np.array(factors, np.float32))
    writer.add_tensor(f"{stem}.input_scale", np.array([3.0], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_nvfp4_is_multiplied_by_its_separate_factor(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(nvfp4_file(tmp_path / "one.gguf"))
    assert list(checkpoint.tensors) == ["blk.0.ffn_up.weight"]
    tensor = checkpoint.tensors["blk.0.ffn_up.weight"]
    bare = gguf.GGUFReader(tmp_path / "one.gguf").get_tensor(0)
    expected = gguf.quants.dequantize(bare.data, gguf.GGMLQuantizationType.NVFP4) * np.float32(0.5)
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(tensor.float32(), expected.astype(np.float32))
    np.testing.assert_array_equal(tensor.take_rows(np.array([4, 1])).float32(), expected[[4, 1]])
    assert tensor.stays_packed
    raw, factors = tensor.packed(), tensor.factors()
    assert raw is not None
    assert factors is not None
    np.testing.assert_array_equal(raw, bare.data)  # the stored blocks are unchanged, the factors separate
    assert factors.tolist() == [0.5] * tensor.shape[0]


def test_nvfp4_experts_have_one_factor_each_or_are_refused(tmp_path: Path) -> None:
    each = GgufCheckpoint(nvfp4_file(tmp_path / "each.gguf", factors=(1, 2, 3, 4, 5, 6)))
    one = GgufCheckpoint(nvfp4_file(tmp_path / "one.gguf", factors=(1,)))
    name = "blk.0.ffn_up.weight"
    factors = np.arange(1, 7, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(each.tensors[name].float32(), one.tensors[name].float32() * factors)
    folded = each.tensors[name].reshaped((6, 128)).float32()
    np.testing.assert_array_equal(folded, each.tensors[name].float32())
    with pytest.raises(CorruptFile, match="2 factors"):
        GgufCheckpoint(nvfp4_file(tmp_path / "bad.gguf", factors=(1, 2)))
    with pytest.raises(UnsupportedModel, match=r"Gemma 4.*Q4_K_M"):
        GgufCheckpoint(nvfp4_file(tmp_path / "gemma.gguf", arch="gemma4", name="blk.0.ffn_down_exps.weight"))
