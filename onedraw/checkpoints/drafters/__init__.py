"""DFlash drafters that ship with the package, and the model that each belongs to.

In: the target's spec and its open checkpoint. Out: the path of a drafter's GGUF file, or None. A drafter belongs to a target of
the shape it was trained for and with the model's name in general.name or general.basename of a GGUF file,
_name_or_path of a config, or the name of its file or folder. A wrong match only makes drafts worse; it never changes a token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from onedraw.models.source import ModelSource
from onedraw.models.spec import ModelSpec

NAME_KEYS = ("general.name", "general.basename", "_name_or_path")


@dataclass(frozen=True, slots=True)
class BuiltInDrafter:
    file: str
    family: str
    layers: int
    hidden: int
    vocab: int
    name: str  # pattern for the lower-case name without punctuation

    def belongs_to(self, spec: ModelSpec, names: list[str]) -> bool:
        shape = (spec.family, len(spec.layers), spec.hidden, spec.vocab)
        return shape == (self.family, self.layers, self.hidden, self.vocab) and any(re.search(self.name, name) for name in names)


BUILT_IN_DRAFTERS = (
    BuiltInDrafter("smollm2-dflash.q8_0.gguf", family="llama", layers=30, hidden=576, vocab=49152, name="smollm2"),
)


def find_built_in_drafter(spec: ModelSpec, source: ModelSource) -> Path | None:
    """The built-in drafter of this target, if there is one."""
    given = [source.config.get(key) for key in NAME_KEYS]
    # Only the file and its folder: folders further up are places, not model names.
    given += [source.path.name, source.path.parent.name]
    names = [re.sub(r"[^a-z0-9]", "", value.lower()) for value in given if isinstance(value, str)]
    for drafter in BUILT_IN_DRAFTERS:
        if drafter.belongs_to(spec, names):
            return Path(__file__).parent / drafter.file
    return None
