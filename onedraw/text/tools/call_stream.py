"""Tool calls told apart from content in a stream of text, their arguments as JSON, piece by piece.

In: the content of a reply in pieces of any size, and the dialect. Out: events: text, the beginning of a call with its name,
pieces of its arguments, its end. A parser is a generator that takes characters one by one, so how the text was cut does
not matter. What turns out to be no call before it has a name is text after all: nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from onedraw.text.reasoning import SPACE
from onedraw.text.tools.call_parsers import Another, CallArguments, CallEnd, CallEvent, CallStart, Malformed, Parser, parser_of
from onedraw.text.tools.dialects import MARKERS, CallableTools


@dataclass(frozen=True, slots=True)
class Content:
    text: str
    truncated_call: bool = False  # the reply ended inside a call that had no name yet


class ToolCallParser:
    """One owner: the stream of one reply."""

    def __init__(self, calls: CallableTools) -> None:
        self._make = parser_of(calls)
        self._markers = MARKERS.get(calls.dialect)
        self._opens = None if self._markers is None else self._markers[0]
        self._held = ""  # content that may begin a call, or is space before one
        self._running: Running | None = None
        self._began = False  # something other than space was said, outside of calls
        self._fresh = False  # nothing since the last call
        self._completed = 0

    @property
    def completed(self) -> int:
        return self._completed

    def push(self, text: str) -> list[CallEvent | Content]:
        out: list[CallEvent | Content] = []
        for character in text:
            self._take(character, out)
        return _joined(out)

    def finish(self) -> list[CallEvent | Content]:
        """What was held back, when no more text comes."""
        out: list[CallEvent | Content] = []
        if self._running is not None:
            self._give_up(out, truncated=True)
        self._say(self._held, out)
        self._held = ""
        return _joined(out)

    def _take(self, character: str, out: list[CallEvent | Content]) -> None:
        if self._running is not None:
            self._go_on(character, out)
        elif self._opens is None:
            self._bare(character, out)
        else:
            self._marked(character, out)

    def _marked(self, character: str, out: list[CallEvent | Content]) -> None:
        """Outside of a call, in a dialect whose calls stand between markers."""
        assert self._opens is not None
        self._held += character
        if self._held.endswith(self._opens):
            before = self._held[: -len(self._opens)].rstrip(SPACE)
            self._say(before, out)
            self._held = ""
            self._running = Running(self._make, self._opens)
            return
        keep = max((n for n in range(1, len(self._opens)) if self._held.endswith(self._opens[:n])), default=0)
        safe = self._held[: len(self._held) - keep].rstrip(SPACE)
        self._say(safe, out)
        self._held = self._held[len(safe) :]

    def _bare(self, character: str, out: list[CallEvent | Content]) -> None:
        """CallableTools without markers stand at the beginning, or behind another call."""
        if self._began:
            self._say(character, out)
        elif character in SPACE or (self._fresh and character in ";,"):
            self._held += character
        else:
            self._running = Running(self._make, self._held)
            self._held = ""
            self._go_on(character, out)

    def _go_on(self, character: str, out: list[CallEvent | Content]) -> None:
        assert self._running is not None
        try:
            ended = self._running.take(character)
        except Malformed:
            self._give_up(out)
            return
        except Another:
            assert self._opens is not None
            self._give_up(out)
            self._running = Running(self._make, self._opens)
            return
        out.extend(self._running.events())
        if ended:
            self._completed += self._running.ended
            self._running, self._fresh = None, True

    def _give_up(self, out: list[CallEvent | Content], *, truncated: bool = False) -> None:
        """Not a call after all, or one that was cut off."""
        assert self._running is not None
        running, self._running = self._running, None
        out.extend(running.events())
        self._completed += running.ended
        if running.begun:
            self._fresh = True
            if running.begun > running.ended:
                out.append(CallEnd())
            elif self._markers is not None:
                opens, closes = self._markers
                behind = running.behind.removesuffix(opens)
                self._say("" if closes.startswith(behind.strip(SPACE)) else behind.rstrip(SPACE), out)
        else:
            self._say(running.raw, out, truncated=truncated)

    def _say(self, text: str, out: list[CallEvent | Content], *, truncated: bool = False) -> None:
        """Content; space behind a call is part of the call."""
        if self._fresh:
            text = text.lstrip(SPACE)
        if text:
            self._began, self._fresh = True, False
            out.append(Content(text, truncated))


class Running:
    """A call being read. Owner: the reader."""

    def __init__(self, make: Callable[[list[CallEvent]], Parser], opening: str) -> None:
        self._events: list[CallEvent] = []
        self._parser: Generator[None, str, None] = make(self._events)
        next(self._parser)
        self.raw = opening
        self.begun = self.ended = 0
        self.behind = ""  # what came behind the end of a call

    def take(self, character: str) -> bool:
        """Whether the call is over."""
        self.raw += character
        self.behind += character
        try:
            self._parser.send(character)
        except StopIteration:
            return True
        finally:
            self.begun += sum(isinstance(event, CallStart) for event in self._events)
            if self._events:
                self.behind = ""
        return False

    def events(self) -> list[CallEvent]:
        events, self._events[:] = list(self._events), []
        self.ended += sum(isinstance(event, CallEnd) for event in events)
        return events


def _joined(out: list[CallEvent | Content]) -> list[CallEvent | Content]:
    """Neighbouring texts and neighbouring pieces of arguments as one."""
    joined: list[CallEvent | Content] = []
    for event in out:
        last = joined[-1] if joined else None
        match last, event:
            case Content(before, one), Content(text, other) if one == other:
                joined[-1] = Content(before + text, one)
            case CallArguments(before), CallArguments(text):
                joined[-1] = CallArguments(before + text)
            case _:
                joined.append(event)
    return joined
