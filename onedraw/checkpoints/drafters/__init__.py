"""Drafters that come with the package, and which model each belongs to.

In: the target's spec and its open checkpoint. Out: the path of a drafter's GGUF file, or None. A drafter belongs to a
target whose shape it was trained on and which calls itself by the model's name: in general.name or general.basename of
a GGUF file, in _name_or_path of a config, or in the name of its file or folder. A wrong match could only make drafts
worse, never change a token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from onedraw.models.source import ModelSource
from onedraw.models.spec import ModelSpec

NAMING = ("general.name", "general.basename", "_name_or_path")


@dataclass(frozen=True, slots=True)
class Shipped:
    file: str
    family: str
    layers: int
    hidden: int
    vocab: int
    name: str  # a pattern, for names in lower case without punctuation

    def belongs_to(self, spec: ModelSpec, names: list[str]) -> bool:
        shape = (spec.family, len(spec.layers), spec.hidden, spec.vocab)
        return shape == (self.family, self.layers, self.hidden, self.vocab) and any(re.search(self.name, name) for name in names)


SHIPPED = (Shipped("smollm2-dflash.q8_0.gguf", family="llama", layers=30, hidden=576, vocab=49152, name="smollm2"),)


def built_in(spec: ModelSpec, source: ModelSource) -> Path | None:
    """The shipped drafter of this target."""
    told = [source.config.get(key) for key in NAMING]
    # Of the path only the name and its folder: a path further up says where a model is kept, not what it is.
    told += [source.path.name, source.path.parent.name]
    names = [re.sub(r"[^a-z0-9]", "", value.lower()) for value in told if isinstance(value, str)]
    for shipped in SHIPPED:
        if shipped.belongs_to(spec, names):
            return Path(__file__).parent / shipped.file
    return None
