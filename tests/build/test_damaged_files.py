"""Damaged files of a model: loading succeeds, or raises an error that names a file. Nothing else is ever raised."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw.build.llm import build_llm
from onedraw.errors import ModelError, OnedrawError
from onedraw.settings import Settings
from tests.support.searching import examples

FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDER = FIXTURES / "trained" / "trained_qwen3_5"
GGUF = FIXTURES / "gguf" / "qwen3.gguf"
HEADER = 6_000  # bytes at the beginning of a binary file that are damaged more often than the others

NUMBERS = st.sampled_from((0, 1, -1, 2, 3, 7, 0.5, -0.0, 1e300, 2**31, 2**53, 2**63, 10**30))
TEXTS = st.sampled_from(
    ("", "a", "silu", "default", "yarn", "F32", "qwen3", "llama", "\u00e9", "{{ x }}", "{% for %}", "full_attention")
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of the parts of a JSON value; of a long list or object only the first and last."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    some = keys if len(keys) < 60 else [*keys[:3], *keys[-3:]]
    return [(value, key) for key in some] + [place for key in some for place in places(value[key])]


REMOVED = "(removed)"
EDITS = st.lists(st.tuples(st.integers(0, 1_000_000), st.just(REMOVED) | VALUES), min_size=1, max_size=2)
CHANGES = st.lists(st.tuples(st.integers(0, HEADER) | st.integers(0, 10_000_000), st.integers(0, 255)), min_size=1, max_size=4)
CUT = st.integers(0, 10_000_000)


def edited(content: bytes, edits: list[tuple[int, Any]]) -> bytes:
    """A JSON file in which some values are replaced or removed."""
    value = json.loads(content)
    for number, new in edits:
        found = places(value)
        if found:
            container, key = found[number % len(found)]
            if new == REMOVED:
                del container[key]
            else:
                container[key] = new
    return json.dumps(value).encode()


def changed(content: bytes, changes: list[tuple[int, int]] | int) -> bytes:
    """A file in which some bytes are changed, or that is cut."""
    if isinstance(changes, int):
        return content[: changes % len(content)]
    damaged = bytearray(content)
    for place, byte in changes:
        damaged[place % len(damaged)] = byte
    return bytes(damaged)


def load(path: Path) -> None:
    """Load the model and generate a token. Only errors that we raise on purpose are allowed."""
    settings = Settings(model=str(path), max_context=64, max_batch=1, self_check=False, threads=1, draft=("none",))
    unnamed = None
    try:
        with build_llm(settings) as llm:
            llm.generate([5, 6, 7], max_tokens=2, temperature=0)
    except ModelError as error:
        unnamed = None if "damaged-one" in str(error) else str(error)
    except OnedrawError:
        pass
    assert unnamed is None


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_json_file_is_an_error_that_names_a_file(tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "damaged-one"))
    content = (folder / name).read_bytes()

    @examples(8, many=300)
    @given(st.tuples(st.just(edited), EDITS) | st.tuples(st.just(changed), CHANGES | CUT))
    def always(damage: tuple[Any, Any]) -> None:
        damaged, how = damage
        (folder / name).write_bytes(damaged(content, how))
        load(folder)

    always()


@pytest.mark.parametrize(
    "source", [FOLDER / "model.safetensors", FOLDER / "chat_template.jinja", GGUF], ids=lambda path: path.name
)
def test_a_file_with_damaged_bytes_is_an_error_that_names_a_file(tmp_path: Path, source: Path) -> None:
    if source.suffix == ".gguf":
        model = file = tmp_path / "damaged-one.gguf"
    else:
        model = Path(shutil.copytree(FOLDER, tmp_path / "damaged-one"))
        file = model / source.name
    content = source.read_bytes()

    @examples(10, many=300)
    @given(CHANGES | CUT)
    def always(how: Any) -> None:
        file.write_bytes(changed(content, how))
        load(model)

    always()
