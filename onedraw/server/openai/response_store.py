"""What a query may ask of stored responses: nothing, or a page of a list.

In: the query of a request. Out: a page of items in OpenAI's shape, or a refusal that names the parameter.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from onedraw.errors import BadParameter, BadRequest

# -------------------- Responses that are remembered: for `previous_response_id`, for references to items, and to


MOST_CHARACTERS = 2**26  # of everything remembered together

Json = dict[str, Any]


class NoSuchResponse(BadRequest):
    code, status = "response_not_found", 404


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was told, what it was asked, and the conversation up to its end, as chat messages."""

    response: Json
    items: tuple[Json, ...]  # the input, each with an id
    messages: tuple[Json, ...]
    owner: str | None = None  # the name of the caller's key, where keys have names

    @property
    def size(self) -> int:
        return sum(len(str(part)) for part in (self.response, *self.items, *self.messages))

    @property
    def known(self) -> Sequence[Json]:
        """Items that can be referred to."""
        output: list[Json] = self.response["output"]
        return [*self.items, *output]


class ResponseStore:
    """Any thread may use it."""

    def __init__(self, most_characters: int = MOST_CHARACTERS) -> None:
        self._most = most_characters
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[tuple[str | None, str], list[Json]] = {}  # by owner and id
        self._size = 0
        self._lock = threading.Lock()

    def keep(self, remembered: StoredResponse) -> None:
        if remembered.size > self._most:  # it would drive out all others, and itself
            return
        with self._lock:
            self._kept[remembered.response["id"]] = remembered
            for item in remembered.known:
                self._items.setdefault((remembered.owner, item["id"]), []).append(item)
            self._size += remembered.size
            while self._size > self._most and self._kept:
                self._drop(next(iter(self._kept)))

    def find(self, response_id: str, owner: str | None = None) -> StoredResponse:
        """A response of another caller is as unknown as one that never was."""
        with self._lock:
            found = self._kept.get(response_id)
        if found is None or found.owner != owner:
            raise NoSuchResponse(
                f"no response {response_id!r} is remembered (anymore, or it was not stored)", param="response_id"
            )
        return found

    def forget(self, response_id: str, owner: str | None = None) -> None:
        self.find(response_id, owner)
        with self._lock:
            if response_id in self._kept:
                self._drop(response_id)

    def before(self, response_id: str | None, owner: str | None = None) -> tuple[Json, ...]:
        """The conversation that a response goes on from."""
        if response_id is None:
            return ()
        try:
            return self.find(response_id, owner).messages
        except NoSuchResponse:
            raise BadParameter(
                "previous_response_id", "is not remembered (anymore, or it was not stored); send the whole conversation as input"
            ) from None

    def resolved(self, items: Sequence[Json], owner: str | None = None) -> list[Json]:
        """The items, those that are only referred to in full."""
        found: list[Json] = []
        for number, item in enumerate(items):
            if item.get("type") == "item_reference":
                with self._lock:
                    held = self._items.get((owner, item["id"]))
                    known: Mapping[str, Any] | None = held[-1] if held else None
                if known is None:
                    raise BadParameter(f"input[{number}].id", "no such item is remembered; send the item itself")
                item = dict(known)
            found.append(item)
        return found

    def _drop(self, response_id: str) -> None:
        gone = self._kept.pop(response_id)
        self._size -= gone.size
        for item in gone.known:
            # An item that was referred to belongs to other responses too, which still have it.
            left = [one for one in self._items.pop((gone.owner, item["id"]), ()) if one is not item]
            if left:
                self._items[gone.owner, item["id"]] = left


# -------------------- What a query may ask of stored responses: nothing, or a page of a list.


MOST = 100


@dataclass(frozen=True, slots=True)
class ItemPage:
    limit: int = 20
    newest_first: bool = True
    after: str | None = None


def check_query(request: Request, known: Mapping[str, Sequence[str]]) -> None:
    """Refuse what asks for something else. `known`: parameter → values that ask for nothing; none: all of them do."""
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise BadParameter(name, "unknown parameter")
        if known[name] and value not in known[name]:
            raise BadParameter(name, f"must be {' or '.join(known[name])}")


def page_of(request: Request) -> ItemPage:
    check_query(request, {"limit": (), "order": ("desc", "asc"), "after": (), "include": (), "include[]": ()})
    limit = request.query_params.get("limit", "20")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= MOST):
        raise BadParameter("limit", f"must be a whole number in [1, {MOST}]")
    newest_first = request.query_params.get("order", "desc") == "desc"
    return ItemPage(int(limit), newest_first, request.query_params.get("after"))


def listing(items: Sequence[Mapping[str, Any]], page: ItemPage) -> dict[str, Any]:
    ordered = list(reversed(items)) if page.newest_first else list(items)
    if page.after is not None:
        ids = [item["id"] for item in ordered]
        if page.after not in ids:
            raise BadParameter("after", "is no item of this list")
        ordered = ordered[ids.index(page.after) + 1 :]
    shown = ordered[: page.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(ordered) > len(shown),
    }
