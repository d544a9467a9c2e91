"""From the JSON object of a body to a typed request: every field honoured, or refused by name.

In: a JSON value and the kind of request that it should be. Out: a frozen request model, and the names that `--lenient` ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

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
    return Parsed(_validated(kind, kept), tuple(ignored or ()))


def _each(kept: dict[str, Any], name: str, judged: Callable[[dict[str, Any], str], dict[str, Any]]) -> None:
    """The objects of a list, sifted one by one. What is no list or no object is judged with the request."""
    if isinstance(kept.get(name), list):
        entries = enumerate(kept[name])
        kept[name] = [judged(entry, f"{name}[{i}].") if isinstance(entry, dict) else entry for i, entry in entries]


def _message(kind: type[BaseModel], raw: dict[str, Any], *, path: str, ignored: list[str] | None) -> dict[str, Any]:
    kept = sift(raw, TABLES[kind], path=path, ignored=ignored)
    if kind is messages.SpokenMessage and isinstance(kept.get("content"), list):
        kept["content"] = messages.sifted(kept["content"], path=f"{path}content", ignored=ignored)
    return kept


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


def _explain(detail: ErrorDetails) -> BadRequest:
    param = ""
    for step in detail["loc"]:
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else step
    param += str(cast(Mapping[str, object], detail.get("ctx", {})).get("at", ""))
    if detail["type"] == "missing":
        return BadRequest(f"{param}: this field is required", param=param, code="missing_field")
    return BadParameter(param, detail["msg"][:1].lower() + detail["msg"][1:])
