"""/v1/messages: an Anthropic request turned into a chat request, and its reply written as an Anthropic message.

The input is the body of a Messages request and later the pieces of the reply, or the whole reply. The output is the fields of
the equivalent chat request, and Anthropic's content blocks, whole or as stream events. A field is honoured if it has an effect;
a piece is a part of a reply as it arrives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from onedraw.errors import BadParameter, OnedrawError
from onedraw.llm.reply import BlockChange, BlockClosed, BlockGrew, BlockOpened, ContentBlock, Reply
from onedraw.server.errors import message_error
from onedraw.server.fields import (
    TOOL_NAME,
    ListOf,
    Rule,
    StrictModel,
    Whole,
    field_doc,
    inert,
    is_left_out,
    left_out,
    neutral,
    read,
    refused,
    seed_field,
    sift,
)
from onedraw.server.openai.chat import Json, arguments_object
from onedraw.server.prompts import PreparedRequest
from onedraw.server.protocol import ANY_MODEL
from onedraw.types import ModelCard, Piece, Usage

RULES: tuple[Rule, ...] = (
    inert("metadata", "the caller's own notes"),
    inert("service_tier", "the server has one tier", "auto", "standard_only"),
    inert("cache_control", "prefix caching is automatic"),
    neutral("inference_geo", "the server runs in one place", "global"),
    neutral("speed", "the server has one speed", "standard"),
    refused("container", "the server runs no code"),
    refused("mcp_servers", "the server sends no requests to other servers"),
    inert("user_profile_id", "not used"),
    inert("workspace_id", "not used"),
    inert("diagnostics", "no diagnostics are collected", {}, {"previous_message_id": None}),
    neutral(
        "context_management",
        "the server never shortens a prompt; shorten it before sending",
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    refused("compaction", "the server never shortens a prompt; shorten it before sending"),
    refused("fallbacks", "the server has one model"),
    refused("fallback_credit_token", "the server has one model"),
    refused("thread", "send the whole conversation as messages"),
)
_MARKED = (inert("cache_control", "prefix caching is automatic"),)
BLOCK_RULES: Mapping[str, tuple[Rule, ...]] = {
    "text": (*read("type", "text"), *_MARKED, inert("citations", "not used")),
    "thinking": (*read("type", "thinking"), inert("signature", "not used")),
    "tool_use": (*read("type", "id", "name", "input"), *_MARKED, inert("caller", "not used")),
    "tool_result": (*read("type", "tool_use_id", "content", "is_error"), *_MARKED),
}


def sifted(blocks: list[Any], *, path: str, ignored: list[str] | None) -> list[Any]:
    """Return the honoured fields of blocks, nested ones included. Names of unknown fields are appended to `ignored`; if it is
    None, they are errors. Blocks of unknown type pass unchanged: validating the request refuses them."""
    kept: list[Any] = []
    for number, block in enumerate(blocks):
        rules = BLOCK_RULES.get(str(block.get("type"))) if isinstance(block, dict) else None
        if rules is None:
            kept.append(block)
            continue
        at = f"{path}[{number}]"
        found = sift(block, {rule.name: rule for rule in rules}, path=f"{at}.", ignored=ignored)
        if isinstance(found.get("content"), list):
            found["content"] = sifted(found["content"], path=f"{at}.content", ignored=ignored)
        kept.append(found)
    return kept


def _text_of(value: object) -> str:
    """Return a text, or text blocks joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a text or a list of blocks")
    texts = []
    for number, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text" or not isinstance(block.get("text"), str):
            shown = kind if isinstance(kind, str) else "this kind"
            raise PydanticCustomError("block", "blocks of type {kind} are not read here", {"kind": shown, "at": f"[{number}]"})
        texts.append(block["text"])
    return "\n".join(texts)


def _blocks(value: object) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(block, dict) for block in value):
        raise PydanticCustomError("content", "must be a text or a list of blocks")
    for number, block in enumerate(value):
        if not isinstance(block.get("type"), str) or block["type"] not in _READ:
            at = {"at": f"[{number}].type", "kind": str(block.get("type"))}
            raise PydanticCustomError("block", "blocks of type {kind} are not supported; this model reads text", at)
        for name, kind in _READ[block["type"]].items():
            if not isinstance(block.get(name), kind):
                raise PydanticCustomError("block", "is missing or of the wrong kind", {"at": f"[{number}].{name}"})
        if isinstance(block.get("content"), list):
            try:
                _text_of(block["content"])
            except PydanticCustomError:
                at = {"at": f"[{number}].content"}
                raise PydanticCustomError("block", "tool results can only contain text blocks", at) from None
    return value


# type of block → the Python types of its fields; a field with NoneType may be missing
_READ: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "text": {"text": str},
    "thinking": {"thinking": str},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str, "content": (str, list, type(None)), "is_error": (bool, type(None))},
}


class MessageParam(StrictModel):
    role: Literal["user", "assistant", "system"] = field_doc('"user", "assistant" or "system"', "required", ...)
    content: Annotated[Any, PlainValidator(_blocks)] = field_doc(
        "string or list of blocks",
        "blocks of type text, thinking, tool_use and tool_result, of a system message text alone; required",
        ...,
    )

    @model_validator(mode="after")
    def _instructions_are_text(self) -> MessageParam:
        for number, block in enumerate(self.content if self.role == "system" and isinstance(self.content, list) else ()):
            if block["type"] != "text":
                raise PydanticCustomError("agree", "a system message is text", {"at": f".content[{number}].type"})
        return self


def tool_type(value: object) -> str:
    if is_left_out(value):  # This includes "custom", which in this API is the type of the caller's own tools.
        return str(value)
    raise PydanticCustomError("tool", "tools of type {kind} are not known; leave the type out", {"kind": repr(value)[:80]})


class MessageTool(StrictModel):
    type: Annotated[str, PlainValidator(tool_type)] | None = field_doc('"custom"', "tools of other types are left out")
    name: str | None = field_doc("string", "required", pattern=TOOL_NAME)
    description: str | None = field_doc("string", "shown to the model")
    input_schema: dict[str, Any] | None = field_doc("object", "a JSON schema of the input; required")
    strict: bool = field_doc("boolean", "arguments of this tool always follow its schema", False)
    input_examples: Any = field_doc("any", "accepted: not shown to the model")
    eager_input_streaming: Any = field_doc("any", "accepted: input is always streamed")

    @model_validator(mode="after")
    def _complete(self) -> MessageTool:
        for name in ("name", "input_schema"):
            if self.type in OWN_TOOLS and getattr(self, name) is None:
                raise PydanticCustomError("missing", "this field is required", {"at": f".{name}"})
        return self


OWN_TOOLS = (None, "custom")  # types of tools that the model can call


class MessageToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"] = field_doc('"auto", "any", "tool", "none"', "required", ...)
    name: str | None = field_doc("string", 'with type "tool"')
    disable_parallel_tool_use: bool = field_doc("boolean", "at most one call in a reply", False)

    @model_validator(mode="after")
    def _agree(self) -> MessageToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("agree", 'is required with type "tool", and only allowed there', {"at": ".name"})
        return self


class Thinking(StrictModel):
    type: Literal["enabled", "disabled", "adaptive"] = field_doc('"enabled", "disabled", "adaptive"', "required", ...)
    budget_tokens: Whole | None = field_doc("integer >= 0", "tokens of thinking, after which it is closed")
    display: Literal["summarized", "omitted"] | None = field_doc(
        '"summarized", "omitted"', "`omitted`: thinking blocks are sent without their text; else as they are"
    )


class OutputFormat(StrictModel):
    type: Literal["json_schema"] = field_doc('"json_schema"', "required", ...)
    schema_: dict[str, Any] = field_doc("object", "the JSON schema that the reply follows; required", ..., alias="schema")


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = field_doc(
        "string", "with `thinking`, as `reasoning_effort` of a chat; without it nothing is thought, and this has no effect"
    )
    format: OutputFormat | None = field_doc("object", "`type` and `schema`")


class CountRequest(StrictModel):
    """The fields of a Messages request that decide its prompt."""

    model: str | None = field_doc("string", ANY_MODEL)
    messages: ListOf[MessageParam] = field_doc(
        "list of objects", "see below; the reply continues a last message of the assistant; required", ..., min_length=1
    )
    system: Annotated[str, PlainValidator(_text_of)] | None = field_doc("string or list of text blocks", "the system message")
    tools: ListOf[MessageTool] = field_doc("list of objects", "see below", [])
    tool_choice: MessageToolChoice | None = field_doc("object", "`type`, `name`, `disable_parallel_tool_use`")
    thinking: Thinking | None = field_doc("object", "`type`, `budget_tokens`; without it thinking is off where possible")
    chat_template_kwargs: dict[str, Any] = field_doc("object", "variables of the checkpoint's chat template", {})
    output_config: OutputConfig | None = field_doc("object", "`effort`, `format`")

    @property
    def functions(self) -> list[tuple[int, MessageTool]]:
        """Return the tools that the prompt lists, each with its index among all tools of the request, for errors."""
        return [(number, tool) for number, tool in enumerate(self.tools) if tool.type in OWN_TOOLS]

    @property
    def left_out(self) -> tuple[str, ...]:
        return left_out([tool.type for tool in self.tools], own=OWN_TOOLS)

    @cached_property
    def chat_messages(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the equivalent chat messages, each with the index of the Anthropic message from which it was made, for
        errors."""
        return [(number, one) for number, message in enumerate(self.messages) for one in _to_chat(message)]

    def chat(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        fields: dict[str, Any] = {
            "messages": [*system, *(message for _, message in self.chat_messages)],
            "tools": [_tool(tool) for _, tool in self.functions],
            "chat_template_kwargs": self.chat_template_kwargs,
            "continue_final_message": self.messages[-1].role == "assistant",
        }
        return fields | self._choice() | self._thinking() | self._format()

    def _choice(self) -> dict[str, Any]:
        if self.tool_choice is None or not (self.functions or self.tool_choice.type in ("any", "tool")):
            return {}
        forced = [tool for tool in self.tools if tool.name == self.tool_choice.name and tool.type not in OWN_TOOLS]
        if self.tool_choice.name is not None and forced:
            raise BadParameter("tool_choice.name", f"tools of type {forced[0].type} are not supported")
        named = {"type": "function", "function": {"name": self.tool_choice.name}}
        choice = {"auto": "auto", "any": "required", "none": "none", "tool": named}[self.tool_choice.type]
        return {"tool_choice": choice, "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use}

    @property
    def omits_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def _thinking(self) -> dict[str, Any]:
        effort = self.output_config.effort if self.output_config is not None else None
        if self.thinking is not None and self.thinking.type == "disabled" and self.thinking.budget_tokens is not None:
            raise BadParameter("thinking.budget_tokens", "cannot be set when thinking is disabled")
        if self.thinking is None or self.thinking.type == "disabled":
            return {"reasoning_effort": "none"}
        budget = {"thinking_budget": self.thinking.budget_tokens} if self.thinking.budget_tokens is not None else {}
        if effort is None and self.thinking.type == "adaptive":
            return budget  # Without an effort, adaptive thinking leaves its length to the model.
        return {"reasoning_effort": effort or "high", **budget}

    def _format(self) -> dict[str, Any]:
        if self.output_config is None or self.output_config.format is None:
            return {}
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": self.output_config.format.schema_}}}

    def names(self) -> dict[str, str]:
        """Map field names of the equivalent chat request to the caller's field names, for errors."""
        places = enumerate(self.chat_messages, 1 if self.system else 0)
        messages = {f"messages[{place}]": f"messages[{number}]" for place, (number, _) in places}
        tools = {f"tools[{place}].function": f"tools[{number}]" for place, (number, _) in enumerate(self.functions)}
        return {
            **{f"{ours}.parameters": f"{theirs}.input_schema" for ours, theirs in tools.items()},
            **tools,
            **messages,
            "response_format.json_schema.schema": "output_config.format.schema",
            "thinking_budget": "thinking.budget_tokens",
            "reasoning_effort": "thinking",
            "stop": "stop_sequences",
            "tool_choice.function.name": "tool_choice.name",
        }


class MessagesRequest(CountRequest):
    max_tokens: Whole = field_doc(
        "integer >= -1", "the most tokens of the reply, which ends at the context at the latest; required", ...
    )
    stream: bool = field_doc("boolean", "answer in server-sent events", False)
    stop_sequences: ListOf[str] = field_doc(
        "list of strings", "ends the reply and is not part of its text; searched in the answer, not in thinking or calls", []
    )
    temperature: float | None = field_doc("number, 0 … 100", "0 is greedy")
    top_p: float | None = field_doc("number, over 0 … 1", "1: off")
    top_k: Whole | None = field_doc("integer >= -1", "0 and -1: off")
    min_p: float | None = field_doc("number, 0 … 1", "0: off")
    seed: int | None = seed_field("the reply")
    continue_ids: ListOf[int] = field_doc(
        "list of integers", "ids of the first tokens of the reply, which holds what follows them; needs `seed`", []
    )
    system_fingerprint: str | None = field_doc("string", "refused if the server reports another one with its replies")
    speculation: bool = field_doc("boolean", "false: no speculative decoding; it never changes a reply", True)

    def chat(self) -> dict[str, Any]:
        same = (
            *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "speculation", "stream"),
            *("continue_ids", "system_fingerprint"),
        )
        given = {name: getattr(self, name) for name in same if getattr(self, name) is not None}
        return super().chat() | given | ({"stop": self.stop_sequences} if self.stop_sequences else {})


def _tool(tool: MessageTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _to_chat(message: MessageParam) -> list[dict[str, Any]]:
    """Turn a message into chat messages. A tool result becomes a message of its own, before the user's text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    by_type: dict[str, list[dict[str, Any]]] = {name: [] for name in _READ}
    for block in message.content:
        by_type[block["type"]].append(block)
    results = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _result(block)} for block in by_type["tool_result"]
    ]
    found: dict[str, Any] = {"role": message.role, "content": "\n".join(block["text"] for block in by_type["text"])}
    if by_type["thinking"]:
        found["reasoning_content"] = "\n".join(block["thinking"] for block in by_type["thinking"])
    if by_type["tool_use"]:
        found["tool_calls"] = [
            {"id": b["id"], "type": "function", "function": {"name": b["name"], "arguments": json.dumps(b["input"])}}
            for b in by_type["tool_use"]
        ]
    has_content = by_type["text"] or by_type["tool_use"] or by_type["thinking"]
    return [*results, found] if has_content else results


def _result(block: Mapping[str, Any]) -> str:
    """Return the text of a tool result. Chat templates have no flag for an error, so the text begins with "Error"."""
    text = _text_of(block.get("content") or "")
    return f"Error: {text}" if block.get("is_error") else text


# ---------------------------------------------------------------------------------------------- the reply


class MessagesWriter:
    """Writes one reply as an Anthropic message. With `omit_thinking` its thinking blocks have no text."""

    def __init__(self, prepared: PreparedRequest, *, card: ModelCard, omit_thinking: bool = False) -> None:
        self._prepared = prepared
        self._omit_thinking = omit_thinking
        self._card = card
        self._reply: Reply | None = None  # the reply so far; None until the stream's first piece

    def chunks(self, piece: Piece) -> list[Json]:
        events: list[Json] = []
        if self._reply is None:
            self._reply = Reply()
            prompt = len(self._prepared.generations[0].prompt)
            events.append({"type": "message_start", "message": self._message([], Reply(), Usage(prompt=prompt))})
        return [*events, *(self._event(change) for change in self._reply.add(piece) if not self._hides(change))]

    def _hides(self, change: BlockChange) -> bool:
        omitted = self._omit_thinking and change.block.channel == "reasoning"
        return isinstance(change, BlockGrew) and (omitted or not change.text)

    def ending(self, usage: Usage) -> list[Json]:
        assert self._reply is not None
        return [
            {"type": "message_delta", "delta": _stop(self._reply), "usage": write_usage(usage)},
            {"type": "message_stop"},
        ]

    def failed(self, error: OnedrawError) -> list[Json]:
        return [message_error(error)]

    def whole(self, replies: Sequence[Reply], usage: Usage) -> Json:
        (reply,) = replies
        content = [_content(block, empty=self._omit_thinking and block.channel == "reasoning") for block in reply.blocks]
        return self._message(content, reply, usage)

    def _event(self, change: BlockChange) -> Json:
        index = change.block.index
        match change:
            case BlockOpened(block):
                return {"type": "content_block_start", "index": index, "content_block": _content(block, empty=True)}
            case BlockGrew(block, text):
                delta = {
                    "reasoning": {"type": "thinking_delta", "thinking": text},
                    "content": {"type": "text_delta", "text": text},
                    "tool": {"type": "input_json_delta", "partial_json": text},
                }[block.channel]
                return {"type": "content_block_delta", "index": index, "delta": delta}
            case BlockClosed():
                return {"type": "content_block_stop", "index": index}

    def _message(self, content: list[Json], reply: Reply, usage: Usage) -> Json:
        return {
            "id": self._prepared.id,
            "type": "message",
            "role": "assistant",
            "model": self._card.name,
            "content": content,
            **_stop(reply),
            "usage": write_usage(usage),
            "seed": self._prepared.seed_of(0),
            "system_fingerprint": self._card.fingerprint,
        }


def _stop(reply: Reply) -> Json:
    if reply.finish == "stop" and isinstance(reply.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_reason}
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": reasons.get(reply.finish or ""), "stop_sequence": None}


def _content(block: ContentBlock, *, empty: bool = False) -> Json:
    text = "" if empty else block.text
    match block.channel:
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "content":
            return {"type": "text", "text": text}
        case "tool":
            assert block.call is not None
            return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": arguments_object(text)}


def write_usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "output_tokens": usage.completion,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
    }
