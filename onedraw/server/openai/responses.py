"""Replies of /v1/responses, either as the events of a stream or as one object.

The input is pieces (parts of a reply as they arrive), or a whole reply, and the conversation before it. The output is items in
OpenAI's shapes: messages, tool calls, reasoning. A finished response is kept in the ResponseStore unless the request has
`store: false`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from starlette.requests import Request

from onedraw.errors import BadParameter, BadRequest, OnedrawError
from onedraw.limits import MAX_REFERENCED_CHARACTERS
from onedraw.llm.reply import BlockChange, BlockClosed, BlockGrew, BlockOpened, ContentBlock, Reply
from onedraw.server.openai.chat import Json, OpenAIWriter
from onedraw.server.openai.responses_request import ResponsesRequest, messages_of
from onedraw.server.prompts import PreparedRequest
from onedraw.server.protocol import ToolChoice
from onedraw.types import Finish, ModelCard, Piece, ReplyToken, Usage

MAX_STORED = 2**26  # The limit on the bytes of all stored responses together, as JSON.
MAX_BYTES = 2**22  # The limit on the bytes of one, with its conversation: it may be asked for many times at once.


class NoSuchResponse(BadRequest):
    code, status = "response_not_found", 404


@dataclass(frozen=True)
class StoredResponse:
    """A response as it was sent, its input items, and the whole conversation including it as chat messages."""

    response: Json
    items: tuple[Json, ...]  # the items of the input; each has an id
    messages: tuple[Json, ...]
    owner: str | None = None  # name of the API key that created it; no other key may read it

    @cached_property
    def size(self) -> int:
        """The number of bytes as JSON."""
        return sum(len(msgspec.json.encode(part)) for part in (self.response, self.items, self.messages))

    @property
    def referable(self) -> Sequence[Json]:
        """The input and output items, which a later input can refer to with an `item_reference`."""
        output: list[Json] = self.response["output"]
        return [*self.items, *output]


class ResponseStore:
    """Stored responses in memory. When they exceed the limit, the oldest are dropped. Its methods are thread-safe."""

    def __init__(self, most: int = MAX_STORED, *, most_of_one: int = MAX_BYTES) -> None:
        self._most, self._most_of_one = most, min(most, most_of_one)
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        # (owner, item id) → the stored items with that id. Several responses can contain the same item.
        self._items: dict[tuple[str | None, str], list[Json]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def keep(self, stored: StoredResponse) -> None:
        if stored.size > self._most_of_one:
            return
        with self._lock:
            self._kept[stored.response["id"]] = stored
            for item in stored.referable:
                self._items.setdefault((stored.owner, item["id"]), []).append(item)
            self._size += stored.size
            while self._size > self._most and self._kept:
                self._drop(next(iter(self._kept)))

    def find(self, response_id: str, owner: str | None = None) -> StoredResponse:
        """Return a stored response. One that belongs to another key is reported as not found, to reveal nothing."""
        with self._lock:
            found = self._kept.get(response_id)
        if found is None or found.owner != owner:
            raise NoSuchResponse(f"response {response_id!r} is not stored (it was dropped, or never stored)", param="response_id")
        return found

    def delete(self, response_id: str, owner: str | None = None) -> None:
        self.find(response_id, owner)
        with self._lock:
            if response_id in self._kept:
                self._drop(response_id)

    def before(self, response_id: str | None, owner: str | None = None) -> tuple[Json, ...]:
        """Return the messages of the conversation up to the end of that response, or none if there is no id."""
        if response_id is None:
            return ()
        try:
            return self.find(response_id, owner).messages
        except NoSuchResponse:
            raise BadParameter(
                "previous_response_id", "is not stored (it was dropped, or never stored); send the whole conversation as input"
            ) from None

    def resolved(self, items: Sequence[Json], owner: str | None = None) -> list[Json]:
        """Return the items, with each `item_reference` replaced by the stored item it names. A short input could refer to a long
        item very often, so the characters of all that it refers to are counted."""
        found: list[Json] = []
        sizes: dict[str, int] = {}  # item id → number of characters
        left = MAX_REFERENCED_CHARACTERS
        for number, item in enumerate(items):
            if item.get("type") == "item_reference":
                with self._lock:
                    held = self._items.get((owner, item["id"]))
                    known: Mapping[str, Any] | None = held[-1] if held else None
                if known is None:
                    raise BadParameter(f"input[{number}].id", "this item is not stored; send the item itself")
                if item["id"] not in sizes:
                    sizes[item["id"]] = len(str(known))
                left -= sizes[item["id"]]
                if left < 0:
                    raise BadParameter(
                        f"input[{number}].id",
                        f"the items that the input refers to have over {MAX_REFERENCED_CHARACTERS:,} characters; refer to fewer",
                    )
                item = dict(known)
            found.append(item)
        return found

    def _drop(self, response_id: str) -> None:
        gone = self._kept.pop(response_id)
        self._size -= gone.size
        for item in gone.referable:
            # Another stored response may contain the same item, so only this response's entry is removed.
            left = [one for one in self._items.pop((gone.owner, item["id"]), ()) if one is not item]
            if left:
                self._items[gone.owner, item["id"]] = left


# ---------------------------------------------------------------------------------------------- queries


MAX_PAGE = 100


@dataclass(frozen=True, slots=True)
class ItemPage:
    limit: int = 20
    newest_first: bool = True
    after: str | None = None


def check_query(request: Request, known: Mapping[str, Sequence[str]]) -> None:
    """Refuse unknown query parameters and values. `known` maps a parameter to its values; an empty tuple allows any value."""
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise BadParameter(name, "unknown parameter")
        if known[name] and value not in known[name]:
            raise BadParameter(name, f"must be {' or '.join(known[name])}")


def page_of(
    request: Request, *, also: Sequence[str] = ("include", "include[]"), most: int = MAX_PAGE, usual: int = 20
) -> ItemPage:
    """Read the query of a listing. `also` names further parameters that it may have. A page has at most `most` items, and
    `usual` items if the query has no `limit`."""
    check_query(request, {"limit": (), "order": ("desc", "asc"), "after": (), **dict.fromkeys(also, ())})
    limit = request.query_params.get("limit", str(usual))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise BadParameter("limit", f"must be a whole number in [1, {most}]")
    newest_first = request.query_params.get("order", "desc") == "desc"
    return ItemPage(int(limit), newest_first, request.query_params.get("after"))


def listing(items: Sequence[Mapping[str, Any]], page: ItemPage) -> dict[str, Any]:
    ordered = list(reversed(items)) if page.newest_first else list(items)
    if page.after is not None:
        ids = [item["id"] for item in ordered]
        if page.after not in ids:
            raise BadParameter("after", "is not the id of an item in this list; send the last_id of the page before")
        ordered = ordered[ids.index(page.after) + 1 :]
    shown = ordered[: page.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(ordered) > len(shown),
    }


# ---------------------------------------------------------------------------------------------- the reply


@dataclass(frozen=True, slots=True)
class EventNames:
    """The names that OpenAI gives to the stream events of one kind of content part."""

    part: str  # stem of the events for the begin and end of a part, e.g. `response.content_part`
    text: str  # stem of the events for its text, e.g. `response.output_text`
    number: str  # the event's field that holds the index of the part


TEXT = EventNames("response.content_part", "response.output_text", "content_index")
REASONING = EventNames("response.content_part", "response.reasoning_text", "content_index")
SUMMARY = EventNames("response.reasoning_summary_part", "response.reasoning_summary_text", "summary_index")


class ResponsesWriter:
    """Writes one reply as a response and stores it. `before` is the conversation before the input, as chat messages; `items`
    is the input with references resolved."""

    def __init__(
        self,
        prepared: PreparedRequest,
        body: ResponsesRequest,
        *,
        before: Sequence[Json],
        items: Sequence[Json],
        card: ModelCard,
        openai: OpenAIWriter,
        store: ResponseStore,
        owner: str | None = None,
    ) -> None:
        self._prepared = prepared
        self._body = body
        self._before = before
        self._items = items
        self._card = card
        self._openai = openai  # writes the logprobs, which have the same shape in a chat
        self._store = store
        self._owner = owner
        self._summarizes = body.summary is not None
        self._reply: Reply | None = None  # the reply so far; None until the stream's first piece
        self._created = int(time.time())
        self._sequence_number = 0

    def chunks(self, piece: Piece) -> list[Json]:
        events: list[Json] = []
        if self._reply is None:
            self._reply = Reply()
            created = self._response([], status="in_progress", usage=None)
            events += [self._event("response.created", response=created), self._event("response.in_progress", response=created)]
        for change in self._reply.add(piece):
            events += self._changed(change)
        return events

    def ending(self, usage: Usage) -> list[Json]:
        assert self._reply is not None
        whole = self._finished(self._reply, usage)
        return [self._event(f"response.{whole['status']}", response=whole)]

    def failed(self, error: OnedrawError) -> list[Json]:
        assert self._reply is not None
        items = [self._item(block, "incomplete") for block in self._reply.blocks]
        whole = self._response(items, status="failed", usage=None)
        whole["error"] = {"code": error.code, "message": str(error)}
        event = self._event("error", code=error.code, message=str(error), param=error.param)
        return [event, self._event("response.failed", response=whole)]

    def whole(self, replies: Sequence[Reply], usage: Usage) -> Json:
        return self._finished(replies[0], usage)

    def _finished(self, reply: Reply, usage: Usage) -> Json:
        items = [self._done_item(block) for block in reply.blocks]
        whole = self._response(items, status=_status(reply.finish), usage=usage)
        if self._body.stores:
            spoken = [item for item in items if item["type"] != "reasoning"]
            messages = (*self._before, *messages_of(self._items), *messages_of(spoken))
            self._store.keep(StoredResponse(whole, self._input_items(), messages, self._owner))
        return whole

    def _input_items(self) -> tuple[Json, ...]:
        """Return the input with an id for every item. Paging by id needs distinct ids, so a repeated id is replaced."""
        seen: set[str] = set()
        found: list[Json] = []
        for number, item in enumerate(self._items):
            own = f"in_{self._prepared.id.partition('_')[2]}_{number}"
            name = item.get("id") or own
            name = own if name in seen else name
            seen.add(name)
            found.append(self._with_id(name, item))
        return tuple(found)

    def _with_id(self, name: str, item: Json) -> Json:
        """Return an item with this id. A message whose content is a string gets it as a list with one text part."""
        content = item.get("content")
        if item["type"] == "message" and isinstance(content, str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            return {**item, "id": name, "status": "completed", "content": [{"type": kind, "text": content}]}
        return {**item, "id": name}

    # ------------------------------------------------------------------ events

    def _event(self, kind: str, **fields: Any) -> Json:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number - 1, **fields}

    def _changed(self, change: BlockChange) -> list[Json]:
        block = change.block
        if isinstance(change, BlockGrew) and not change.text and not self._prepared.logprobs:
            return []
        if block.channel == "tool":
            return self._call_changed(change, block)
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
                    self._event(f"{names.text}.done", **place, text=block.text, **self._scored(block, block.tokens)),
                    self._event(f"{names.part}.done", **place, part=self._part(block)),
                    self._event("response.output_item.done", output_index=block.index, item=self._done_item(block)),
                ]

    def _call_changed(self, change: BlockChange, block: ContentBlock) -> list[Json]:
        """Return the events of a tool call. Its name is known from the start, so only the arguments have deltas."""
        place, kind = {"item_id": self._item_id(block), "output_index": block.index}, "response.function_call_arguments"
        match change:
            case BlockOpened():
                item = self._item(block, "in_progress", empty=True)
                return [self._event("response.output_item.added", output_index=block.index, item=item)]
            case BlockGrew(_, text):
                return [self._event(f"{kind}.delta", **place, delta=text)]
            case BlockClosed():
                item = self._done_item(block)
                done = self._event(f"{kind}.done", **place, arguments=block.text, name=item["name"])
                return [done, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _names(self, block: ContentBlock) -> EventNames:
        if block.channel == "content":
            return TEXT
        return SUMMARY if self._summarizes else REASONING

    def _scored(self, block: ContentBlock, tokens: Sequence[ReplyToken]) -> Json:
        return {"logprobs": self._logprobs(tokens)} if block.channel == "content" else {}

    # ------------------------------------------------------------------ objects

    def _item_id(self, block: ContentBlock) -> str:
        prefixes = {"reasoning": "rs", "content": "msg", "tool": "fc"}
        return f"{prefixes[block.channel]}_{self._prepared.id.partition('_')[2]}_{block.index}"

    def _done_item(self, block: ContentBlock) -> Json:
        return self._item(block, "incomplete" if block.cut else "completed")

    def _item(self, block: ContentBlock, status: str, *, empty: bool = False) -> Json:
        head: Json = {"id": self._item_id(block), "status": status}
        match block.channel:
            case "reasoning":
                shown = [] if empty else [self._part(block)]
                summary, content = (shown, []) if self._summarizes else ([], shown)
                return {**head, "type": "reasoning", "summary": summary, "content": content}
            case "content":
                content = [] if empty else [self._part(block)]
                return {**head, "type": "message", "role": "assistant", "content": content}
            case "tool":
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
        if block.channel == "reasoning":
            return {"type": "summary_text" if self._summarizes else "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self._logprobs(() if empty else block.tokens),
        }

    def _logprobs(self, tokens: Sequence[ReplyToken]) -> list[Json]:
        return self._openai.chat_logprobs(tokens) if self._prepared.logprobs else []

    def _response(self, items: list[Json], *, status: str, usage: Usage | None) -> Json:
        body, params = self._body, self._prepared.generations[0].params
        return {
            "id": self._prepared.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._card.name,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": body.summary},
            "store": body.stores,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": _format_of(body)},
            "tool_choice": _choice_of(body.tool_choice),
            "tools": [{"strict": False, **tool.model_dump(exclude_none=True)} for _, tool in body.functions],
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "usage": None if usage is None else write_usage(usage),
            "seed": self._prepared.seed_of(0),
            "system_fingerprint": self._card.fingerprint,
        }


def _choice_of(choice: ToolChoice | None) -> Any:
    """Return the tool choice in one of the spellings that a request can have."""
    if choice is None or choice.names is None:
        return "auto" if choice is None else choice.mode
    names = [{"type": "function", "name": name} for name, _ in choice.names]
    if choice.named:
        return names[0]
    return {"type": "allowed_tools", "mode": choice.mode, "tools": names}


def _format_of(body: ResponsesRequest) -> Json:
    shape = None if body.text is None else body.text.format
    return {"type": "text"} if shape is None else shape.model_dump(by_alias=True, exclude_none=True)


def _status(finish: Finish | None) -> str:
    return "incomplete" if finish in ("length", "moved") else "completed"


def write_usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
