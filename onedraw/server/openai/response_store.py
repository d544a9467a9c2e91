"""Stored responses, in memory: for `previous_response_id`, for item references, and for GET and DELETE.

In: finished responses; ids and query parameters. Out: the stored response, its conversation, or a page of its input items.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from onedraw.errors import BadParameter, BadRequest

MAX_CHARACTERS = 2**26  # of all stored responses together

Json = dict[str, Any]


class NoSuchResponse(BadRequest):
    code, status = "response_not_found", 404


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was sent, its input items, and the conversation up to its end as chat messages."""

    response: Json
    items: tuple[Json, ...]  # the input, each with an id
    messages: tuple[Json, ...]
    owner: str | None = None  # name of the caller's API key

    @property
    def size(self) -> int:
        return sum(len(str(part)) for part in (self.response, *self.items, *self.messages))

    @property
    def referable(self) -> Sequence[Json]:
        """Items that an item_reference can name."""
        output: list[Json] = self.response["output"]
        return [*self.items, *output]


class ResponseStore:
    """Bounded: the oldest responses are dropped. Any thread may use it."""

    def __init__(self, most_characters: int = MAX_CHARACTERS) -> None:
        self._most = most_characters
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[tuple[str | None, str], list[Json]] = {}  # by owner and id
        self._size = 0
        self._lock = threading.Lock()

    def keep(self, stored: StoredResponse) -> None:
        if stored.size > self._most:  # it would evict all others, and itself
            return
        with self._lock:
            self._kept[stored.response["id"]] = stored
            for item in stored.referable:
                self._items.setdefault((stored.owner, item["id"]), []).append(item)
            self._size += stored.size
            while self._size > self._most and self._kept:
                self._drop(next(iter(self._kept)))

    def find(self, response_id: str, owner: str | None = None) -> StoredResponse:
        """A response of another caller is reported as not found."""
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
        """The conversation up to the end of that response."""
        if response_id is None:
            return ()
        try:
            return self.find(response_id, owner).messages
        except NoSuchResponse:
            raise BadParameter(
                "previous_response_id", "is not stored (it was dropped, or never stored); send the whole conversation as input"
            ) from None

    def resolved(self, items: Sequence[Json], owner: str | None = None) -> list[Json]:
        """The items, with references replaced by the items they name."""
        found: list[Json] = []
        for number, item in enumerate(items):
            if item.get("type") == "item_reference":
                with self._lock:
                    held = self._items.get((owner, item["id"]))
                    known: Mapping[str, Any] | None = held[-1] if held else None
                if known is None:
                    raise BadParameter(f"input[{number}].id", "this item is not stored; send the item itself")
                item = dict(known)
            found.append(item)
        return found

    def _drop(self, response_id: str) -> None:
        gone = self._kept.pop(response_id)
        self._size -= gone.size
        for item in gone.referable:
            # A referenced item also belongs to the responses that refer to it.
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
    """Refuse unknown parameters and values. `known`: parameter → accepted values; an empty tuple accepts all."""
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise BadParameter(name, "unknown parameter")
        if known[name] and value not in known[name]:
            raise BadParameter(name, f"must be {' or '.join(known[name])}")


def page_of(request: Request) -> ItemPage:
    check_query(request, {"limit": (), "order": ("desc", "asc"), "after": (), "include": (), "include[]": ()})
    limit = request.query_params.get("limit", "20")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= MAX_PAGE):
        raise BadParameter("limit", f"must be a whole number in [1, {MAX_PAGE}]")
    newest_first = request.query_params.get("order", "desc") == "desc"
    return ItemPage(int(limit), newest_first, request.query_params.get("after"))


def listing(items: Sequence[Mapping[str, Any]], page: ItemPage) -> dict[str, Any]:
    ordered = list(reversed(items)) if page.newest_first else list(items)
    if page.after is not None:
        ids = [item["id"] for item in ordered]
        if page.after not in ids:
            raise BadParameter("after", "is not an item of this list")
        ordered = ordered[ids.index(page.after) + 1 :]
    shown = ordered[: page.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(ordered) > len(shown),
    }
