"""The schemas inside a JSON schema, as opposed to the data inside it, such as the values of `const`.

A path is that of a schema in the caller's request, such as `response_format.json_schema.schema`, for errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Keywords whose value is an object that maps names to schemas.
SCHEMA_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
# Keywords whose value is a list of schemas.
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
# Keywords whose value is a single schema; in older drafts of JSON Schema, `items` may also be a list of schemas.
SCHEMAS = ("items", "additionalItems", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")


def map_parts(schema: dict[str, Any], path: str, change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Return a schema in which each schema directly inside it is replaced by `change(part, its path)`."""
    changed: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in SCHEMA_MAPS and isinstance(value, dict):
            value = {name: change(part, f"{path}.{keyword}.{name}") for name, part in value.items()}
        elif keyword in (*SCHEMA_LISTS, *SCHEMAS) and isinstance(value, list):
            value = [change(part, f"{path}.{keyword}[{number}]") for number, part in enumerate(value)]
        elif keyword in SCHEMAS:
            value = change(value, f"{path}.{keyword}")
        changed[keyword] = value
    return changed
