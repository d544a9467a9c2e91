"""What a reader of calls said, put together."""

from __future__ import annotations

from collections.abc import Iterable

from onedraw.text.tools.call_parsers import Arguments, Begin, End, Event
from onedraw.text.tools.call_stream import Text


def gathered(events: Iterable[Event | Text]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and the calls by name with their arguments."""
    content, calls = "", []
    for event in events:
        match event:
            case Text(said):
                content += said
            case Begin(name):
                calls.append([name, ""])
            case Arguments(said):
                calls[-1][1] += said
            case End():
                pass
    return content, [(name, arguments) for name, arguments in calls]
