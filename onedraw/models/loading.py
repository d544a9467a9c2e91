"""An open checkpoint → everything the rest of the house asks about it, in one call. No weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from onedraw.models.family import Family
from onedraw.models.generation import eos_ids, generation_defaults
from onedraw.models.registry import identify
from onedraw.models.source import Dialect, Source
from onedraw.models.spec import ModelSpec
from onedraw.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Described:
    spec: ModelSpec
    family: Family
    dialect: Dialect
    weights: Weights
    eos_ids: tuple[int, ...]
    defaults: dict[str, float | int]


def describe(source: Source) -> Described:
    """Identify, read the description, and check that the weights fit it."""
    family = identify(source)
    if source.dialect == "gguf":
        spec = family.from_metadata(source)
    else:
        spec = family.from_config(source.config, str(source.path / "config.json"))
    weights = Weights(source, spec, family.rules[source.dialect])
    return Described(
        spec=weights.spec,
        family=family,
        dialect=source.dialect,
        weights=weights,
        eos_ids=tuple(eos_ids(source)),
        defaults=generation_defaults(source),
    )
