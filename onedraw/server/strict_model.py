"""What every request model stands on: strict types, and fields that say what docs/api.md says of them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

TOOL_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
Whole = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # counts; every backend has room for these


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="forbid", arbitrary_types_allowed=True)


def field_doc(values: str, note: str, default: Any = None, **limits: Any) -> Any:
    """A field with what docs/api.md says of it: the values it takes, and what it does."""
    return Field(default, description=note, json_schema_extra={"values": values}, **limits)
