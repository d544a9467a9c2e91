"""`/v1/responses`: OpenAI's newer shape of the same replies.

In: the parts of a reply, and the conversations of earlier ones. Out: output items, whole or as events. Nothing is decided
here: a response is one more rendering of the stream of pieces. `memory.py` keeps what it is told to.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onedraw.errors import OnedrawError
from onedraw.server.blocks import BlockClosed, BlockGrew, BlockOpened, ContentBlock, ContentBlocks
from onedraw.server.generation import PreparedRequest
from onedraw.server.openai.chat import Json, OpenAIWriter
from onedraw.server.openai.choice_parts import ReplyPart, Token
from onedraw.server.openai.response_store import ResponseStore, StoredResponse
from onedraw.server.openai.responses_request import ResponsesRequest, messages_of
from onedraw.server.tool_fields import ToolChoice
from onedraw.types import Finish, ModelCard, Usage


@dataclass(frozen=True, slots=True)
class EventNames:
    """What the events of a part are called, and under which name its number stands."""

    part: str
    text: str
    number: str


TEXT = EventNames("response.content_part", "response.output_text", "content_index")
THOUGHT = EventNames("response.content_part", "response.reasoning_text", "content_index")
SUMMARY = EventNames("response.reasoning_summary_part", "response.reasoning_summary_text", "summary_index")


class ResponsesWriter:
    """Writes one reply as a response, and has it remembered. `before`: the conversation it goes on from; `items`: what was
    asked, without references."""

    def __init__(
        self,
        job: PreparedRequest,
        asked: ResponsesRequest,
        *,
        before: Sequence[Json],
        items: Sequence[Json],
        card: ModelCard,
        scribe: OpenAIWriter,
        memory: ResponseStore,
        owner: str | None = None,
    ) -> None:
        self._job = job
        self._asked = asked
        self._before = before
        self._items = items
        self._card = card
        self._scribe = scribe  # knows how logprobs are written
        self._memory = memory
        self._owner = owner
        self._summarizes = asked.summary is not None
        self._blocks = ContentBlocks()
        self._begun = int(time.time())
        self._number = 0
        self._last: ReplyPart | None = None

    def chunks(self, part: ReplyPart) -> list[Json]:
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
        for change in self._blocks.end(cut=_status(self._last.finish) == "incomplete"):
            events += self._changed(change)
        whole = self._finished(self._last, usage)
        return [*events, self._event(f"response.{whole['status']}", response=whole)]

    def failed(self, error: OnedrawError) -> list[Json]:
        assert self._last is not None
        items = [self._item(block, "incomplete") for block in self._blocks.blocks]
        whole = self._response(items, status="failed", usage=None, part=self._last)
        whole["error"] = {"code": error.code, "message": str(error)}
        told = self._event("error", code=error.code, message=str(error), param=error.param)
        return [told, self._event("response.failed", response=whole)]

    def whole(self, parts: Mapping[int, Sequence[ReplyPart]], usage: Usage) -> Json:
        for part in parts[0]:
            self._blocks.take(part)
        self._blocks.end(cut=_status(parts[0][-1].finish) == "incomplete")
        return self._finished(parts[0][-1], usage)

    def _finished(self, last: ReplyPart, usage: Usage) -> Json:
        status = _status(last.finish)
        items = [self._item(block, _standing(block)) for block in self._blocks.blocks]
        whole = self._response(items, status=status, usage=usage, part=last)
        if self._asked.store:
            said = [item for item in items if item["type"] != "reasoning"]
            messages = (*self._before, *messages_of(self._items), *messages_of(said))
            self._memory.keep(StoredResponse(whole, self._given(), messages, self._owner))
        return whole

    def _given(self) -> tuple[Json, ...]:
        """The input as it is given back. An id is that of one item, or nobody could turn pages: of several the first has it."""
        seen: set[str] = set()
        found: list[Json] = []
        for number, item in enumerate(self._items):
            own = f"in_{self._job.id.partition('_')[2]}_{number}"
            name = item.get("id") or own
            name = own if name in seen else name
            seen.add(name)
            found.append(self._named(name, item))
        return tuple(found)

    def _named(self, name: str, item: Json) -> Json:
        """An item with an id, its text as parts."""
        content = item.get("content")
        if item["type"] == "message" and isinstance(content, str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            return {**item, "id": name, "status": "completed", "content": [{"type": kind, "text": content}]}
        return {**item, "id": name}

    # ------------------------------------------------------------------ events

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _changed(self, change: BlockOpened | BlockGrew | BlockClosed) -> list[Json]:
        block = change.block
        if block.kind == "call":
            return self._called(change, block)
        names = self._names(block)
        place = {"item_id": self._item_id(block), "output_index": block.index, names.number: 0}
        match change:
            case BlockOpened():
                item = self._item(block, "in_progress", empty=True)
                added = self._event("response.output_item.added", output_index=block.index, item=item)
                return [added, self._event(f"{names.part}.added", **place, part=self._part(block, empty=True))]
            case BlockGrew(_, text, tokens):
                return [self._event(f"{names.text}.delta", **place, delta=text, **self._scored(block, tokens))]
            case BlockClosed():
                return [
                    self._event(f"{names.text}.done", **place, text=block.text, **self._scored(block, block.tokens or ())),
                    self._event(f"{names.part}.done", **place, part=self._part(block)),
                    self._event("response.output_item.done", output_index=block.index, item=self._item(block, _standing(block))),
                ]

    def _called(self, change: BlockOpened | BlockGrew | BlockClosed, block: ContentBlock) -> list[Json]:
        """Of a call only the arguments grow."""
        place, kind = {"item_id": self._item_id(block), "output_index": block.index}, "response.function_call_arguments"
        match change:
            case BlockOpened():
                item = self._item(block, "in_progress", empty=True)
                return [self._event("response.output_item.added", output_index=block.index, item=item)]
            case BlockGrew(_, text):
                return [self._event(f"{kind}.delta", **place, delta=text)]
            case BlockClosed():
                item = self._item(block, _standing(block))
                done = self._event(f"{kind}.done", **place, arguments=block.text, name=item["name"])
                return [done, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _names(self, block: ContentBlock) -> EventNames:
        if block.kind == "text":
            return TEXT
        return SUMMARY if self._summarizes else THOUGHT

    def _scored(self, block: ContentBlock, tokens: Sequence[Token]) -> Json:
        return {"logprobs": self._logprobs(tokens)} if block.kind == "text" else {}

    # ------------------------------------------------------------------ objects

    def _item_id(self, block: ContentBlock) -> str:
        kinds = {"thinking": "rs", "text": "msg", "call": "fc"}
        return f"{kinds[block.kind]}_{self._job.id.partition('_')[2]}_{block.index}"

    def _item(self, block: ContentBlock, status: str, *, empty: bool = False) -> Json:
        head: Json = {"id": self._item_id(block), "status": status}
        match block.kind:
            case "thinking":
                shown = [] if empty else [self._part(block)]
                summary, content = (shown, []) if self._summarizes else ([], shown)
                return {**head, "type": "reasoning", "summary": summary, "content": content}
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

    def _part(self, block: ContentBlock, *, empty: bool = False) -> Json:
        text = "" if empty else block.text
        if block.kind == "thinking":
            return {"type": "summary_text" if self._summarizes else "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self._logprobs(() if empty else block.tokens or ()),
        }

    def _logprobs(self, tokens: Sequence[Token]) -> list[Json]:
        return self._scribe.chat_logprobs(tokens) if self._job.logprobs else []

    def _response(self, items: list[Json], *, status: str, usage: Usage | None, part: ReplyPart) -> Json:
        asked, params = self._asked, self._job.generations[0].params
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
            "reasoning": {"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": asked.summary},
            "store": asked.store,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": _format_of(asked)},
            "tool_choice": _choice_of(asked.tool_choice),
            "tools": [{"strict": False, **tool.model_dump(exclude_none=True)} for tool in asked.tools],
            "truncation": "disabled",
            "metadata": asked.metadata or {},
            "usage": None if usage is None else write_usage(usage),
            "seed": part.seed,
            "system_fingerprint": self._card.fingerprint,
        }


def _choice_of(choice: ToolChoice | None) -> Any:
    """As the caller may have written it."""
    if choice is None or choice.names is None:
        return "auto" if choice is None else choice.mode
    names = [{"type": "function", "name": name} for name, _ in choice.names]
    if choice.named:
        return names[0]
    return {"type": "allowed_tools", "mode": choice.mode, "tools": names}


def _format_of(asked: ResponsesRequest) -> Json:
    shape = None if asked.text is None else asked.text.format
    return {"type": "text"} if shape is None else shape.model_dump(by_alias=True, exclude_none=True)


def _standing(block: ContentBlock) -> str:
    return "incomplete" if block.cut else "completed"


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
