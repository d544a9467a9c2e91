"""The small JSON files beside a checkpoint's weights, as far as text needs them.

In: a folder and a file's name. Out: dictionaries, and the text of a named special token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onedraw.errors import CorruptFile
from onedraw.text.surrogates import is_text

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_text(path: Path) -> str:
    """The text of a file; what is not UTF-8 is named as damage."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); get the file again") from None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CorruptFile(f"{path} is not valid JSON ({error}); get the file again") from None
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} holds no JSON object; get the file again")
    return value


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over the older special_tokens_map.json."""
    return {**read_object(folder / "special_tokens_map.json"), **read_object(folder / "tokenizer_config.json")}


def special_text(config: dict[str, Any], name: str) -> str | None:
    """The text of a special token, which is written as a string or as an object with its content."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if isinstance(value, str) and not is_text(value):
        raise CorruptFile(f"tokenizer_config.json: {name} holds half of a surrogate pair, which is no character")
    return value if isinstance(value, str) and value else None
