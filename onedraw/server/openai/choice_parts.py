"""What each choice says, piece by piece: text, tokens and their places. Parts of a choice join to the whole.

In: pieces. Out: parts, which `reply.py` writes down either one by one (a stream) or joined (a whole reply).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from onedraw.server.generation import PreparedRequest
from onedraw.text.detokenizer import Detokenizer
from onedraw.text.tokenizer import Tokenizer
from onedraw.types import Call, Finish, Logprobs, Piece, SampledToken, Usage


@dataclass(frozen=True, slots=True)
class Token:
    """A token in a reply. `offset` is where its text begins in the text of its choice."""

    id: int
    logprobs: Logprobs | None
    checksum: int | None = None
    offset: int = 0
    text: str = ""  # its own, with the characters it completes
    kept: bool = False  # a draft had guessed it
    rejected: int = 0  # drafts thrown away where it was chosen


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """What one choice says at one time. Joined in order, the parts of a choice are its whole reply."""

    index: int
    seed: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[Call, str], ...] = ()  # tool calls with parts of their arguments
    echoed: tuple[Token, ...] = ()  # the prompt's tokens, when it is echoed with logprobs
    said: tuple[Token, ...] = ()
    answers: bool = True  # these tokens are of the answer, not of thinking or calls
    finish: Finish | None = None
    stop_reason: str | int | None = None
    prompt_ids: tuple[int, ...] | None = None  # on the first part


def join(parts: Sequence[ReplyPart]) -> ReplyPart:
    """The whole reply of a choice from its parts, first to last."""
    return replace(
        parts[0],
        text="".join(part.text for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        calls=_whole_calls(parts),
        echoed=tuple(token for part in parts for token in part.echoed),
        said=tuple(token for part in parts for token in part.said),
        finish=parts[-1].finish,
        stop_reason=parts[-1].stop_reason,
    )


def _whole_calls(parts: Sequence[ReplyPart]) -> tuple[tuple[Call, str], ...]:
    arguments: dict[Call, str] = {}
    for call, text in (entry for part in parts for entry in part.calls):
        arguments[call] = arguments.get(call, "") + text
    return tuple(arguments.items())


class Teller:
    """Turns the pieces of a job into parts. One owner: the reply that reads them."""

    def __init__(self, job: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._places: dict[int, Places] = {}  # per choice that has begun

    def tell(self, piece: Piece) -> ReplyPart:
        generation, text, begins = self._job.ask_of(piece.index), piece.text, piece.index not in self._places
        if begins:
            self._places[piece.index] = Places(self._tokenizer, skip_special=generation.skip_special)
            echo = self._job.echoes[piece.index // self._job.n]
            if echo is not None:
                text = self._echoed(echo, piece)
        places = self._places[piece.index]
        return ReplyPart(
            index=piece.index,
            seed=self._job.seed_of(piece.index),
            text=text if piece.channel == "content" else "",
            reasoning=text if piece.channel == "reasoning" else "",
            calls=((piece.call, text),) if piece.call is not None else (),
            echoed=self._scored(piece) if begins else (),
            said=tuple(_token(choice, places) for choice in piece.tokens) if self._job.shows_tokens else (),
            answers=piece.channel == "content",
            finish=piece.finish,
            stop_reason=piece.stop_reason,
            prompt_ids=generation.prompt if begins else None,
        )

    def _echoed(self, echo: str, piece: Piece) -> str:
        """The first part of a choice says the prompt, where it is echoed."""
        self._places[piece.index].start = len(echo)
        return echo + piece.text

    def _scored(self, piece: Piece) -> tuple[Token, ...]:
        """The prompt's tokens, where it is echoed with logprobs."""
        echo = self._job.echoes[piece.index // self._job.n]
        if echo is None or not self._job.logprobs:
            return ()
        prompt = self._job.ask_of(piece.index).prompt
        offsets = prompt_offsets(prompt, echo, self._tokenizer)
        scored = (None, *(piece.prompt_logprobs or ()))
        return tuple(Token(id, logprobs, None, at) for id, logprobs, at in zip(prompt, scored, offsets, strict=True))


def _token(choice: SampledToken, places: Places) -> Token:
    offset, text = places.next(choice.token)
    return Token(choice.token, choice.logprobs, choice.checksum, offset, text, choice.kept, choice.rejected)


class Places:
    """Where the text of each token begins. A token inside a character begins where the character does."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special, opening=False)
        self.start = 0

    def next(self, token: int) -> tuple[int, str]:
        held, offset, text = self._detokenizer.holds, self.start, self._detokenizer.push(token)
        self.start += len(text)
        if held and text and not _goes_on(self._tokenizer.token_bytes(token)):
            offset += 1  # what was held never became a character, and is not this token's
        return offset, text


def _goes_on(text: bytes) -> bool:
    """Whether bytes begin inside of a character."""
    return text[:1] != b"" and text[0] & 0xC0 == 0x80


def prompt_offsets(prompt: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Where each prompt token begins in the echoed text. What the tokenizer added itself has no width there."""
    spelled, offsets, at = Detokenizer(tokenizer, skip_special=False), [], 0
    for token in prompt:
        offsets.append(at)
        fresh = spelled.push(token)
        if not tokenizer.is_special(token) or text.startswith(fresh, at):
            at = min(at + len(fresh), len(text))
    return offsets


@dataclass(slots=True)
class Tally:
    """Adds up the usage of a job. One owner: the reply."""

    job: PreparedRequest
    usages: dict[int, Usage] = field(default_factory=dict)

    def note(self, piece: Piece) -> None:
        if piece.usage is not None:
            self.usages[piece.index] = piece.usage

    def total(self) -> Usage:
        """A prompt counts once, however many choices continue it; what any of them had to compute was not cached."""
        cached = 0
        for number in range(len(self.job.generations)):
            children = [u.cached for c, u in self.usages.items() if c // self.job.n == number]
            cached += min(children, default=0)
        return Usage(
            prompt=sum(len(generation.prompt) for generation in self.job.generations),
            completion=sum(u.completion for u in self.usages.values()),
            cached=cached,
            kept=sum(u.kept for u in self.usages.values()),
            rejected=sum(u.rejected for u in self.usages.values()),
            reasoning=sum(u.reasoning for u in self.usages.values()),
        )
