"""What a query may ask of stored responses: nothing, or a page of a list.

In: the query of a request. Out: a page of items in OpenAI's shape, or a refusal that names the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from onedraw.errors import BadParameter

MOST = 100


@dataclass(frozen=True, slots=True)
class Page:
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


def page_of(request: Request) -> Page:
    check_query(request, {"limit": (), "order": ("desc", "asc"), "after": (), "include": (), "include[]": ()})
    limit = request.query_params.get("limit", "20")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= MOST):
        raise BadParameter("limit", f"must be a whole number in [1, {MOST}]")
    newest_first = request.query_params.get("order", "desc") == "desc"
    return Page(int(limit), newest_first, request.query_params.get("after"))


def listing(items: Sequence[Mapping[str, Any]], page: Page) -> dict[str, Any]:
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
