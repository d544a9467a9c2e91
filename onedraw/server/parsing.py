"""Turn the JSON object of a body into a typed request. Each of its fields is honoured (has its effect), or refused by name.

The input is a JSON value and the type of request; the output is a frozen request model and the names of the fields that
`--lenient` ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from onedraw.errors import BadParameter, BadRequest
from onedraw.server.anthropic import messages
from onedraw.server.batch.requests import BatchRequest, ExpiresAfter
from onedraw.server.fields import (
    CACHE_CONTROL,
    CHAT_RULES,
    COMPLETION_RULES,
    MESSAGE_RULES,
    SCORE_RULES,
    STREAM_RULES,
    TOKENIZE_RULES,
    TOOL_RULES,
    Rule,
    StrictModel,
    sift,
    table,
)
from onedraw.server.ollama import requests as ollama
from onedraw.server.openai import responses_request as items
from onedraw.server.protocol import (
    PART_FIELDS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FunctionTool,
    JsonSchema,
    Message,
    Prediction,
    ResponseFormat,
    ScoreRequest,
    StreamOptions,
    StructuredOutputs,
    TokenizeRequest,
    ToolSpec,
    WeightUpdateRequest,
)

RequestT = TypeVar("RequestT", bound=BaseModel)

TABLES: Mapping[type[BaseModel], Mapping[str, Rule]] = {
    CompletionRequest: table(CompletionRequest, COMPLETION_RULES),
    ChatRequest: table(ChatRequest, CHAT_RULES),
    Message: table(Message, MESSAGE_RULES),
    ToolSpec: table(ToolSpec, (CACHE_CONTROL,)),
    FunctionTool: table(FunctionTool, (CACHE_CONTROL,)),
    StreamOptions: table(StreamOptions, STREAM_RULES),
    Prediction: table(Prediction),
    ResponseFormat: table(ResponseFormat),
    JsonSchema: table(JsonSchema),
    StructuredOutputs: table(StructuredOutputs),
    ScoreRequest: table(ScoreRequest, SCORE_RULES),
    BatchRequest: table(BatchRequest),
    ExpiresAfter: table(ExpiresAfter),
    TokenizeRequest: table(TokenizeRequest, TOKENIZE_RULES),
    DetokenizeRequest: table(DetokenizeRequest),
    WeightUpdateRequest: table(WeightUpdateRequest),
    items.ResponsesRequest: table(items.ResponsesRequest, items.RULES),
    items.ResponseTool: table(items.ResponseTool, TOOL_RULES),
    messages.MessagesRequest: table(messages.MessagesRequest, messages.RULES),
    messages.CountRequest: table(messages.CountRequest, messages.RULES),
    messages.MessageParam: table(messages.MessageParam),
    messages.MessageTool: table(messages.MessageTool, TOOL_RULES),
    ollama.OllamaChat: table(ollama.OllamaChat, ollama.CHAT_RULES),
    ollama.OllamaGenerate: table(ollama.OllamaGenerate, ollama.GENERATE_RULES),
    ollama.OllamaMessage: table(ollama.OllamaMessage, ollama.MESSAGE_RULES),
    ollama.OllamaCall: table(ollama.OllamaCall, ollama.CALL_RULES),
    ollama.OllamaFunction: table(ollama.OllamaFunction, ollama.FUNCTION_RULES),
    ollama.OllamaOptions: table(ollama.OllamaOptions, ollama.OPTION_RULES),
    ollama.OllamaShow: table(ollama.OllamaShow, ollama.SHOW_RULES),
}
# The fields of nested objects that have no pydantic model, by the (model, field) that holds them. None: the field has no inner
# fields to check.
FieldShape = Mapping[str, "FieldShape | None"]
_NAMED: FieldShape = {"type": None, "name": None}
_INSIDE: FieldShape = {"type": None, "function": {"name": None}}
_TEXT: FieldShape = dict.fromkeys(PART_FIELDS)
SHAPES: Mapping[tuple[type[BaseModel], str], FieldShape] = {
    (ChatRequest, "tool_choice"): {**_INSIDE, "allowed_tools": {"mode": None, "tools": _INSIDE}},
    (ScoreRequest, "tool_choice"): {**_INSIDE, "allowed_tools": {"mode": None, "tools": _INSIDE}},
    (items.ResponsesRequest, "tool_choice"): {**_NAMED, "mode": None, "tools": _NAMED},
    (Message, "content"): _TEXT,
    (Prediction, "content"): _TEXT,
}


BLOCKS: Mapping[type[BaseModel], tuple[str, ...]] = {  # names of the fields that hold Anthropic's content blocks
    messages.MessageParam: ("content",),
    messages.MessagesRequest: ("system",),
    messages.CountRequest: ("system",),
}


TOOL_TYPES: Mapping[type[BaseModel], str] = {ToolSpec: "function", items.ResponseTool: "function", messages.MessageTool: "custom"}


@dataclass(frozen=True, slots=True)
class Parsed(Generic[RequestT]):
    request: RequestT
    ignored: tuple[str, ...] = ()  # names of ignored fields, and of tools that the prompt leaves out


def parse(kind: type[RequestT], raw: object, *, lenient: bool = False) -> Parsed[RequestT]:
    """Return the request, or raise BadRequest that names the wrong field."""
    if not isinstance(raw, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    ignored: list[str] | None = [] if lenient else None
    request = _validated(kind, _sifted(kind, raw, "", ignored))
    return Parsed(request, (*(ignored or ()), *getattr(request, "left_out", ())))


def _sifted(kind: type[BaseModel], raw: dict[str, Any], path: str, ignored: list[str] | None) -> dict[str, Any]:
    """Return the honoured fields of an object, and of the objects inside it. Unknown fields are refused,
    or with a list as `ignored` left out, and their names are added to the list."""
    if kind in TOOL_TYPES and raw.get("type") not in (None, TOOL_TYPES[kind]):
        # A tool of another type keeps `type` and `name` only. Validating the request then leaves it out or refuses it.
        return {name: raw[name] for name in ("type", "name") if name in table_of(kind) and name in raw}
    kept = sift(raw, table_of(kind), path=path, ignored=ignored)
    for name, part in _objects_of(kind):
        _each(kept, name, partial(_sifted, part, ignored=ignored), path)
    if kind is items.ResponsesRequest:
        _each(kept, "input", lambda item, at: items.sifted(item, path=at, ignored=ignored), path)
    for name in BLOCKS.get(kind, ()):
        if isinstance(kept.get(name), list):
            kept[name] = messages.sifted(kept[name], path=f"{path}{name}", ignored=ignored)
    if ignored is not None:
        _trim(kept, {name: shape for (owner, name), shape in SHAPES.items() if owner is kind}, path, ignored)
    return kept


def _trim(kept: dict[str, Any], shapes: FieldShape, path: str, ignored: list[str]) -> None:
    """Remove unknown fields from the nested objects that `shapes` describes, and append their names to `ignored`."""
    for name, shape in shapes.items():
        if shape is not None:
            _each(kept, name, partial(_trimmed, shape, ignored=ignored), path)


def _trimmed(shape: FieldShape, raw: dict[str, Any], path: str, ignored: list[str]) -> dict[str, Any]:
    """Return an object without its unknown fields. Without `--lenient` the object's validator refuses them instead."""
    ignored += [path + name for name, value in raw.items() if value is not None and name not in shape]
    kept = {name: value for name, value in raw.items() if name in shape}
    _trim(kept, shape, path, ignored)
    return kept


def _each(kept: dict[str, Any], name: str, sifted: Callable[[dict[str, Any], str], dict[str, Any]], path: str) -> None:
    """Apply `sifted` to the object in field `name`, or to each object in its list. Values of another type stay as they are:
    validating the request refuses them."""
    value = kept.get(name)
    if isinstance(value, dict):
        kept[name] = sifted(value, f"{path}{name}.")
    elif isinstance(value, list):
        kept[name] = [sifted(entry, f"{path}{name}[{i}].") if isinstance(entry, dict) else entry for i, entry in enumerate(value)]


def kinds_in(kind: type[BaseModel]) -> tuple[type[BaseModel], ...]:
    """Return all models that occur inside a model, at any depth."""
    inner = [part for _, part in _objects_of(kind)]
    return tuple(dict.fromkeys((*inner, *(one for part in inner for one in kinds_in(part)))))


@cache
def table_of(kind: type[BaseModel]) -> Mapping[str, Rule]:
    return TABLES[kind] if kind in TABLES else table(kind)


@cache
def _objects_of(kind: type[BaseModel]) -> tuple[tuple[str, type[BaseModel]], ...]:
    """Return the names of the fields that hold an object or a list of objects, each with the model of that object."""
    fields = ((field.alias or name, _object_in(field.annotation)) for name, field in kind.model_fields.items())
    return tuple((name, part) for name, part in fields if part is not None)


def _object_in(annotation: Any) -> type[BaseModel] | None:
    """Return the one model that occurs in a field's annotation, directly, in a list or in a union; else None."""
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return annotation
    found = [part for one in get_args(annotation) if (part := _object_in(one)) is not None]
    return found[0] if len(found) == 1 else None


def as_request(kind: type[RequestT], fields: Mapping[str, Any], names: Mapping[str, str]) -> RequestT:
    """Build a chat or completion request from the fields of another API's request. `names` maps its field names to the caller's,
    for errors."""
    try:
        return _validated(kind, dict(fields))
    except BadParameter as error:
        raise error.renamed(names) from None


def _validated(kind: type[RequestT], fields: dict[str, Any]) -> RequestT:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_input=False)[0]) from None


# Pydantic's names for members of a union, which occur in the location of an error.
_ALTERNATIVE = re.compile(r"str|int|float|bool|(dict|list|tuple|literal|function-\w+)\[.*\]")


def _explain(detail: ErrorDetails) -> BadRequest:
    param = ""
    for step in detail["loc"]:
        if param and isinstance(step, str) and _ALTERNATIVE.fullmatch(step):
            continue  # This part of the location names a member of a union, which is not in the caller's JSON.
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else step
    param += str(cast(Mapping[str, object], detail.get("ctx", {})).get("at", ""))
    if detail["type"] == "missing":
        return BadRequest(f"{param}: this field is required", param=param, code="missing_field")
    return BadParameter(param, detail["msg"][:1].lower() + detail["msg"][1:])
