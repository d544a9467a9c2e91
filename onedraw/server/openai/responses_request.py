"""Request bodies of /v1/responses, and how they become chat requests.

The input is the honoured fields of a body (those that have an effect). The output is a frozen request, its equivalent chat
request, and a map from field names of the chat request to the caller's, so that an error names the field that the caller sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from onedraw.errors import BadParameter
from onedraw.llm.request_options import EFFORTS, Effort
from onedraw.server.fields import (
    TOOL_NAME,
    ListOf,
    Metadata,
    Rule,
    StrictModel,
    Whole,
    field_doc,
    inert,
    left_out,
    neutral,
    read,
    refused,
    sift,
)
from onedraw.server.protocol import ANY_MODEL, FunctionType, TokenFields, ToolChoice, response_choice
from onedraw.types import MAX_TOP_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
TEXT_PARTS = ("input_text", "output_text", "text")

RULES: tuple[Rule, ...] = (
    inert("user", "not used"),
    inert("client_metadata", "what a client says about itself"),
    inert("safety_identifier", "not used"),
    inert("prompt_cache_key", "prefix caching is automatic"),
    inert("prompt_cache_retention", "the prefix cache evicts the least recently used"),
    inert("prompt_cache_options", "prefix caching is automatic"),
    inert("service_tier", "the server has one tier", "auto", "default"),
    inert("stream_options", "events are not padded", {"include_obfuscation": False}, {}),
    neutral("background", "replies are only sent to the request itself", False),
    neutral("truncation", "the server never shortens a prompt", "disabled"),
    neutral("max_tool_calls", "the server has no tools of its own"),
    refused("conversation", "use `previous_response_id`"),
    refused("prompt", "the server stores no prompts"),
    refused("moderation", "nothing is moderated here"),
    refused("context_management", "the server never shortens a prompt; shorten it before sending"),
)
# The rules of the fields of items, by type of item, and of content parts. _OUTPUT: fields of all items but item_reference.
_OUTPUT = (*read("id"), inert("status", "not used"))
ITEM_RULES: Mapping[str, tuple[Rule, ...]] = {
    "message": (*read("role", "content"), *_OUTPUT, inert("phase", "not used")),
    "function_call": (*read("call_id", "name", "arguments"), *_OUTPUT),
    "function_call_output": (*read("call_id", "output"), *_OUTPUT),
    "reasoning": (
        *read("content", "summary"),
        *_OUTPUT,
        inert("encrypted_content", "the reasoning itself is read"),
    ),
    "item_reference": read("id"),
}
PART_RULES: tuple[Rule, ...] = (
    *read("type", "text"),
    inert("annotations", "not used"),
    inert("logprobs", "not used"),
    inert("prompt_cache_breakpoint", "prefix caching is automatic"),
)
# type of item → (field, accepted Python types) of the fields that it must have
_NEEDED: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "message": (("role", str), ("content", (str, list))),
    "function_call": (("call_id", str), ("name", str), ("arguments", str)),
    "function_call_output": (("call_id", str), ("output", (str, list))),
    "reasoning": (),
    "item_reference": (("id", str),),
}


def kind_of(item: Mapping[str, Any]) -> str:
    """Return the type of an item. Messages and references may leave it out."""
    kind = item.get("type")
    if kind is None:
        return "item_reference" if set(item) == {"id"} else "message"
    if not isinstance(kind, str) or kind not in ITEM_RULES:
        shown = {"at": ".type", "kind": str(kind)}
        raise PydanticCustomError("item", "items of type {kind} are not supported; this model reads text", shown)
    return kind


def sifted(item: Mapping[str, Any], *, path: str, ignored: list[str] | None) -> dict[str, Any]:
    """Return the honoured fields of an item and of its content parts. An item of unknown type passes unchanged: validating the
    request refuses it."""
    try:
        kind = kind_of(item)
    except PydanticCustomError:
        return dict(item)
    rules = {rule.name: rule for rule in (*read("type"), *ITEM_RULES[kind])}
    kept = {**sift(item, rules, path=path, ignored=ignored), "type": kind}
    parts = {rule.name: rule for rule in PART_RULES}
    for name in ("content", "output"):
        if isinstance(kept.get(name), list) and kind != "reasoning":
            kept[name] = [
                sift(part, parts, path=f"{path}{name}[{number}].", ignored=ignored)
                if isinstance(part, dict) and part.get("type") in TEXT_PARTS
                else part
                for number, part in enumerate(kept[name])
            ]
    return kept


def _items(value: object) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise PydanticCustomError("input", "must be a text or a list of items")
    for number, item in enumerate(value):
        try:
            kind = kind_of(item)
        except PydanticCustomError as error:
            context = {**(error.context or {}), "at": f"[{number}].type"}
            raise PydanticCustomError("item", error.message_template, context) from None
        for name, of in _NEEDED[kind]:
            if not isinstance(item.get(name), of):
                raise PydanticCustomError("item", "is missing or of the wrong kind", {"at": f"[{number}].{name}"})
        if not isinstance(item.get("id"), str | None):
            raise PydanticCustomError("item", "must be a text", {"at": f"[{number}].id"})
    return value


NumberedMessage = tuple[int, dict[str, Any]]  # the index of a message's first input item, and the chat message


class ResponseTool(StrictModel):
    type: FunctionType = field_doc('"function"', "required; tools of other types are left out", ...)
    name: str | None = field_doc("string", "required", pattern=TOOL_NAME)
    description: str | None = field_doc("string", "shown to the model")
    parameters: dict[str, Any] | None = field_doc("object", "a JSON schema of the arguments; none: no arguments")
    strict: bool | None = field_doc("boolean", "arguments of this tool always follow its schema; default false")

    @model_validator(mode="after")
    def _has_a_name(self) -> ResponseTool:
        if self.type == "function" and self.name is None:
            raise PydanticCustomError("missing", "this field is required", {"at": ".name"})
        return self


class ResponseTextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"] = field_doc('"text", "json_object", "json_schema"', "required", ...)
    name: str | None = field_doc("string", "the caller's name for it")
    description: str | None = field_doc("string", "the caller's own note")
    schema_: dict[str, Any] | None = field_doc("object", 'with type "json_schema"', alias="schema")
    strict: bool | None = field_doc("boolean", "the reply follows the schema either way")


class ResponseText(StrictModel):
    format: ResponseTextFormat | None = field_doc("object", "`type`, `schema`")
    verbosity: Literal["low", "medium", "high"] | None = field_doc('"low", "medium", "high"', "no effect; say it in a message")


class ResponseReasoning(StrictModel):
    effort: Effort | None = field_doc(", ".join(f'"{effort}"' for effort in EFFORTS), "as `reasoning_effort` of a chat")
    context: Literal["auto", "all_turns"] | None = field_doc(
        '"auto", "all_turns"', "the chat template gets all reasoning that is sent"
    )
    mode: Literal["standard"] | None = field_doc('"standard"', "the server has one mode")
    summary: Literal["auto", "concise", "detailed"] | None = field_doc(
        '"auto", "concise", "detailed"', "the reasoning itself is sent as the summary"
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = field_doc("string", "the older name of `summary`")


class ResponsesRequest(TokenFields):
    model: str | None = field_doc("string", ANY_MODEL)
    input: Annotated[Any, PlainValidator(_items)] = field_doc(
        "string or list of items",
        "items of type message, function_call, function_call_output, reasoning and item_reference; required",
        ...,
    )
    instructions: str | None = field_doc("string", "the system message; not kept for the next response")
    previous_response_id: str | None = field_doc("string", "continue that response, if it is still stored")
    store: bool = field_doc(
        "boolean", "store the response in memory, for `previous_response_id`; a continued one is not stored", True
    )
    stream: bool = field_doc("boolean", "answer in server-sent events", False)
    max_output_tokens: Whole | None = field_doc(
        "integer >= -1", "the most tokens of the reply, which ends at the context at the latest"
    )
    top_logprobs: int | None = field_doc(
        f"integer, 0 … {MAX_TOP_LOGPROBS}", f"alternatives of each token; with `include: [{LOGPROBS}]`", ge=0, le=MAX_TOP_LOGPROBS
    )
    include: ListOf[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = field_doc(
        "list of strings", f"`{LOGPROBS}` is honoured; `reasoning.encrypted_content` is accepted: reasoning is in the clear", []
    )
    tools: ListOf[ResponseTool] = field_doc("list of objects", "see below", [])
    tool_choice: Annotated[ToolChoice, PlainValidator(response_choice)] | None = field_doc(
        '"none", "auto", "required", {"type": "function", "name": …} or {"type": "allowed_tools", "mode": …, "tools": […]}',
        "as in a chat; default `auto`",
    )
    parallel_tool_calls: bool = field_doc(
        "boolean", "false: at most one call in a reply, as where `tool_choice` names a tool", True
    )
    text: ResponseText | None = field_doc("object", "`format`: the response format")
    reasoning: ResponseReasoning | None = field_doc("object", "`effort`")
    metadata: Metadata | None = field_doc("object", "the caller's own notes, returned with the response")
    thinking_budget: Whole | None = field_doc("integer >= 0", "tokens of thinking, after which it is closed")
    chat_template_kwargs: dict[str, Any] = field_doc("object", "variables of the checkpoint's chat template", {})

    @model_validator(mode="after")
    def _stores_whole_replies(self) -> ResponsesRequest:
        if self.continue_ids and self.store and "store" in self.model_fields_set:
            raise PydanticCustomError("agree", "a continued reply has no beginning to store; send false", {"at": "store"})
        return self

    @property
    def stores(self) -> bool:
        return self.store and not self.continue_ids

    @property
    def functions(self) -> list[tuple[int, ResponseTool]]:
        """Return the tools that the prompt lists, each with its index among all tools of the request, for errors."""
        return [(number, tool) for number, tool in enumerate(self.tools) if tool.type == "function"]

    @property
    def left_out(self) -> tuple[str, ...]:
        return left_out([tool.type for tool in self.tools], own=("function",))

    @property
    def summary(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.summary or self.reasoning.generate_summary

    @property
    def items(self) -> list[dict[str, Any]]:
        """Return the input as a list of items. A string counts as one message of the user."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        found: list[dict[str, Any]] = self.input
        return found

    def chat(self, before: Sequence[dict[str, Any]], messages: Sequence[NumberedMessage]) -> dict[str, Any]:
        """Return the fields of the equivalent chat request. `before` is the earlier conversation, `messages` the input."""
        opening = [{"role": "system", "content": self.instructions}] if self.instructions else []
        same = self.model_fields_set & {*TokenFields.model_fields, "thinking_budget", "tool_choice"}
        given = {name: getattr(self, name) for name in same if getattr(self, name) is not None}
        if self.max_output_tokens is not None:
            given["max_tokens"] = self.max_output_tokens
        if LOGPROBS in self.include:
            given |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        elif self.top_logprobs:
            raise BadParameter("top_logprobs", f"needs {LOGPROBS!r} in include")
        if self.reasoning is not None and self.reasoning.effort is not None:
            given["reasoning_effort"] = self.reasoning.effort
        return {
            "messages": [*opening, *before, *(message for _, message in messages)],
            "stream": self.stream,
            "tools": [_tool(tool) for _, tool in self.functions],
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            **given,
            **self._format(),
        }

    def _format(self) -> dict[str, Any]:
        shape = None if self.text is None else self.text.format
        if shape is not None and shape.type != "json_schema" and shape.schema_ is not None:
            raise BadParameter("text.format.schema", f"is only allowed with type json_schema, not with {shape.type}")
        if shape is None or shape.type == "text":
            return {}
        if shape.type == "json_object":
            return {"response_format": {"type": "json_object"}}
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": shape.schema_ or {}}}}

    def names(self, before: Sequence[dict[str, Any]], messages: Sequence[NumberedMessage]) -> dict[str, str]:
        """Map field names of the equivalent chat request to the caller's field names, for errors."""
        tools = {f"tools[{place}].function": f"tools[{number}]" for place, (number, _) in enumerate(self.functions)}
        opening = len(before) + bool(self.instructions)
        return {
            **tools,
            **{f"messages[{place}]": f"input[{number}]" for place, (number, _) in enumerate(messages, opening)},
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "response_format.json_schema.schema": "text.format.schema",
            "response_format": "text.format",
            "reasoning_effort": "reasoning.effort",
        }


def _tool(tool: ResponseTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def messages_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn items into chat messages. Consecutive reasoning, text and calls of the assistant become one message."""
    return [message for _, message in numbered(items)]


def numbered(items: Sequence[dict[str, Any]]) -> list[NumberedMessage]:
    """Turn items into chat messages like `messages_of`, each paired with the index of its first item."""
    messages: list[NumberedMessage] = []
    said: list[str] = []  # text parts of an assistant's message that is not complete yet

    def assistant() -> dict[str, Any]:
        if not messages or messages[-1][1]["role"] != "assistant":
            begin({"role": "assistant", "content": ""})
        return messages[-1][1]

    def begin(message: dict[str, Any]) -> None:
        end()
        messages.append((number, message))

    def end() -> None:
        if said:
            messages[-1][1]["content"] = "".join(said)
            said.clear()

    for number, item in enumerate(items):
        at = f"input[{number}]"
        match item.get("type", "message"):
            case "message" if item["role"] == "assistant":
                assistant()
                said.append(_text(item["content"], f"{at}.content"))
            case "message":
                begin({"role": item["role"], "content": _text(item["content"], f"{at}.content")})
            case "function_call":
                call = {"id": item["call_id"], "type": "function"}
                call["function"] = {"name": item["name"], "arguments": item["arguments"]}
                assistant().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _text(item["output"], f"{at}.output")
                begin({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            case "reasoning":
                parts = _reasoning_texts(item.get("content"), f"{at}.content") or _reasoning_texts(
                    item.get("summary"), f"{at}.summary"
                )
                thought = "".join(parts)
                if thought:
                    assistant()["reasoning_content"] = thought
    end()
    return messages


def _reasoning_texts(content: Any, at: str) -> list[str]:
    if content is None:
        return []
    if not isinstance(content, list):
        raise BadParameter(at, "must be a list of objects, each with a type and a text")
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("reasoning_text", "summary_text", "text") or not isinstance(part.get("text"), str):
            raise BadParameter(f"{at}[{number}]", "must be an object with the type reasoning_text or summary_text, and a text")
    return [part["text"] for part in content]


def _text(content: Any, at: str) -> str:
    """Return a text, or text parts joined by line breaks."""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise BadParameter(f"{at}[{number}]", f"parts of type {kind} are not supported; this model reads text")
        texts.append(part["text"])
    return "\n".join(texts)
