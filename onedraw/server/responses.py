"""`/v1/responses`: OpenAI's newer shape of the same replies.

In: a Responses request, and the conversations of earlier ones. Out: the chat request it means, and its reply written as
output items, whole or as events. Nothing is decided here: a response is one more rendering of the stream of pieces.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from onedraw.errors import BadParameter
from onedraw.server.blocks import Block, Blocks, Closed, Grew, Opened
from onedraw.server.completion import Job
from onedraw.server.fields import Rule, inert, neutral, refused
from onedraw.server.parts import Part, Token
from onedraw.server.protocol import TOOL_NAME, Strict, Whole, wish
from onedraw.server.reply import Json, Scribe
from onedraw.types import MAX_TOP_LOGPROBS, SEED_LIMIT, Finish, ModelCard, Usage
from onedraw.wishes import EFFORTS, Effort

MOST_CHARACTERS = 2**26  # of all remembered conversations together
LOGPROBS = "message.output_text.logprobs"

RULES: tuple[Rule, ...] = (
    inert("user", "who asked"),
    inert("safety_identifier", "who asked"),
    inert("prompt_cache_key", "the prefix cache needs no key"),
    inert("prompt_cache_retention", "the prefix cache keeps what was used last"),
    inert("service_tier", "there is one tier", "auto", "default"),
    inert("stream_options", "events are not padded", {"include_obfuscation": False}, {}),
    neutral("background", "a reply is given where it was asked for", False),
    neutral("truncation", "a shortened prompt is another prompt", "disabled"),
    neutral("max_tool_calls", "the server has no tools of its own"),
    refused("conversation", "use `previous_response_id`"),
    refused("prompt", "there are no stored prompts"),
    refused("context_management", "a shortened prompt is another prompt; shorten it before sending"),
)


def _items(value: object) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise PydanticCustomError("input", "must be a text or a list of items")
    for number, item in enumerate(value):
        _check_item(item, f"[{number}]")
    return value


def _check_item(item: dict[str, Any], at: str) -> None:
    kind = item.get("type", "message")
    wanted: dict[str, tuple[tuple[str, Any], ...]] = {
        "message": (("role", str), ("content", (str, list))),
        "function_call": (("call_id", str), ("name", str), ("arguments", str)),
        "function_call_output": (("call_id", str), ("output", (str, list))),
        "reasoning": (),
    }
    if kind not in wanted:
        shown = {"at": f"{at}.type", "kind": str(kind)}
        raise PydanticCustomError("item", "items of type {kind} are not supported; this model reads text", shown)
    for name, of in wanted[kind]:
        if not isinstance(item.get(name), of):
            raise PydanticCustomError("item", "is missing or of the wrong kind", {"at": f"{at}.{name}"})


class ResponseTool(Strict):
    type: Literal["function"] = wish('"function"', "the server has no tools of its own; required", ...)
    name: str = wish("string", "required", ..., pattern=TOOL_NAME)
    description: str | None = wish("string", "told to the model")
    parameters: dict[str, Any] | None = wish("object", "a JSON schema of the arguments")
    strict: bool | None = wish("boolean", "calls of this tool are held to its schema; default false")


class ResponseNamedTool(Strict):
    type: Literal["function"] = wish('"function"', "required", ...)
    name: str = wish("string", "required", ...)


class ResponseTextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = wish('"text", "json_object", "json_schema"', "required", ...)
    name: str | None = wish("string", "the caller's name for it")
    description: str | None = wish("string", "the caller's own note")
    schema_: dict[str, Any] | None = wish("object", 'with type "json_schema"', alias="schema")
    strict: bool | None = wish("boolean", "a reply is held to the schema either way")


class ResponseText(Strict):
    format: ResponseTextFormat | None = wish("object", "`type`, `schema`")
    verbosity: Literal["medium"] | None = wish('"medium"', "ask for it in a message")


class ResponseReasoning(Strict):
    effort: Effort | None = wish(", ".join(f'"{effort}"' for effort in EFFORTS), "as `reasoning_effort` of a chat")
    summary: Literal["auto", "concise", "detailed"] | None = wish("string", "accepted: reasoning is shown as it is")
    generate_summary: Literal["auto", "concise", "detailed"] | None = wish("string", "accepted: as `summary`")


class ResponsesRequest(Strict):
    model: str | None = wish("string", "the served model; may be left out")
    input: Annotated[Any, PlainValidator(_items)] = wish(
        "string or list of items", "items of type message, function_call, function_call_output and reasoning; required", ...
    )
    instructions: str | None = wish("string", "said before everything else; not kept for the next response")
    previous_response_id: str | None = wish("string", "go on from that response, if it is still remembered")
    store: bool = wish("boolean", "remember the response in memory, for `previous_response_id`", True)
    stream: bool = wish("boolean", "answer in server-sent events", False)
    max_output_tokens: Whole | None = wish("integer >= 1", "the most tokens of the reply")
    temperature: float | None = wish("number, 0 … 100", "0 is greedy")
    top_p: float | None = wish("number, over 0 … 1", "1: off")
    top_logprobs: int | None = wish(
        f"integer, 0 … {MAX_TOP_LOGPROBS}", f"alternatives of each token; with `include: [{LOGPROBS}]`", ge=0, le=MAX_TOP_LOGPROBS
    )
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = wish(
        "list of strings", f"`{LOGPROBS}` is honoured; `reasoning.encrypted_content` is accepted: reasoning is in the clear", []
    )
    tools: list[ResponseTool] = wish("list of objects", "see below", [])
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool | None = wish(
        '"none", "auto", "required" or {"type": "function", "name": …}', "default `auto`"
    )
    parallel_tool_calls: bool = wish("boolean", "false: at most one call in a reply", True)
    text: ResponseText | None = wish("object", "`format`: what the reply is held to")
    reasoning: ResponseReasoning | None = wish("object", "`effort`")
    metadata: dict[str, str] | None = wish("object", "the caller's own notes, given back")
    top_k: Whole | None = wish("integer >= -1", "0 and -1: off")
    min_p: float | None = wish("number, 0 … 1", "0: off")
    seed: int | None = Field(
        None,
        description="left out, the server draws one; the reply says which",
        json_schema_extra={"values": "integer, 0 … 2^53 - 1"},
        ge=0,
        lt=SEED_LIMIT,
    )
    thinking_budget: Whole | None = wish("integer >= 0", "tokens of thinking, after which it is closed")
    chat_template_kwargs: dict[str, Any] = wish("object", "variables of the checkpoint's chat template", {})
    speculation: bool = wish("boolean", "false: nothing is guessed ahead; guesses never change a reply", True)

    def said(self) -> list[dict[str, Any]]:
        """The chat messages of the input."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return _messages(self.input)

    def chat(self, before: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The fields of the chat request that this means, behind an earlier conversation."""
        opening = [{"role": "system", "content": self.instructions}] if self.instructions else []
        same = ("temperature", "top_p", "top_k", "min_p", "seed", "thinking_budget", "speculation", "stream")
        given = {name: getattr(self, name) for name in same if getattr(self, name) is not None}
        if self.max_output_tokens is not None:
            given["max_tokens"] = self.max_output_tokens
        if LOGPROBS in self.include:
            given |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.reasoning is not None and self.reasoning.effort is not None:
            given["reasoning_effort"] = self.reasoning.effort
        return {
            "messages": [*opening, *before, *self.said()],
            "tools": [_tool(tool) for tool in self.tools],
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            **given,
            **self._choice(),
            **self._format(),
        }

    def _choice(self) -> dict[str, Any]:
        choice = self.tool_choice
        if isinstance(choice, ResponseNamedTool):
            return {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
        return {} if choice is None else {"tool_choice": choice}

    def _format(self) -> dict[str, Any]:
        shape = None if self.text is None else self.text.format
        if shape is None or shape.type == "text":
            return {}
        if shape.type == "json_object":
            return {"response_format": {"type": "json_object"}}
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": shape.schema_ or {}}}}

    def names(self) -> dict[str, str]:
        """Names of the chat request → the caller's."""
        tools = {f"tools[{n}].function": f"tools[{n}]" for n in range(len(self.tools))}
        return {
            **tools,
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "response_format.json_schema.schema": "text.format.schema",
            "response_format": "text.format",
            "reasoning_effort": "reasoning.effort",
            "tool_choice.function.name": "tool_choice.name",
        }


def _tool(tool: ResponseTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as chat messages: what the assistant thought, said and called in a row is one message."""
    messages: list[dict[str, Any]] = []

    def assistant() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for number, item in enumerate(items):
        at = f"input[{number}]"
        match item.get("type", "message"):
            case "message" if item["role"] == "assistant":
                said = assistant()
                said["content"] += _text(item["content"], f"{at}.content")
            case "message":
                messages.append({"role": item["role"], "content": _text(item["content"], f"{at}.content")})
            case "function_call":
                call = {"id": item["call_id"], "type": "function"}
                call["function"] = {"name": item["name"], "arguments": item["arguments"]}
                assistant().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _text(item["output"], f"{at}.output")
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            case "reasoning":
                thought = "".join(part.get("text", "") for part in item.get("content") or () if isinstance(part, dict))
                if thought:
                    assistant()["reasoning_content"] = thought
    return messages


def _text(content: Any, at: str) -> str:
    """A text, or parts of it, joined by line breaks."""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
            raise BadParameter(f"{at}[{number}]", f"parts of type {kind} are not supported; this model reads text")
        texts.append(part["text"])
    return "\n".join(texts)


class ResponseMemory:
    """Conversations by the id of the response that they ended with. Bounded: the oldest are forgotten. Any thread may use it."""

    def __init__(self, most_characters: int = MOST_CHARACTERS) -> None:
        self._most = most_characters
        self._kept: OrderedDict[str, tuple[list[dict[str, Any]], int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def keep(self, response_id: str, messages: list[dict[str, Any]]) -> None:
        size = sum(len(str(message)) for message in messages)
        with self._lock:
            self._kept[response_id] = (messages, size)
            self._size += size
            while self._size > self._most and self._kept:
                self._size -= self._kept.popitem(last=False)[1][1]

    def find(self, response_id: str | None) -> list[dict[str, Any]]:
        if response_id is None:
            return []
        with self._lock:
            found = self._kept.get(response_id)
        if found is None:
            raise BadParameter(
                "previous_response_id", "is not remembered (anymore, or it was not stored); send the whole conversation as input"
            )
        return found[0]


# ---------------------------------------------------------------------------------------------- the reply


class ResponseScribe:
    """Writes one reply as a response."""

    def __init__(self, job: Job, asked: ResponsesRequest, *, card: ModelCard, scribe: Scribe, memory: ResponseMemory) -> None:
        self._job = job
        self._asked = asked
        self._card = card
        self._scribe = scribe  # knows how logprobs are written
        self._memory = memory
        self._blocks = Blocks()
        self._begun = int(time.time())
        self._number = 0
        self._last: Part | None = None

    def chunks(self, part: Part) -> list[Json]:
        events: list[Json] = []
        if self._last is None:
            opened = self._response([], status="in_progress", usage=None, part=part)
            events += [self._event("response.created", response=opened), self._event("response.in_progress", response=opened)]
        self._last = part
        for change in self._blocks.take(part):
            events += self._changed(change)
        return events

    def ending(self, usage: Usage) -> list[Json]:
        assert self._last is not None
        events: list[Json] = []
        for change in self._blocks.end():
            events += self._changed(change)
        whole = self._finished(self._last, usage)
        return [*events, self._event(f"response.{whole['status']}", response=whole)]

    def whole(self, parts: Mapping[int, Sequence[Part]], usage: Usage) -> Json:
        for part in parts[0]:
            self._blocks.take(part)
        self._blocks.end()
        return self._finished(parts[0][-1], usage)

    def _finished(self, last: Part, usage: Usage) -> Json:
        status = _status(last.finish)
        items = [self._item(block, status) for block in self._blocks.blocks]
        whole = self._response(items, status=status, usage=usage, part=last)
        if self._asked.store:
            before = self._memory.find(self._asked.previous_response_id)
            said = [item for item in items if item["type"] != "reasoning"]
            self._memory.keep(self._job.id, [*before, *self._asked.said(), *_messages(said)])
        return whole

    # ------------------------------------------------------------------ events

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _changed(self, change: Opened | Grew | Closed) -> list[Json]:
        block = change.block
        place = {"item_id": self._item_id(block), "output_index": block.index}
        inside = {**place, "content_index": 0}
        match change:
            case Opened():
                item = self._item(block, "in_progress", empty=True)
                added = self._event("response.output_item.added", output_index=block.index, item=item)
                if block.kind == "call":
                    return [added]
                return [added, self._event("response.content_part.added", **inside, part=self._part(block, empty=True))]
            case Grew(_, text, tokens):
                match block.kind:
                    case "call":
                        return [self._event("response.function_call_arguments.delta", **place, delta=text)]
                    case "thinking":
                        return [self._event("response.reasoning_text.delta", **inside, delta=text)]
                    case "text":
                        logprobs = self._logprobs(tokens)
                        return [self._event("response.output_text.delta", **inside, delta=text, logprobs=logprobs)]
            case Closed():
                item = self._item(block, "completed")
                done = self._event
                if block.kind == "call":
                    first = [done("response.function_call_arguments.done", **place, arguments=block.text, name=item["name"])]
                elif block.kind == "thinking":
                    first = [done("response.reasoning_text.done", **inside, text=block.text)]
                else:
                    logprobs = self._logprobs(block.tokens or ())
                    first = [done("response.output_text.done", **inside, text=block.text, logprobs=logprobs)]
                if block.kind != "call":
                    first.append(done("response.content_part.done", **inside, part=self._part(block)))
                return [*first, done("response.output_item.done", output_index=block.index, item=item)]

    # ------------------------------------------------------------------ objects

    def _item_id(self, block: Block) -> str:
        kinds = {"thinking": "rs", "text": "msg", "call": "fc"}
        return f"{kinds[block.kind]}_{self._job.id.partition('_')[2]}_{block.index}"

    def _item(self, block: Block, status: str, *, empty: bool = False) -> Json:
        head: Json = {"id": self._item_id(block), "status": status}
        match block.kind:
            case "thinking":
                return {**head, "type": "reasoning", "summary": [], "content": [] if empty else [self._part(block)]}
            case "text":
                content = [] if empty else [self._part(block)]
                return {**head, "type": "message", "role": "assistant", "content": content}
            case "call":
                assert block.call is not None
                arguments = "" if empty else block.text
                return {
                    **head,
                    "type": "function_call",
                    "call_id": block.call.id,
                    "name": block.call.name,
                    "arguments": arguments,
                }

    def _part(self, block: Block, *, empty: bool = False) -> Json:
        text = "" if empty else block.text
        if block.kind == "thinking":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self._logprobs(() if empty else block.tokens or ()),
        }

    def _logprobs(self, tokens: Sequence[Token]) -> list[Json]:
        return self._scribe.chat_logprobs(tokens) if self._job.logprobs else []

    def _response(self, items: list[Json], *, status: str, usage: Usage | None, part: Part) -> Json:
        asked, params = self._asked, self._job.asks[0].params
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._begun,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._card.name,
            "output": items,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
            "store": asked.store,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": _format_of(asked)},
            "tool_choice": "auto" if asked.tool_choice is None else _plain(asked.tool_choice),
            "tools": [{"strict": False, **tool.model_dump(exclude_none=True)} for tool in asked.tools],
            "truncation": "disabled",
            "metadata": asked.metadata or {},
            "usage": None if usage is None else write_usage(usage),
            "seed": part.seed,
            "system_fingerprint": self._card.fingerprint,
        }


def _plain(choice: str | ResponseNamedTool) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump()


def _format_of(asked: ResponsesRequest) -> Json:
    shape = None if asked.text is None else asked.text.format
    return {"type": "text"} if shape is None else shape.model_dump(by_alias=True, exclude_none=True)


def _status(finish: Finish | None) -> str:
    return "incomplete" if finish == "length" else "completed"


def write_usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
