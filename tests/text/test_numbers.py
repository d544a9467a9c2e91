"""Bounds and constants of JSON schemas are exact, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.errors import BadParameter
from onedraw.sampling.adjustments import mask_to_bools
from onedraw.text.constraints.grammar import GrammarCompiler
from onedraw.text.constraints.numbers import INTEGER_BOUNDS, NUMBER_BOUNDS
from onedraw.text.constraints.response_format import JsonFormat
from onedraw.text.reply_parser import PLAIN_TEXT
from tests.text.test_call_grammar import EOS, PLAIN_BYTES

GRAMMARS = GrammarCompiler(PLAIN_BYTES, (EOS,))
SMALLEST, LARGEST = -(2**63), 2**63 - 1


def allows(schema: dict[str, Any], text: str) -> bool:
    tokens = PLAIN_BYTES.encode(text, add_special=False)
    constraint = GRAMMARS.constraint(JsonFormat(json.dumps(schema), "format"), PLAIN_TEXT)
    bits = constraint.allowed(tokens, [])
    return bits is not None and bool(mask_to_bools(bits, PLAIN_BYTES.vocab_size)[EOS])


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"minimum": SMALLEST, "maximum": LARGEST}, (0, INTEGER_BOUNDS[0], LARGEST), (SMALLEST - 1, LARGEST + 1)),
        ({"minimum": 0, "maximum": 2**64 - 1}, (0, LARGEST), (-1, 2**64)),
        ({"exclusiveMinimum": SMALLEST - 1, "exclusiveMaximum": 2**63}, (0, LARGEST), (SMALLEST - 1, 2**63)),
        ({"exclusiveMaximum": 2**60 + 1}, (2**60,), (2**60 + 1,)),
        ({"minimum": 2**53, "maximum": 2**53}, (2**53,), (2**53 - 1, 2**53 + 1)),
        ({"maximum": 2**62}, (2**62,), (2**62 + 1,)),
        ({"enum": [-(2**62), 2**60]}, (-(2**62), 2**60), (2**62, 2**60 + 1)),
    ],
    ids=str,
)
def test_bounds_and_constants_of_integers_hold(schema: dict[str, Any], good: tuple[int, ...], bad: tuple[int, ...]) -> None:
    schema = {"type": "integer", **schema}
    assert [value for value in good if not allows(schema, str(value))] == []
    assert [value for value in bad if allows(schema, str(value))] == []


@pytest.mark.parametrize("schema", [{"minimum": SMALLEST, "maximum": LARGEST}, {"minimum": -1.7976931348623157e308}], ids=str)
def test_bounds_of_numbers_at_the_limits_of_a_type_hold(schema: dict[str, Any]) -> None:
    schema = {"type": "number", **schema}
    assert all(allows(schema, text) for text in ("0.5", str(NUMBER_BOUNDS[0]), str(NUMBER_BOUNDS[1])))
    assert not allows(schema, "-1" + 308 * "0" + "0")


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "integer", "maximum": 2**53 + 1}, ".maximum"),
        ({"type": "integer", "exclusiveMinimum": 2**60}, ".exclusiveMinimum"),
        ({"type": "number", "minimum": 2**62}, ".minimum"),
        ({"type": "integer", "minimum": 2**63}, ".minimum"),
        ({"maximum": -(10**400)}, ".maximum"),
        ({"properties": {"maximum": {"const": 2**53 + 1}}}, ".properties.maximum.const"),
        ({"items": {"enum": [1, {"a": [SMALLEST]}, -(2**63) - 1]}}, ".items.enum[1].a[0]"),
        ({"const": 10**19}, ".const"),
        ({"anyOf": [{"const": 1e400}]}, ".anyOf[0].const"),
        ({"type": "integer", "minimum": float("nan")}, ".minimum"),
        ({"type": "integer", "exclusiveMaximum": float("nan")}, ".exclusiveMaximum"),
        ({"items": {"enum": [float("nan")]}}, ".items.enum[0]"),
        ({"type": "integer", "multipleOf": 2**53 + 1}, ".multipleOf"),
    ],
    ids=str,
)
def test_a_number_that_would_be_rounded_is_refused_by_its_path(schema: dict[str, Any], path: str) -> None:
    for refused in (lambda: GRAMMARS.check_schema(schema, "format"), lambda: allows(schema, "1")):
        with pytest.raises(BadParameter) as error:
            refused()
        assert error.value.param == "format" + path


@given(st.integers(SMALLEST - 2000, LARGEST + 2000), st.sampled_from(["minimum", "maximum", "const"]), st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_bound_is_exact_or_refused(bound: int, keyword: str, exactly: bool, data: st.DataObject) -> None:
    if exactly:
        bound = int(np.float64(bound))
    schema = {keyword: bound} if keyword == "const" else {"type": "integer", keyword: bound}
    value = data.draw(st.sampled_from([bound - 1, bound, bound + 1, 0, bound + 512]))
    try:
        allowed = allows(schema, str(value))
    except BadParameter:
        return
    right = value <= bound if keyword == "maximum" else value >= bound if keyword == "minimum" else value == bound
    assert allowed == right or (not allowed and not INTEGER_BOUNDS[0] <= value <= INTEGER_BOUNDS[1])
