"""From the JSON object of a body to a typed request: every field honoured, or refused by name.

In: a JSON value and the kind of request that it should be. Out: a frozen request model, and the names that `--lenient` ignored.
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
from onedraw.server import items, messages
from onedraw.server.called import FunctionTool, ToolSpec
from onedraw.server.fields import (
    CHAT_RULES,
    COMPLETION_RULES,
    MESSAGE_RULES,
    STREAM_RULES,
    TOKENIZE_RULES,
    TOOL_RULES,
    Rule,
    sift,
    table,
)
from onedraw.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    JsonSchema,
    Message,
    Prediction,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    TokenizeRequest,
)
from onedraw.server.strict import Strict

RequestT = TypeVar("RequestT", bound=BaseModel)

TABLES: Mapping[type[BaseModel], Mapping[str, Rule]] = {
    CompletionRequest: table(CompletionRequest, COMPLETION_RULES),
    ChatRequest: table(ChatRequest, CHAT_RULES),
    Message: table(Message, MESSAGE_RULES),
    ToolSpec: table(ToolSpec),
    FunctionTool: table(FunctionTool),
    StreamOptions: table(StreamOptions, STREAM_RULES),
    Prediction: table(Prediction),
    ResponseFormat: table(ResponseFormat),
    JsonSchema: table(JsonSchema),
    StructuredOutputs: table(StructuredOutputs),
    TokenizeRequest: table(TokenizeRequest, TOKENIZE_RULES),
    DetokenizeRequest: table(DetokenizeRequest),
    items.ResponsesRequest: table(items.ResponsesRequest, items.RULES),
    items.ResponseTool: table(items.ResponseTool, TOOL_RULES),
    messages.MessagesRequest: table(messages.MessagesRequest, messages.RULES),
    messages.CountRequest: table(messages.CountRequest, messages.RULES),
    messages.SpokenMessage: table(messages.SpokenMessage),
    messages.MessageTool: table(messages.MessageTool, TOOL_RULES),
}
TOOLS: Mapping[type[BaseModel], type[BaseModel]] = {  # what a tool is
    ChatRequest: ToolSpec,
    items.ResponsesRequest: items.ResponseTool,
    messages.MessagesRequest: messages.MessageTool,
    messages.CountRequest: messages.MessageTool,
}
SPOKEN: Mapping[type[BaseModel], type[BaseModel]] = {  # what a message is, in this kind of request
    ChatRequest: Message,
    TokenizeRequest: Message,
    messages.MessagesRequest: messages.SpokenMessage,
    messages.CountRequest: messages.SpokenMessage,
}


PARTS: Mapping[str, type[BaseModel]] = {
    "stream_options": StreamOptions,
    "prediction": Prediction,
    "response_format": ResponseFormat,
    "structured_outputs": StructuredOutputs,
}


@dataclass(frozen=True, slots=True)
class Parsed(Generic[RequestT]):
    request: RequestT
    ignored: tuple[str, ...] = ()


def parse(kind: type[RequestT], raw: object, *, lenient: bool = False) -> Parsed[RequestT]:
    """A request, or BadRequest with the field that is wrong."""
    if not isinstance(raw, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    ignored: list[str] | None = [] if lenient else None
    kept = sift(raw, TABLES[kind], ignored=ignored)
    if kind in SPOKEN:
        _each(kept, "messages", lambda message, path: _message(SPOKEN[kind], message, path=path, ignored=ignored))
    if kind in TOOLS:
        _each(kept, "tools", lambda tool, path: _tool(TOOLS[kind], tool, path=path, ignored=ignored))
    if kind is items.ResponsesRequest:
        _each(kept, "input", lambda item, path: items.sifted(item, path=path, ignored=ignored))
    for name, part in PARTS.items():
        if isinstance(kept.get(name), dict):
            kept[name] = sift(kept[name], TABLES[part], path=f"{name}.", ignored=ignored)
    shape = kept.get("response_format")
    if isinstance(shape, dict) and isinstance(shape.get("json_schema"), dict):
        path = "response_format.json_schema."
        shape["json_schema"] = sift(shape["json_schema"], TABLES[JsonSchema], path=path, ignored=ignored)
    return Parsed(_validated(kind, _inner(kind, kept, "", ignored)), tuple(ignored or ()))


def _inner(kind: type[BaseModel], raw: dict[str, Any], path: str, ignored: list[str] | None) -> dict[str, Any]:
    """The objects inside an object, and those inside them: null asks for nothing there either, and what is unknown may be
    ignored. Refusing is left to the validation."""
    kept = dict(raw)
    for name, part in _objects_of(kind):
        if isinstance(kept.get(name), dict):
            kept[name] = _known(part, kept[name], f"{path}{name}.", ignored)
        _each(kept, name, partial(_known, part, ignored=ignored), path)
    return kept


def _known(kind: type[BaseModel], raw: dict[str, Any], path: str, ignored: list[str] | None) -> dict[str, Any]:
    kept, names = {name: value for name, value in raw.items() if value is not None}, _names_of(kind)
    if ignored is not None:
        ignored += [path + name for name in kept if name not in names]
        kept = {name: value for name, value in kept.items() if name in names}
    return _inner(kind, kept, path, ignored)


@cache
def _names_of(kind: type[BaseModel]) -> frozenset[str]:
    """Fields of an object as the caller writes them."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


@cache
def _objects_of(kind: type[BaseModel]) -> tuple[tuple[str, type[BaseModel]], ...]:
    """Those that hold objects, or lists of them, and the kind of those objects."""
    fields = ((field.alias or name, _object_in(field.annotation)) for name, field in kind.model_fields.items())
    return tuple((name, part) for name, part in fields if part is not None)


def _object_in(annotation: Any) -> type[BaseModel] | None:
    """The kind of object that a field holds, alone, in a list or as one of several things."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return annotation
    found = [part for one in get_args(annotation) if (part := _object_in(one)) is not None]
    return found[0] if len(found) == 1 else None


def _each(kept: dict[str, Any], name: str, judged: Callable[[dict[str, Any], str], dict[str, Any]], path: str = "") -> None:
    """The objects of a list, sifted one by one. What is no list or no object is judged with the request."""
    if isinstance(kept.get(name), list):
        entries = enumerate(kept[name])
        kept[name] = [judged(entry, f"{path}{name}[{i}].") if isinstance(entry, dict) else entry for i, entry in entries]


def _message(kind: type[BaseModel], raw: dict[str, Any], *, path: str, ignored: list[str] | None) -> dict[str, Any]:
    kept = sift(raw, TABLES[kind], path=path, ignored=ignored)
    if kind is messages.SpokenMessage and isinstance(kept.get("content"), list):
        kept["content"] = messages.sifted(kept["content"], path=f"{path}content", ignored=ignored)
    if kind is Message and isinstance(kept.get("content"), list) and ignored is not None:
        parts = enumerate(kept["content"])
        kept["content"] = [_text_part(part, f"{path}content[{i}].", ignored) for i, part in parts]
    return kept


def _text_part(part: Any, path: str, ignored: list[str]) -> Any:
    """A part of a message without what a text part does not have. What is no text part is judged with the request."""
    if not isinstance(part, dict) or part.get("type") != "text":
        return part
    ignored += [path + name for name, value in part.items() if value is not None and name not in ("type", "text")]
    return {name: value for name, value in part.items() if name in ("type", "text")}


def _tool(kind: type[BaseModel], raw: dict[str, Any], *, path: str, ignored: list[str] | None) -> dict[str, Any]:
    kept = sift(raw, TABLES[kind], path=path, ignored=ignored)
    if kind is ToolSpec and isinstance(kept.get("function"), dict):
        kept["function"] = sift(kept["function"], TABLES[FunctionTool], path=f"{path}function.", ignored=ignored)
    return kept


def as_chat(asked: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """The chat request that a request of another shape means. A refusal names what the caller wrote: `names`."""
    try:
        return _validated(ChatRequest, dict(asked))
    except BadParameter as error:
        raise error.renamed(names) from None


def _validated(kind: type[RequestT], fields: dict[str, Any]) -> RequestT:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_input=False)[0]) from None


_ALTERNATIVE = re.compile(r"str|int|float|bool|(dict|list|tuple|literal|function-\w+)\[.*\]")


def _explain(detail: ErrorDetails) -> BadRequest:
    param = ""
    for step in detail["loc"]:
        if param and isinstance(step, str) and _ALTERNATIVE.fullmatch(step):
            continue  # one of several kinds that a field may have, and no name of the caller's
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else step
    param += str(cast(Mapping[str, object], detail.get("ctx", {})).get("at", ""))
    if detail["type"] == "missing":
        return BadRequest(f"{param}: this field is required", param=param, code="missing_field")
    return BadParameter(param, detail["msg"][:1].lower() + detail["msg"][1:])
