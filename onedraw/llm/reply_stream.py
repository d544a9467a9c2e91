"""From the events of a request to the pieces of a reply: what is asked, what is heard, and their fold.

In: an Ask, and the events of its requests. Out: Pieces; a Reply is their sum. Token → piece: detokenizer → reading
(reasoning, content, calls) → stop strings in the content.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from onedraw.engine.service import Event
from onedraw.text.constraints.response_format import ReplyFormat
from onedraw.text.detokenizer import Detokenizer
from onedraw.text.reply_parser import PLAIN_TEXT, ReplyParser, ReplySyntax
from onedraw.text.stop_strings import StopFinder
from onedraw.text.tokenizer import Tokenizer
from onedraw.types import Call, Channel, Finish, Logprobs, Piece, SampledToken, SamplingParams, Usage


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt to be continued `n` times: data alone, which can be written down and asked again.

    `params.seed` is the seed of child 0; constraints of its requests are made from the budget and the guide.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    n: int = 1
    skip_special: bool = True  # leave special tokens out of the text
    reading: ReplySyntax = PLAIN_TEXT  # how the reply's text is read
    thinking_budget: int | None = None  # tokens of reasoning before it is closed
    guide: ReplyFormat | None = None  # the form that the reply is held to
    origin: str = ""  # of the prompt's text, where the reply may call tools and is to be remembered
    predicted: tuple[int, ...] = ()  # what the reply is expected to be
    speculate: bool = True  # may be drafted
    label: str = ""  # becomes part of the request ids


@dataclass(slots=True)
class Called:
    """A tool call and its arguments, as JSON."""

    call: Call
    arguments: str = ""


@dataclass(slots=True)
class Reply:
    """A whole answer to one choice: the fold of its pieces. `seed` with n = 1 replays it."""

    text: str = ""
    reasoning: str = ""
    calls: list[Called] = field(default_factory=list)
    seed: int = 0
    prompt_ids: tuple[int, ...] = ()
    tokens: list[SampledToken] = field(default_factory=list)
    finish: Finish | None = None
    stop_reason: str | int | None = None
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: tuple[Logprobs, ...] | None = None

    @property
    def token_ids(self) -> list[int]:
        return [c.token for c in self.tokens]

    def add(self, piece: Piece) -> None:
        match piece.channel:
            case "reasoning":
                self.reasoning += piece.text
            case "tool":
                assert piece.call is not None
                if not self.calls or self.calls[-1].call != piece.call:
                    self.calls.append(Called(piece.call))
                self.calls[-1].arguments += piece.text
            case "content":
                self.text += piece.text
        self.tokens.extend(piece.tokens)
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        if piece.finish is not None:
            self.finish, self.stop_reason = piece.finish, piece.stop_reason
            self.usage = piece.usage or self.usage


@dataclass(slots=True)
class OpenPiece:
    """A piece in the making."""

    channel: Channel
    call: Call | None = None
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)


class ReplyStream:
    """Turns the events of one request into pieces. One owner: the stream that reads them."""

    def __init__(self, index: int, generation: Generation, tokenizer: Tokenizer) -> None:
        reading = generation.reading
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, skip_special=generation.skip_special, opening=reading.opening, spelled=reading.spelled
        )
        self._stops = StopFinder(generation.stop)
        self._parser = ReplyParser(reading)
        self._channel: Channel = "reasoning" if reading.thinking == "open" else "content"
        self._call: Call | None = None
        self._hidden = generation.params.stop_ids  # ids that end a reply: part of the ids, never of the text
        self._least = generation.params.min_tokens  # text of earlier tokens is not searched for stop strings
        self._searching = False
        self._said = 0
        self.done = False

    def hear(self, event: Event) -> list[Piece]:
        """The pieces behind an event, at least one. After a stop string the rest is dropped and `done` is set."""
        sayings = [OpenPiece(self._channel, self._call)]
        heard, hit = 0, None
        for choice in event.sampled:
            heard += 1
            self._parser.count_token(self._tokenizer.token_bytes(choice.token))
            ends = choice.token in self._hidden and event.finish == "stop" and choice is event.sampled[-1]
            self._searching = self._said + heard >= self._least
            now, before, length = len(sayings) - 1, sayings[-1], len(sayings[-1].text)
            hit = None if ends else self._read(sayings, self._detokenizer.push(choice.token))
            # Where its text begins, however many tokens came before it in this event.
            elsewhere = len(sayings) > now + 1 and len(before.text) == length
            sayings[now + elsewhere].tokens.append(choice)
            if ends or hit is not None or self._parser.done:
                break
        self._said += heard
        finish: Finish | None = "stop" if hit is not None or self._parser.done else event.finish
        if finish is not None:
            finish, hit = self._end(sayings, finish, hit)
        usage = None
        if finish is not None:
            unsaid = max(event.kept - heard, 0)  # drafts that were right, behind a stop string
            usage = self._usage(event, unsaid)
        self._channel, self._call = sayings[-1].channel, sayings[-1].call
        reason = hit if hit is not None else None if self._parser.done else event.stop_id
        last = len(sayings) - 1
        return [
            Piece(
                self._index,
                saying.channel,
                saying.text,
                tuple(saying.tokens),
                finish=finish if number == last else None,
                stop_reason=reason if number == last else None,
                usage=usage if number == last else None,
                prompt_logprobs=event.scored if number == 0 else None,
                call=saying.call,
            )
            for number, saying in enumerate(sayings)
        ]

    def _read(self, sayings: list[OpenPiece], text: str, *, last: bool = False) -> str | None:
        """Read text on, up to a stop string, which is given back. It is looked for in the answer, as the caller sees it:
        thinking and calls have markers and spaces of their own."""
        for part in [*self._parser.push(text), *(self._parser.finish() if last else ())]:
            if part.channel == "content":
                if part.truncated_call:
                    shown, hit = self._stops.finish() + part.text, None
                else:
                    shown, hit = self._stops.push(part.text) if self._searching else (part.text, None)
                self._say(sayings, part.channel, None, shown)
                if hit is not None:
                    return hit
            else:
                self._say(sayings, "content", None, self._stops.finish())
                self._say(sayings, part.channel, part.call, part.text)
        if last:
            self._say(sayings, "content", None, self._stops.finish())
        return None

    def _say(self, sayings: list[OpenPiece], channel: Channel, call: Call | None, text: str) -> None:
        """What belongs to another channel begins a new piece."""
        if channel == "content" and not text:
            return
        now = sayings[-1]
        if (now.channel, now.call) != (channel, call) and (now.text or now.tokens or now.call is not None):
            sayings.append(OpenPiece(channel, call))
        sayings[-1].channel, sayings[-1].call = channel, call
        sayings[-1].text += text

    def _end(self, sayings: list[OpenPiece], finish: Finish, hit: str | None) -> tuple[Finish, str | None]:
        """What was held back, when no more tokens come."""
        self.done = True
        if hit is None:
            hit = self._read(sayings, self._detokenizer.finish(), last=True)
            finish = finish if hit is None else "stop"
        return "tool_calls" if finish == "stop" and self._parser.completed_calls else finish, hit

    def _usage(self, event: Event, unsaid: int) -> Usage:
        usage = event.usage
        kept, rejected = usage.kept - unsaid, usage.rejected + unsaid
        return replace(usage, completion=self._said, kept=kept, rejected=rejected, reasoning=self._parser.reasoning_tokens)
