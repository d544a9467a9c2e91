"""Separate tool calls from content in a stream of text: find where a call begins, run its parser, and decide what is content.

The input is the content of a reply in chunks of any size, and the dialect (call syntax) of the model family. The output is
events: content, the start of a call with its name, JSON of its arguments, the end of a call. `call_parsers.py` has the parsers
of single calls, one per dialect. Text is handled one character at a time, so the division into chunks does not change the
result. Text that turns out not to be a call before it has a name becomes content, so none is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onedraw.text.reasoning import SPACE
from onedraw.text.tools.call_parsers import (
    CallArguments,
    CallEnd,
    CallEvent,
    CallParser,
    CallStart,
    NextCallStarted,
    NotACall,
    call_parser,
)
from onedraw.text.tools.dialects import MARKERS, CallableTools


@dataclass(frozen=True, slots=True)
class Content:
    text: str
    truncated_call: bool = False  # whether this is the text of a call that was cut off before its name was complete


class ToolCallParser:
    """Finds and parses the tool calls of one reply."""

    def __init__(self, calls: CallableTools) -> None:
        self._new_parser = call_parser(calls)
        self._markers = MARKERS.get(calls.dialect)
        self._opens = None if self._markers is None else self._markers[0]
        self._required = calls.required
        self._space: list[str] = []  # white space that is dropped if a call follows
        self._partial = ""  # text after it that may become an opening marker
        self._call: _OpenCall | None = None
        self._content_begun = False  # whether the reply has content other than white space
        self._after_call = False  # whether only white space has followed the last call
        self._completed = 0

    @property
    def completed(self) -> int:
        """The number of complete calls."""
        return self._completed

    def push(self, text: str) -> list[CallEvent | Content]:
        out: list[CallEvent | Content] = []
        for character in text:
            if self._call is not None:
                self._continue_call(character, out)
            elif self._opens is None:
                self._find_unmarked_call(character, out)
            else:
                self._find_marker(character, self._opens, out)
        return _merged(out)

    def finish(self, *, cut: bool = False) -> list[CallEvent | Content]:
        """Return the text that was held back, at the end of the reply. `cut` means that max_tokens ended the reply. Then a call
        whose name is not complete is dropped, and so is the beginning of an opening marker at the end of the text. If the reply
        need not be a call, two things are kept as content instead: the beginning of a call in a dialect without markers, and a
        last character that alone could begin a marker."""
        out: list[CallEvent | Content] = []
        if self._call is not None and cut and not self._call.started and (self._opens is not None or self._required):
            self._call = None
        elif self._call is not None:
            self._abort_call(out, truncated=True)
        if not (cut and self._opens is not None and len(self._partial) >= (1 if self._required else 2)):
            self._add_content("".join(self._space) + self._partial, out)
        self._space.clear()
        self._partial = ""
        return _merged(out)

    def _find_marker(self, character: str, opens: str, out: list[CallEvent | Content]) -> None:
        self._partial += character
        if self._partial == opens:
            self._space.clear()
            self._partial = ""
            self._call = _OpenCall(self._new_parser, opens)
            return
        keep = max((n for n in range(1, len(opens)) if self._partial.endswith(opens[:n])), default=0)
        safe = self._partial[: len(self._partial) - keep]
        self._partial = self._partial[len(safe) :]
        if text := safe.rstrip(SPACE):
            self._add_content("".join(self._space) + text, out)
            self._space.clear()
        if len(text) < len(safe):
            self._space.append(safe[len(text) :])

    def _find_unmarked_call(self, character: str, out: list[CallEvent | Content]) -> None:
        """Look for a call without markers. It can only be at the beginning of the reply or right after another call."""
        if self._content_begun:
            self._add_content(character, out)
        elif character in SPACE or (self._after_call and character in ";,"):
            self._space.append(character)
        else:
            self._call = _OpenCall(self._new_parser, "".join(self._space))
            self._space.clear()
            self._continue_call(character, out)

    def _continue_call(self, character: str, out: list[CallEvent | Content]) -> None:
        assert self._call is not None
        try:
            complete = self._call.push(character)
        except NotACall:
            self._abort_call(out)
            return
        except NextCallStarted:
            assert self._opens is not None
            self._abort_call(out)
            self._call = _OpenCall(self._new_parser, self._opens)
            return
        out.extend(self._call.take_events())
        if complete:
            self._completed += self._call.ended
            self._call, self._after_call = None, True

    def _abort_call(self, out: list[CallEvent | Content], *, truncated: bool = False) -> None:
        """Stop parsing a call. A call that has a name is ended. Text without a name, or after a complete call, is content."""
        assert self._call is not None
        call, self._call = self._call, None
        out.extend(call.take_events())
        self._completed += call.ended
        if call.started:
            self._after_call = True
            if call.started > call.ended:
                out.append(CallEnd())
            elif self._markers is not None:
                opens, closes = self._markers
                rest = call.unparsed.removesuffix(opens)
                self._add_content("" if closes.startswith(rest.strip(SPACE)) else rest.rstrip(SPACE), out)
        else:
            self._add_content(call.text, out, truncated=truncated)

    def _add_content(self, text: str, out: list[CallEvent | Content], *, truncated: bool = False) -> None:
        """Emit content. White space right after a call is dropped."""
        if self._after_call:
            text = text.lstrip(SPACE)
        if text:
            self._content_begun, self._after_call = True, False
            out.append(Content(text, truncated))


class _OpenCall:
    """A call that is being parsed. In the pythonic dialect it may contain several calls."""

    def __init__(self, new_parser: Callable[[list[CallEvent]], CallParser], text: str) -> None:
        self._events: list[CallEvent] = []
        self._parser = new_parser(self._events)
        next(self._parser)
        self._text = [text]  # all text from the opening marker on, which becomes content if it turns out not to be a call
        self._unparsed = 0  # the number of characters since the last event that the parser emitted
        self.started = self.ended = 0  # `started` counts the calls that have a name, `ended` those that are complete

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def unparsed(self) -> str:
        """The text since the last event that the parser emitted."""
        return "".join(self._text[len(self._text) - self._unparsed :])

    def push(self, character: str) -> bool:
        """Add a character and return whether the call is complete."""
        self._text.append(character)
        self._unparsed += 1
        try:
            self._parser.send(character)
        except StopIteration:
            return True
        finally:
            self.started += sum(isinstance(event, CallStart) for event in self._events)
            if self._events:
                self._unparsed = 0
        return False

    def take_events(self) -> list[CallEvent]:
        events, self._events[:] = list(self._events), []
        self.ended += sum(isinstance(event, CallEnd) for event in events)
        return events


def _merged(out: list[CallEvent | Content]) -> list[CallEvent | Content]:
    """Join adjacent content, and adjacent parts of arguments, into one event."""
    merged: list[CallEvent | Content] = []
    for event in out:
        last = merged[-1] if merged else None
        match last, event:
            case Content(before, one), Content(text, other) if one == other:
                merged[-1] = Content(before + text, one)
            case CallArguments(before), CallArguments(text):
                merged[-1] = CallArguments(before + text)
            case _:
                merged.append(event)
    return merged
