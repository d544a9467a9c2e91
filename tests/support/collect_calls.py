"""Collect the events of a tool call parser."""

from __future__ import annotations

from collections.abc import Iterable

from onedraw.text.tools.call_parsers import CallArguments, CallEnd, CallEvent, CallStart
from onedraw.text.tools.call_stream import Content


def collect_calls(events: Iterable[CallEvent | Content]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and the calls by name with their arguments."""
    content, calls = "", []
    for event in events:
        match event:
            case Content(text):
                content += text
            case CallStart(name):
                calls.append([name, ""])
            case CallArguments(text):
                calls[-1][1] += text
            case CallEnd():
                pass
    return content, [(name, arguments) for name, arguments in calls]
