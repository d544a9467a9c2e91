"""Schemas of tools, as far as calls outside of JSON can follow them: which types their parameters have, which keywords bind.

In: a JSON schema, and the caller's path to it. Out: the same as plain properties, constants, types. What would bind a value and
cannot be held to is refused by its path where the tool is strict; a word that binds nothing is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from onedraw.errors import BadParameter
from onedraw.text.tools.dialects import Dialect

NO_SCHEMA = (BadParameter, TypeError, AttributeError, ValueError)  # what comes of a part that is no schema, or cannot be held to
NOT_HELD = "cannot be held to in this model's call syntax"
KINDS = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
SHARED = ("$defs", "definitions")
# Keywords that bind a value of any type, and those that bind objects and arrays; others bind texts or numbers, or nothing.
BINDS_ALL = ("anyOf", "oneOf", "allOf", "not", "if", "$ref", "$dynamicRef", "enum", "const")
BINDS_OBJECTS = (
    *("patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
    *("dependencies", "unevaluatedProperties"),
)
BINDS_ARRAYS = ("minItems", "maxItems", "uniqueItems", "contains", "prefixItems", "additionalItems", "unevaluatedItems")
_ENDS_KEY = {"qwen_xml": ">", "laguna": "</arg_key>", "gemma": ":", "pythonic": "="}


def refuse(schema: dict[str, Any], keywords: tuple[str, ...], path: str) -> None:
    for keyword in keywords:
        if keyword in schema:
            raise BadParameter(f"{path}.{keyword}", NOT_HELD)


def only(schema: dict[str, Any], keywords: Set[str]) -> dict[str, Any]:
    """A schema's type and those of these keywords that it has."""
    return {name: part for name, part in schema.items() if name == "type" or name in keywords}


def refuse_missing(required: Sequence[str], properties: Mapping[str, Any], path: str) -> None:
    for name in required:
        if name not in properties:
            raise BadParameter(f"{path}.required", f"names {name!r}, which is none of the properties")


def unwritable(key: str, path: str) -> BadParameter:
    return BadParameter(f"{path}.properties.{key}", "is a name that this model's call syntax cannot write")


def kind_of(value: Any) -> str:
    """What JSON calls a value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def types_of(schema: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """The types of JSON that each parameter may have, none where that is not said."""
    with suppress(BadParameter):
        schema = meant(schema, "")
    properties = schema.get("properties")
    return {key: kinds_of(part) for key, part in properties.items()} if isinstance(properties, dict) else {}


def kinds_of(part: Any) -> tuple[str, ...]:
    """Types of JSON that a schema names. Where it is text alone, a value stands between tags as it is, else as JSON: whoever
    writes calls asks here as well."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is None and isinstance(part, dict) and isinstance(part.get("enum"), list):
        kind = sorted({kind_of(value) for value in part["enum"]})
    return (kind,) if isinstance(kind, str) else tuple(map(str, kind)) if isinstance(kind, list) else ()


def pointed_to(root: Any, pointer: str, path: str) -> Any:
    """What a reference means, inside of the schema it stands in."""
    target = root
    for step in pointer.removeprefix("#").strip("/").split("/") if pointer != "#" else ():
        target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    if target is None:
        raise BadParameter(f"{path}.$ref", f"{pointer} is not in the schema")
    return target


def meant(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema itself or, where it only refers to another one, that one."""
    root, seen = schema, set[str]()
    shared = {name: schema[name] for name in SHARED if name in schema}
    while "$ref" in schema or (isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1):
        pointer = str(schema.get("$ref", ""))
        if pointer and pointer in seen:
            raise BadParameter(f"{path}.$ref", "refers to itself")
        seen.add(pointer)
        target = pointed_to(root, pointer, path) if "$ref" in schema else schema["allOf"][0]
        if not isinstance(target, dict):
            raise BadParameter(path, "must be the schema of an object")
        rest = {name: part for name, part in schema.items() if name not in ("$ref", "allOf", "type")}
        schema = {"type": "object", **target, **rest, **shared}
    return schema


def as_members(schema: dict[str, Any], path: str, dialect: Dialect, *, strict: bool) -> dict[str, Any]:
    """A tool's schema as properties, which is all that a call outside of JSON has. What else would bind the arguments is refused
    by name, or left out where the tool is not strict."""
    try:
        schema = meant(schema, path)
    except BadParameter:
        if strict:
            raise
    given = schema.get("properties")
    properties: dict[str, Any] = given if isinstance(given, dict) else {}
    named = schema.get("required")
    required = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    written = {key: part for key, part in properties.items() if _ENDS_KEY[dialect] not in key and key == key.strip()}
    if strict:
        refuse(schema, (*BINDS_ALL, *BINDS_OBJECTS), path)
        refuse_missing(required, properties, path)
        for key in properties:
            if key not in written:
                raise unwritable(key, path)
    return {**schema, "properties": written, "required": [name for name in required if name in written]}


def constants(schema: dict[str, Any], path: str) -> list[Any]:
    """The values that a schema names, less those that it excludes itself."""
    keyword = "const" if "const" in schema else "enum"
    values = [schema["const"]] if keyword == "const" else schema["enum"]
    rest = {name: part for name, part in schema.items() if name not in ("enum", "const")}
    refuse(rest, (*BINDS_ALL, "pattern", "multipleOf"), path)
    if any(isinstance(value, list) for value in values):
        refuse(rest, (*BINDS_ARRAYS, "items"), path)
    if any(isinstance(value, dict) for value in values):
        refuse(rest, (*BINDS_OBJECTS, "properties", "required", "additionalProperties"), path)
    judge = _judge(rest)
    found = [value for value in values if judge(value)]
    if not found:
        raise BadParameter(f"{path}.{keyword}", "holds no value that the rest of the schema allows")
    return found


def _judge(schema: dict[str, Any]) -> Callable[[Any], bool]:
    """Whether a value has the type, the size and the length that stand beside an enumeration."""
    kinds = schema.get("type")
    wanted = (kinds,) if isinstance(kinds, str) else tuple(kinds or ())

    def judge(value: Any) -> bool:
        kind = "integer" if isinstance(value, float) and value.is_integer() else kind_of(value)
        if wanted and kind not in wanted and not (kind == "integer" and "number" in wanted):
            return False
        if isinstance(value, str):
            return bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))
        if kind in ("integer", "number"):
            above = schema.get("exclusiveMinimum", value - 1) < value and schema.get("minimum", value) <= value
            return bool(above and schema.get("exclusiveMaximum", value + 1) > value and schema.get("maximum", value) >= value)
        return True

    return judge
