"""Numbers in JSON schemas that llguidance would round, because it stores every number as a 64-bit float.

Up to 2**53 nothing is rounded. Above, a number that a float cannot represent is refused with its path. Bounds at or beyond those
of 64-bit integers, which schema generators write, become the widest bounds that llguidance compiles: values outside of those
bounds are valid, but cannot be generated.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from onedraw.errors import BadParameter
from onedraw.text.constraints.schema_parts import map_parts

ALWAYS_EXACT = 2**53  # A float represents every integer up to this one exactly.
LARGEST = 2**63 - 1
# The widest bounds that llguidance compiles: of integers, and of numbers that may have a fraction.
INTEGER_BOUNDS = (-(2**63) + 1024, LARGEST)
NUMBER_BOUNDS = (-9_223_372_036_854_775_000, 9_223_372_036_854_775_000)
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}  # -1: a lower bound; 1: an upper bound


def exact_numbers(schema: Any, param: str) -> Any:
    """Return the schema with bounds that llguidance keeps exactly. A number that it would round raises BadParameter."""
    if not isinstance(schema, dict):
        return schema
    exact = map_parts(schema, param, exact_numbers)
    for keyword in ("const", "enum"):
        if keyword in schema:
            _check_constant(schema[keyword], f"{param}.{keyword}")
    types = schema.get("type")
    fractions = "number" in types if isinstance(types, str | list) else True
    for keyword, side in _BOUNDS.items():
        bound = schema.get(keyword)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) <= ALWAYS_EXACT:
            continue
        if bound != bound:  # NaN, which Python reads from a schema that is given as text
            raise BadParameter(f"{param}.{keyword}", "is not a number")
        del exact[keyword]
        target = keyword
        if not fractions and keyword.startswith("exclusive"):
            target, bound = keyword.removeprefix("exclusive").lower(), bound - side
        kept = _kept_bound(bound, side, f"{param}.{keyword}", fractions=fractions)
        exact[target] = min(kept, exact.get(target, kept)) if side > 0 else max(kept, exact.get(target, kept))
    return exact


def _kept_bound(bound: int | float, side: int, path: str, *, fractions: bool) -> int | float:
    """Return a bound in the form that llguidance keeps exactly. `side` is 1 for an upper bound and -1 for a lower one."""
    if bound * side >= LARGEST:
        return (NUMBER_BOUNDS if fractions else INTEGER_BOUNDS)[side > 0]
    if abs(bound) > LARGEST or not (_prints_exactly(bound) if fractions else int(float(bound)) == bound):
        raise BadParameter(path, f"{bound} would be rounded; use a bound of at most 2**53 ({ALWAYS_EXACT})")
    return bound


def _prints_exactly(number: int | float) -> bool:
    """Whether the shortest decimal that stands for this number as a float is the number itself."""
    return Decimal(repr(float(number))) == Decimal(number)


def _check_constant(value: Any, path: str) -> None:
    """Refuse a constant that contains a number which would be rounded."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            _check_constant(item, f"{path}[{number}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_constant(item, f"{path}.{name}")
    elif isinstance(value, int) and abs(value) > ALWAYS_EXACT:
        if abs(value) > LARGEST or int(float(value)) != value:
            raise BadParameter(path, f"{value} would be rounded; constants over 2**53 ({ALWAYS_EXACT}) can be given as strings")
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadParameter(path, "is too large for a number")
