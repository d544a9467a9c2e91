"""Turn the engine's events into pieces of a reply: here token ids become text.

The input is a Generation and the events of one of its requests; the output is Pieces, the parts of a reply that an interface
receives. For each event the stream detokenizes its tokens, passes the text to the parser (`text/reply_parser.py`, which separates
reasoning, content and tool calls), passes the content to the search for stop strings (`text/stop_strings.py`), and decides
whether the reply ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from onedraw.engine.client import CONTINUE_IDS, REPLY_IDS, Event
from onedraw.errors import BadParameter
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
    """Turns the events of one request into pieces. It has state; the caller that reads the events owns it.

    The tokens that the generation gives (`Generation.given`) are read first, which brings detokenizer, parser and stop strings
    into the state after them. Their pieces are in `begun`; the part of their text that waits for later tokens comes with the
    first piece that `push` returns.
    """

    def __init__(self, index: int, generation: Generation, tokenizer: Tokenizer) -> None:
        syntax = generation.syntax
        self.index = index
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
        self._hit: str | None = None  # the stop string that ended the reply
        self.done = False
        self.begun = self._pieces(self._read_tokens(tuple(map(SampledToken, generation.given))))
        # how many tokens of the reply, and of its reasoning, the generation gives
        self._given, self._given_reasoning = self._count, self._parser.reasoning_tokens
        if self._given < len(generation.given):
            raise self._ends_early(CONTINUE_IDS, self._given, len(generation.given))
        self._forced = len(generation.forced)

    def _ends_early(self, name: str, count: int, total: int) -> BadParameter:
        end = "a tool call that is the last one allowed" if self._hit is None else f"the stop string {self._hit!r}"
        return BadParameter(name, f"the reply ends after {count} of these {total} tokens, with {end}")

    @property
    def ended_by_text(self) -> bool:
        """Whether a stop string or the only tool call that is allowed ended the reply. The engine does not see that."""
        return self._hit is not None or self._parser.done

    def push(self, event: Event) -> list[Piece]:
        """Return the pieces of an event, at least one. At a stop string the rest of the event is dropped. `done` is set with the
        finish reason. BadParameter: the text ends the reply before all forced tokens are read."""
        before = self._count
        pieces = self._read_tokens(event.sampled)
        if self.ended_by_text and self._count < self._forced:
            raise self._ends_early(REPLY_IDS, self._count - self._given, self._forced - self._given)
        finish: Finish | None = "stop" if self.ended_by_text else event.finish
        if finish is not None:
            finish = self._end(pieces, finish)
        found = self._pieces(pieces)
        if event.scored is not None:
            found[0] = replace(found[0], prompt_logprobs=event.scored)
        if finish is not None:
            reason = self._hit if self._hit is not None else None if self._parser.done else event.stop_id
            usage = self._usage(event, self._count - before)
            found[-1] = replace(found[-1], finish=finish, stop_reason=reason, usage=usage)
        return found

    def _read_tokens(self, tokens: Sequence[SampledToken]) -> list[OpenPiece]:
        """Read tokens up to the one that ends the reply, and return their pieces, at least one."""
        pieces = [OpenPiece(self._channel, self._call)]
        for sampled in tokens:
            self._count += 1
            self._parser.count_token(self._tokenizer.token_bytes(sampled.token))
            ends = sampled.token in self._stop_ids
            self._searching = self._count >= self._min_tokens
            now, before, length = len(pieces) - 1, pieces[-1], len(pieces[-1].text)
            token, text = self._detokenize(sampled, ends=ends)
            self._hit = None if ends else self._read(pieces, text)
            # A token belongs to the piece in which its text begins, so the split does not depend on how many tokens an event has.
            moved = len(pieces) > now + 1 and len(before.text) == length
            pieces[now + moved].tokens.append(token)
            if ends or self.ended_by_text:
                break
        return pieces

    def _pieces(self, pieces: list[OpenPiece]) -> list[Piece]:
        self._channel, self._call = pieces[-1].channel, pieces[-1].call
        return [Piece(self.index, one.channel, one.text, tuple(one.tokens), call=one.call) for one in pieces]

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

    def _end(self, pieces: list[OpenPiece], finish: Finish) -> Finish:
        """Append the text that the detokenizer, parser and stop-string search held back, and decide the finish reason."""
        self.done = True
        if self._hit is None:
            self._hit = self._read(pieces, self._detokenizer.finish(), last=True, cut=finish == "length")
            finish = finish if self._hit is None else "stop"
        return "tool_calls" if finish == "stop" and self._parser.completed_calls else finish

    def _usage(self, event: Event, count: int) -> Usage:
        """Return the usage after this event. Only the first `count` tokens of the event belong to the reply; drafts that the
        engine kept after a stop string count as rejected."""
        usage, dropped = event.usage, max(event.kept - count, 0)
        return replace(
            usage,
            completion=self._count - self._given,
            kept=usage.kept - dropped,
            rejected=usage.rejected + dropped,
            reasoning=self._parser.reasoning_tokens - self._given_reasoning,
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
    # The first tokens of the reply, which the caller has already; generation continues after them. A recorded request has this
    # field only if there are any.
    given: tuple[int, ...] = field(default=(), metadata={"optional": True})
    # The first tokens of the reply, beginning with those of `given`. They are taken instead of sampled ones, so that those after
    # `given` get logprobs.
    forced: tuple[int, ...] = field(default=(), metadata={"optional": True})
    predicted: tuple[int, ...] = ()  # the reply that the caller expects; used as drafts, which are verified like any others
    speculate: bool = True  # whether drafts may be used
    label: str = ""  # how the ids of its requests begin; empty means "r"

    def seed_of(self, choice: int) -> int:
        return child_seed(self.params.seed, choice)
