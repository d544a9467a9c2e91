"""The JSON schemas of tools, for call syntaxes that are not JSON: types of parameters, and keywords that can be enforced.

The functions take a JSON schema and its path in the caller's request, for errors. A keyword that restricts a value but cannot be
enforced is refused by its path if the tool is strict. A keyword that restricts nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from onedraw.errors import BadParameter
from onedraw.text.tools.dialects import Dialect

SCHEMA_ERRORS = (BadParameter, TypeError, AttributeError, ValueError)  # raised for an invalid or unsupported part of a schema
NOT_SUPPORTED = "is not supported in this model's tool call syntax"
JSON_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
DEFINITIONS = ("$defs", "definitions")
# Keywords that restrict values of any type, objects, and arrays. All other keywords restrict strings or numbers, or nothing.
ANY_TYPE_KEYWORDS = ("anyOf", "oneOf", "allOf", "not", "if", "$ref", "$dynamicRef", "enum", "const")
OBJECT_KEYWORDS = (
    *("patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
    *("dependencies", "unevaluatedProperties"),
)
ARRAY_KEYWORDS = ("minItems", "maxItems", "uniqueItems", "contains", "prefixItems", "additionalItems", "unevaluatedItems")
_KEY_TERMINATOR = {"qwen_xml": ">", "laguna": "</arg_key>", "gemma": ":", "pythonic": "="}  # ends a key, so no key may contain it


def refuse(schema: dict[str, Any], keywords: tuple[str, ...], path: str) -> None:
    for keyword in keywords:
        if keyword in schema:
            raise BadParameter(f"{path}.{keyword}", NOT_SUPPORTED)


def only(schema: dict[str, Any], keywords: Set[str]) -> dict[str, Any]:
    """Return a schema with its type and those of its keywords that are in `keywords`."""
    return {name: part for name, part in schema.items() if name == "type" or name in keywords}


def refuse_missing(required: Sequence[str], properties: Mapping[str, Any], path: str) -> None:
    for name in required:
        if name not in properties:
            raise BadParameter(f"{path}.required", f"names {name!r}, which is not one of the properties")


def unwritable_key(key: str, path: str) -> BadParameter:
    return BadParameter(f"{path}.properties.{key}", "is a name that this model's tool call syntax cannot write")


def json_type(value: Any) -> str:
    """Return the name of the JSON type of a Python value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def parameter_types(schema: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the JSON types that each parameter may have; none means that the schema does not restrict them."""
    with suppress(BadParameter):
        schema = resolve_references(schema, "")
    properties = schema.get("properties")
    return {key: schema_types(part) for key, part in properties.items()} if isinstance(properties, dict) else {}


def schema_types(part: Any) -> tuple[str, ...]:
    """Return the JSON types that a schema names. The parser and the grammar of tagged values both use this rule: a value that can
    only be a string is written between the tags as it is, any other as JSON."""
    found = part.get("type") if isinstance(part, dict) else None
    if found is None and isinstance(part, dict) and isinstance(part.get("enum"), list):
        found = sorted({json_type(value) for value in part["enum"]})
    return (found,) if isinstance(found, str) else tuple(map(str, found)) if isinstance(found, list) else ()


def resolve_pointer(root: Any, pointer: str, path: str) -> Any:
    """Return the part of a schema to which a `$ref` inside it points."""
    target = root
    for step in pointer.removeprefix("#").strip("/").split("/") if pointer != "#" else ():
        target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    if target is None:
        raise BadParameter(f"{path}.$ref", f"{pointer} is not in the schema")
    return target


def resolve_references(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the schema in which a `$ref`, or an `allOf` of one schema, at its top level is replaced by its target."""
    root, seen = schema, set[str]()
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    while "$ref" in schema or (isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1):
        pointer = str(schema.get("$ref", ""))
        if pointer and pointer in seen:
            raise BadParameter(f"{path}.$ref", "refers to itself")
        seen.add(pointer)
        target = resolve_pointer(root, pointer, path) if "$ref" in schema else schema["allOf"][0]
        if not isinstance(target, dict):
            raise BadParameter(path, "must be the schema of an object")
        rest = {name: part for name, part in schema.items() if name not in ("$ref", "allOf", "type")}
        schema = {"type": "object", **target, **rest, **definitions}
    return schema


def object_properties(schema: dict[str, Any], path: str, dialect: Dialect, *, strict: bool) -> dict[str, Any]:
    """Return a tool's schema reduced to its properties, which are all that calls outside of JSON can express. Other keywords that
    restrict the arguments are refused for a strict tool, and left out otherwise."""
    try:
        schema = resolve_references(schema, path)
    except BadParameter:
        if strict:
            raise
    given = schema.get("properties")
    properties: dict[str, Any] = given if isinstance(given, dict) else {}
    named = schema.get("required")
    required = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    writable = {key: part for key, part in properties.items() if _KEY_TERMINATOR[dialect] not in key and key == key.strip()}
    if strict:
        refuse(schema, (*ANY_TYPE_KEYWORDS, *OBJECT_KEYWORDS), path)
        refuse_missing(required, properties, path)
        for key in properties:
            if key not in writable:
                raise unwritable_key(key, path)
    return {**schema, "properties": writable, "required": [name for name in required if name in writable]}


def constants(schema: dict[str, Any], path: str) -> list[Any]:
    """Return those values of `enum` or `const` that the rest of the schema allows."""
    keyword = "const" if "const" in schema else "enum"
    values = [schema["const"]] if keyword == "const" else schema["enum"]
    rest = {name: part for name, part in schema.items() if name not in ("enum", "const")}
    refuse(rest, (*ANY_TYPE_KEYWORDS, "pattern", "multipleOf"), path)
    if any(isinstance(value, list) for value in values):
        refuse(rest, (*ARRAY_KEYWORDS, "items"), path)
    if any(isinstance(value, dict) for value in values):
        refuse(rest, (*OBJECT_KEYWORDS, "properties", "required", "additionalProperties"), path)
    matches = _matcher(rest)
    found = [value for value in values if matches(value)]
    if not found:
        raise BadParameter(f"{path}.{keyword}", "has no value that the rest of the schema allows")
    return found


def _matcher(schema: dict[str, Any]) -> Callable[[Any], bool]:
    """Return a function that tells whether a value matches the type, length and numeric range of a schema."""
    given = schema.get("type")
    types = (given,) if isinstance(given, str) else tuple(given or ())

    def matches(value: Any) -> bool:
        found = "integer" if isinstance(value, float) and value.is_integer() else json_type(value)
        if types and found not in types and not (found == "integer" and "number" in types):
            return False
        if isinstance(value, str):
            return bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))
        if found in ("integer", "number"):
            above = schema.get("exclusiveMinimum", value - 1) < value and schema.get("minimum", value) <= value
            return bool(above and schema.get("exclusiveMaximum", value + 1) > value and schema.get("maximum", value) >= value)
        return True

    return matches
