"""The JSON schemas of tools, for call syntaxes that are not JSON: types of parameters, and keywords that can be enforced.

Combinators are keywords that name other schemas which a value has to follow, such as `anyOf` and `$ref`. The functions take a
JSON schema and its path in the caller's request, for errors. A keyword that restricts a value but cannot be enforced is refused
by its path if the tool is strict. A keyword that restricts nothing is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from onedraw.errors import BadParameter
from onedraw.text.constraints.schema_parts import map_parts
from onedraw.text.tools.dialects import GEMMA_QUOTE, Dialect

SCHEMA_ERRORS = (BadParameter, TypeError, AttributeError, ValueError)  # raised for an invalid or unsupported part of a schema
NOT_SUPPORTED = "is not supported in this model's tool call syntax"
JSON_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
DEFINITIONS = ("$defs", "definitions")
# Keywords that restrict values, by the type of the value. `type`, `properties`, `required`, `additionalProperties` and `items`,
# which the grammars write themselves, are in RESTRICTIONS only.
ANY_TYPE_KEYWORDS = ("anyOf", "oneOf", "allOf", "not", "if", "$ref", "$dynamicRef", "enum", "const")
OBJECT_KEYWORDS = (
    *("patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
    *("dependencies", "unevaluatedProperties"),
)
ARRAY_KEYWORDS = ("minItems", "maxItems", "uniqueItems", "contains", "prefixItems", "additionalItems", "unevaluatedItems")
NUMBER_KEYWORDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
STRING_KEYWORDS = frozenset(("minLength", "maxLength", "pattern", "format"))
COMBINATORS = ("$ref", "allOf", "anyOf", "oneOf")  # keywords that say which other schemas a value follows
# All keywords that restrict a value, except combinators.
RESTRICTIONS = frozenset(
    {*ANY_TYPE_KEYWORDS, *OBJECT_KEYWORDS, *ARRAY_KEYWORDS, *NUMBER_KEYWORDS, *STRING_KEYWORDS}
    | {"type", "then", "else", "properties", "required", "additionalProperties", "items"}
).difference(COMBINATORS)
# Keywords that say which members an object may have. What one of them allows depends on the others.
MEMBER_KEYWORDS = frozenset(("properties", "patternProperties", "additionalProperties"))
MAX_ALTERNATIVES = 100  # the most schemas that one value may follow, in a syntax that is not JSON
SCHEMA_WORK = 100  # the work of looking at one alternative counts as much as writing this many characters of a grammar
MAX_DEPTH = 100  # how deep combinators may be nested, with references followed
# For each dialect, the text that ends a key. No key may contain it.
_KEY_TERMINATOR = {"qwen_xml": ">", "laguna": "</arg_key>", "gemma": ":", "pythonic": "="}


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


def parameter_types(schema: dict[str, Any]) -> dict[str, frozenset[str]]:
    """Return the JSON types that each parameter may have; an empty set means that the schema does not restrict them.

    The parser and the grammar of tagged values both use this rule: a value that can only be a string is written between the tags
    as it is, any other as JSON.
    """
    root = schema
    with suppress(BadParameter):
        schema = resolve_references(schema, "")
    properties = schema.get("properties")
    known: dict[str, frozenset[str] | None] = {}
    if not isinstance(properties, dict):
        return {}
    return {key: _value_types(part, root, known, 0) or frozenset() for key, part in properties.items()}


def _value_types(part: Any, root: Any, known: dict[str, frozenset[str] | None], depth: int) -> frozenset[str] | None:
    """Return the JSON types of the values that follow a part of the schema `root`; None if it does not restrict them. `known` are
    the results for the references so far."""
    if not isinstance(part, dict) or depth > MAX_DEPTH:
        return None
    found: list[frozenset[str] | None] = []
    given = part.get("type")
    if isinstance(given, str | list):
        found.append(frozenset((given,) if isinstance(given, str) else map(str, given)))
    if isinstance(part.get("enum"), list):
        found.append(frozenset(map(json_type, part["enum"])))
    if "const" in part:
        found.append(frozenset((json_type(part["const"]),)))
    pointer = part.get("$ref")
    if isinstance(pointer, str):
        if pointer not in known:
            known[pointer] = None  # a reference that leads back to itself does not restrict the types
            with suppress(BadParameter):
                known[pointer] = _value_types(resolve_pointer(root, pointer, ""), root, known, depth + 1)
        found.append(known[pointer])
    for keyword in ("allOf", "anyOf", "oneOf"):
        parts = part.get(keyword)
        if isinstance(parts, list):
            inner = [_value_types(one, root, known, depth + 1) for one in parts]
            if keyword == "allOf":
                found += inner
            else:
                restricted = [types for types in inner if types is not None]
                found.append(frozenset().union(*restricted) if len(restricted) == len(inner) else None)
    types: frozenset[str] | None = None
    for one in found:
        if one is not None:  # If no type were left, keep those before: writing the grammar refuses such a schema.
            types = one if types is None else common_types(types, one) or types
    return types


def common_types(first: Set[str], second: Set[str]) -> frozenset[str]:
    """Return the types in both sets; an integer is a number as well."""
    integer = {"integer"} if ("integer" in first and "number" in second) or ("integer" in second and "number" in first) else set()
    return frozenset((first & second) | integer)


def resolve_pointer(root: Any, pointer: str, path: str) -> Any:
    """Return the part of a schema to which a `$ref` inside it points."""
    target = root if pointer.startswith("#") else None
    for step in pointer[1:].removeprefix("/").split("/") if len(pointer) > 1 else ():
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(name)
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            target = None
    if target is None:
        raise BadParameter(f"{path}.$ref", f"{pointer} is not in the schema")
    return target


def standalone(part: Any, root: Any, path: str) -> Any:
    """Return a part of a schema as a schema of its own: the targets of its references become its definitions."""
    names: dict[str, str] = {}

    def rewrite(schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        kept = {name: value for name, value in schema.items() if name not in (*DEFINITIONS, "$id", "$schema")}
        changed = map_parts(kept, path, rewrite)
        if isinstance(schema.get("$ref"), str):
            resolve_pointer(root, schema["$ref"], path)
            changed["$ref"] = f"#/$defs/{names.setdefault(schema['$ref'], f'd{len(names)}')}"
        return changed

    body, definitions = rewrite(part, path), dict[str, Any]()
    while len(definitions) < len(names):
        pointer, name = list(names.items())[len(definitions)]
        definitions[name] = rewrite(resolve_pointer(root, pointer, path), path)
    return {**body, "$defs": definitions} if definitions else body


def alternatives(schema: Any, root: Any, path: str, spend: Callable[[int], None], depth: int = 0) -> list[dict[str, Any]]:
    """Return schemas without combinators that are together equivalent to this one: a value follows it if it follows one of them.
    `spend` counts the work and raises over the limit."""
    spend(SCHEMA_WORK)
    if not isinstance(schema, dict):
        raise BadParameter(path, f"{NOT_SUPPORTED}, which needs the type of every value")
    if depth > MAX_DEPTH:
        raise BadParameter(path, f"has more than {MAX_DEPTH} combinators inside each other, which {NOT_SUPPORTED}")
    found = [{name: part for name, part in schema.items() if name in RESTRICTIONS}]
    groups: list[tuple[str, list[Any]]] = []
    if "$ref" in schema:
        groups.append((f"{path}.$ref", [resolve_pointer(root, str(schema["$ref"]), path)]))
    for keyword in ("allOf", "anyOf", "oneOf"):
        if keyword in schema:
            parts = schema[keyword]
            if not isinstance(parts, list) or not parts:
                raise BadParameter(f"{path}.{keyword}", "is empty; it needs at least one schema")
            groups += [(f"{path}.{keyword}", [part]) for part in parts] if keyword == "allOf" else [(f"{path}.{keyword}", parts)]
    for at, parts in groups:
        inner = [one for part in parts for one in alternatives(part, root, at, spend, depth + 1)]
        if len(found) * len(inner) > MAX_ALTERNATIVES:
            raise BadParameter(at, f"gives more than {MAX_ALTERNATIVES} alternatives, which {NOT_SUPPORTED}")
        found = [conjunction(one, other, at) for one in found for other in inner]
    return found


def conjunction(first: dict[str, Any], second: dict[str, Any], path: str) -> dict[str, Any]:
    """Return one schema for the values that follow both of these, which have no combinators. Raise BadParameter if no single
    schema can express that."""
    both = dict(first)
    if not MEMBER_KEYWORDS.isdisjoint(first) and not MEMBER_KEYWORDS.isdisjoint(second):
        raise BadParameter(path, f"and the schema beside it both restrict members, which {NOT_SUPPORTED}")
    for keyword, value in second.items():
        if keyword not in first or first[keyword] == value:
            both[keyword] = value
        elif keyword == "type":
            one, other = ({given} if isinstance(given, str) else set(given) for given in (first["type"], value))
            types = sorted(common_types(one, other))
            if not types:
                raise BadParameter(path, "has no type that the schema beside it allows")
            both["type"] = types[0] if len(types) == 1 else types
        elif keyword in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
            both[keyword] = max(first[keyword], value)
        elif keyword in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
            both[keyword] = min(first[keyword], value)
        elif keyword == "required":
            both[keyword] = [*first[keyword], *(name for name in value if name not in first[keyword])]
        else:
            raise BadParameter(path, f"and the schema beside it both have {keyword}, which {NOT_SUPPORTED}")
    return both


def resolve_references(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the schema in which a `$ref`, or an `allOf` of one schema, at its top level is replaced by its target."""
    root, seen = schema, set[str]()
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    while "$ref" in schema or (isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1):
        pointer = str(schema.get("$ref", ""))
        if pointer and pointer in seen:
            raise BadParameter(f"{path}.$ref", "refers to itself; write the schema that it stands for")
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
    writable = {key: part for key, part in properties.items() if can_write_key(key, dialect)}
    if strict:
        refuse(schema, (*ANY_TYPE_KEYWORDS, *OBJECT_KEYWORDS), path)
        refuse_missing(required, properties, path)
        for key in properties:
            if key not in writable:
                raise unwritable_key(key, path)
    return {**schema, "properties": writable, "required": [name for name in required if name in writable]}


def can_write_key(key: str, dialect: Dialect) -> bool:
    """Whether the syntax of a dialect that is not JSON can carry this name of a parameter."""
    if _KEY_TERMINATOR[dialect] in key or key != key.strip():
        return False
    match dialect:
        case "gemma":
            return bool(key) and key[0] not in "}<" and GEMMA_QUOTE not in key
        case "pythonic":
            return bool(key) and key[0] != ")"
        case _:
            return True


def constants(schema: dict[str, Any], path: str) -> list[Any]:
    """Return those values of `enum` or `const` that the rest of the schema allows."""
    keyword = "const" if "const" in schema else "enum"
    values = [schema["const"]] if keyword == "const" else schema["enum"]
    if keyword == "const" and "enum" in schema:
        listed = {json.dumps(value, sort_keys=True) for value in schema["enum"]}
        values = [value for value in values if json.dumps(value, sort_keys=True) in listed]
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
