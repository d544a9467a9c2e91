"""Turn the engine's events into pieces of a reply: here token ids become text.

The input is a Generation and the events of one of its requests; the output is Pieces, the parts of a reply that an interface
receives. For each event the stream detokenizes its tokens, passes the text to the parser (`text/reply_parser.py`, which separates
reasoning, content and tool calls), passes the content to the search for stop strings (`text/stop_strings.py`), and decides
whether the reply ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from onedraw.engine.service import Event
from onedraw.sampling.noise import child_seed
from onedraw.text.constraints.response_format import ReplyFormat
from onedraw.text.detokenizer import Detokenizer
from onedraw.text.reply_parser import PLAIN_TEXT, ReplyParser, ReplySyntax
from onedraw.text.stop_strings import StopFinder
from onedraw.text.tokenizer import Tokenizer
from onedraw.types import Call, Channel, Finish, Piece, ReplyToken, SampledToken, SamplingParams, Usage


@dataclass(slots=True)
class OpenPiece:
    """A piece that can still get more text and tokens."""

    channel: Channel
    call: Call | None = None
    text: str = ""
    tokens: list[ReplyToken] = field(default_factory=list)


class ReplyStream:
    """Turns the events of one request into pieces. It has state; the caller that reads the events owns it."""

    def __init__(self, index: int, generation: Generation, tokenizer: Tokenizer) -> None:
        syntax = generation.syntax
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, skip_special=generation.skip_special, opening=syntax.opening, spelled=syntax.spelled
        )
        self._stops = StopFinder(generation.stop)
        self._parser = ReplyParser(syntax)
        self._channel: Channel = "reasoning" if syntax.thinking == "open" else "content"
        self._call: Call | None = None
        self._stop_ids = generation.params.stop_ids  # The stop token that ends a reply is in its token ids but not in its text.
        self._min_tokens = generation.params.min_tokens  # Stop strings are ignored until the reply has this many tokens.
        self._searching = False  # whether the reply has min_tokens, so that stop strings are searched
        self._count = 0  # number of the reply's tokens so far
        self._offset = 0  # number of characters of all tokens so far, which is where the next token's text begins
        self.done = False

    def push(self, event: Event) -> list[Piece]:
        """Return the pieces of an event, at least one. At a stop string the rest of the event is dropped and `done` is set."""
        pieces = [OpenPiece(self._channel, self._call)]
        count, hit = 0, None
        for sampled in event.sampled:
            count += 1
            self._parser.count_token(self._tokenizer.token_bytes(sampled.token))
            ends = sampled.token in self._stop_ids and event.finish == "stop" and sampled is event.sampled[-1]
            self._searching = self._count + count >= self._min_tokens
            now, before, length = len(pieces) - 1, pieces[-1], len(pieces[-1].text)
            token, text = self._detokenize(sampled, ends=ends)
            hit = None if ends else self._read(pieces, text)
            # A token belongs to the piece in which its text begins, so the split does not depend on how many tokens an event has.
            moved = len(pieces) > now + 1 and len(before.text) == length
            pieces[now + moved].tokens.append(token)
            if ends or hit is not None or self._parser.done:
                break
        self._count += count
        finish: Finish | None = "stop" if hit is not None or self._parser.done else event.finish
        if finish is not None:
            finish, hit = self._end(pieces, finish, hit)
        self._channel, self._call = pieces[-1].channel, pieces[-1].call
        found = [Piece(self._index, one.channel, one.text, tuple(one.tokens), call=one.call) for one in pieces]
        if event.scored is not None:
            found[0] = replace(found[0], prompt_logprobs=event.scored)
        if finish is not None:
            reason = hit if hit is not None else None if self._parser.done else event.stop_id
            found[-1] = replace(found[-1], finish=finish, stop_reason=reason, usage=self._usage(event, count))
        return found

    def _detokenize(self, sampled: SampledToken, *, ends: bool) -> tuple[ReplyToken, str]:
        """Return the token with its own text and offset, and the text that it adds to the reply."""
        found = self._detokenizer.peek(sampled.token) if ends else self._detokenizer.push_token(sampled.token)
        token = ReplyToken(
            sampled.token,
            sampled.logprobs,
            sampled.checksum,
            sampled.kept,
            sampled.rejected,
            found.own,
            self._offset + found.after_broken,
        )
        self._offset += len(found.own)
        return token, found.text

    def _read(self, pieces: list[OpenPiece], text: str, *, last: bool = False, cut: bool = False) -> str | None:
        """Parse text and append it to pieces until a stop string is found, which is returned. Stop strings are searched only in
        the content: the markers and white space of reasoning and calls are not part of what the caller sees."""
        for part in [*self._parser.push(text), *(self._parser.finish(cut=cut) if last else ())]:
            if part.channel == "content":
                if part.truncated_call:
                    shown, hit = self._stops.finish() + part.text, None
                else:
                    shown, hit = self._stops.push(part.text) if self._searching else (part.text, None)
                _append(pieces, part.channel, None, shown)
                if hit is not None:
                    return hit
            else:
                _append(pieces, "content", None, self._stops.finish())
                _append(pieces, part.channel, part.call, part.text)
        if last:
            _append(pieces, "content", None, self._stops.finish())
        return None

    def _end(self, pieces: list[OpenPiece], finish: Finish, hit: str | None) -> tuple[Finish, str | None]:
        """Append the text that the detokenizer, parser and stop-string search held back, and decide the finish reason."""
        self.done = True
        if hit is None:
            hit = self._read(pieces, self._detokenizer.finish(), last=True, cut=finish == "length")
            finish = finish if hit is None else "stop"
        return "tool_calls" if finish == "stop" and self._parser.completed_calls else finish, hit

    def _usage(self, event: Event, count: int) -> Usage:
        """Return the usage after this event. Only the first `count` tokens of the event belong to the reply; drafts that the
        engine kept after a stop string count as rejected."""
        usage, dropped = event.usage, max(event.kept - count, 0)
        return replace(
            usage,
            completion=self._count,
            kept=usage.kept - dropped,
            rejected=usage.rejected + dropped,
            reasoning=self._parser.reasoning_tokens,
        )


def _append(pieces: list[OpenPiece], channel: Channel, call: Call | None, text: str) -> None:
    """Append text to the last piece, or to a new one if the channel or the call changes."""
    if channel == "content" and not text:
        return
    now = pieces[-1]
    if (now.channel, now.call) != (channel, call) and (now.text or now.tokens or now.call is not None):
        pieces.append(OpenPiece(channel, call))
    pieces[-1].channel, pieces[-1].call = channel, call
    pieces[-1].text += text


# ---------------------------------------------------------------------------------------------- a generation


@dataclass(frozen=True, slots=True)
class Generation:
    """A prompt that is continued `n` times, with every option decided.

    Recorded requests store it under its field names, or under `key` if the metadata of a field has one. `params.seed` is the
    seed of choice 0; the seeds of the other choices are hashed from it.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    n: int = 1
    skip_special: bool = True  # special tokens are left out of the reply's text
    syntax: ReplySyntax = field(default=PLAIN_TEXT, metadata={"key": "reading"})  # how the reply's text is parsed
    thinking_budget: int | None = None  # most tokens of reasoning before the end marker is forced; None: no limit
    response_format: ReplyFormat | None = field(default=None, metadata={"key": "guide"})
    origin: str = ""  # hash of the prompt's text; empty if the reply is not cached for its tool calls
    predicted: tuple[int, ...] = ()  # the reply that the caller expects; used as drafts, which are verified like any others
    speculate: bool = True  # whether drafts may be used
    label: str = ""  # how the ids of its requests begin; empty means "r"

    def seed_of(self, choice: int) -> int:
        return child_seed(self.params.seed, choice)
