"""The one door to a running model: an Ask in, Pieces out. Server, command line and Python API all come through here.

It joins the two halves that never see each other: the engine (tokens) and the text package (characters).
Token → piece: detokenizer → stop strings. A whole reply is a fold of the stream (`Reply.add`).
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import secrets
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onedraw.engine.service import Event, Service, Sink
from onedraw.errors import BadParameter, BadRequest
from onedraw.sampling.noise import child_seed
from onedraw.text.detokenizer import Detokenizer
from onedraw.text.stops import StopFinder
from onedraw.text.template import ChatTemplate
from onedraw.text.tokenizer import Tokenizer
from onedraw.types import SEED_LIMIT, Choice, Finish, Logprobs, ModelCard, Piece, Request, SamplingParams, Usage


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt to be continued `n` times. `params.seed` is the seed of child 0."""

    prompt: tuple[int, ...]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    n: int = 1
    skip_special: bool = True  # leave special tokens out of the text
    opening: bool = False  # the reply begins a text of its own: a first space that only marks a word is dropped
    predicted: tuple[int, ...] = ()  # what the reply is expected to be
    speculate: bool = True  # may be drafted
    label: str = ""  # becomes part of the request ids


@dataclass(slots=True)
class Reply:
    """A whole answer to one choice: the fold of its pieces. `seed` with n = 1 replays it."""

    text: str = ""
    reasoning: str = ""
    seed: int = 0
    prompt_ids: tuple[int, ...] = ()
    choices: list[Choice] = field(default_factory=list)
    finish: Finish | None = None
    stop_reason: str | int | None = None
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: tuple[Logprobs, ...] | None = None

    @property
    def token_ids(self) -> list[int]:
        return [c.token for c in self.choices]

    def add(self, piece: Piece) -> None:
        match piece.channel:
            case "reasoning":
                self.reasoning += piece.text
            case _:
                self.text += piece.text
        self.choices.extend(piece.choices)
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        if piece.finish is not None:
            self.finish, self.stop_reason = piece.finish, piece.stop_reason
            self.usage = piece.usage or self.usage


class Speaker:
    """Turns the events of one request into pieces. One owner: the stream that reads them."""

    def __init__(self, index: int, ask: Ask, tokenizer: Tokenizer) -> None:
        self._index = index
        self._detokenizer = Detokenizer(tokenizer, skip_special=ask.skip_special, opening=ask.opening)
        self._stops = StopFinder(ask.stop)
        self._hidden = ask.params.stop_ids  # ids that end a reply: part of the ids, never of the text
        self._least = ask.params.min_tokens  # text of earlier tokens is not searched for stop strings
        self._said = 0
        self.done = False

    def hear(self, event: Event) -> Piece:
        """The piece behind an event. After a stop string the rest of the event is dropped and `done` is set."""
        text, choices, hit = "", [], None
        for choice in event.chosen:
            choices.append(choice)
            if choice.token in self._hidden and event.finish == "stop" and choice is event.chosen[-1]:
                break
            fresh = self._detokenizer.push(choice.token)
            if self._said + len(choices) >= self._least:
                fresh, hit = self._stops.push(fresh)
            text += fresh
            if hit is not None:
                break
        self._said += len(choices)
        unsaid = max(event.kept - len(choices), 0)  # drafts that were right, behind a stop string
        finish: Finish | None = "stop" if hit is not None else event.finish
        if finish is not None:
            self.done = True
            if hit is None:
                tail, hit = self._stops.push(self._detokenizer.finish())
                text += tail
                if hit is None:
                    text += self._stops.finish()
                else:
                    finish = "stop"
        return Piece(
            index=self._index,
            text=text,
            choices=tuple(choices),
            finish=finish,
            stop_reason=hit if hit is not None else event.stop_id,
            usage=self._usage(event, unsaid) if finish is not None else None,
            prompt_logprobs=event.scored,
        )

    def _usage(self, event: Event, unsaid: int) -> Usage:
        usage = event.usage
        return replace(usage, completion=self._said, kept=usage.kept - unsaid, rejected=usage.rejected + unsaid)


@dataclass(frozen=True, slots=True)
class Voice:
    """A request and what turns its events into pieces."""

    request: Request
    speaker: Speaker


class Door:
    """A running model: card, tokenizer, template and the service behind them."""

    def __init__(self, *, service: Service, tokenizer: Tokenizer, template: ChatTemplate | None, card: ModelCard) -> None:
        self.service = service
        self.tokenizer = tokenizer
        self.template = template
        self.card = card
        self._numbers = itertools.count()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, drain_seconds: float = 0.0) -> None:
        self.service.close(drain_seconds)

    # ------------------------------------------------------------------ prompts

    def encode(self, text: str, *, add_special: bool = True) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special=add_special))

    def render(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> tuple[int, ...]:
        """Chat messages → prompt ids, through the checkpoint's own template."""
        if self.template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", param="messages", code="no_chat_template")
        text = self.template.render(messages, **template_kwargs)
        return tuple(self.tokenizer.encode(text, add_special=False))

    # ------------------------------------------------------------------ streams

    def check(self, ask: Ask) -> None:
        """Raise what makes this ask impossible, before any work. Streams do so before their first piece."""
        for request in self._requests(ask):
            self.service.check(request)

    def stream(self, *asks: Ask) -> Generator[Piece, None, None]:
        """Pieces of all choices of all asks as they come, choices numbered through. All asks are taken or none.

        Leaving the loop early cancels what still runs.
        """
        inbox: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        voices = self._begin(asks, lambda index: lambda event: inbox.put((index, event)))
        try:
            while not all(voice.speaker.done for voice in voices):
                index, event = inbox.get()
                piece = self._hear(voices[index], event)
                if piece is not None:
                    yield piece
        finally:
            self._end(voices)

    async def astream(self, *asks: Ask) -> AsyncGenerator[Piece, None]:
        """`stream` for asyncio."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

        def sink(index: int) -> Sink:
            return lambda event: _call_soon(loop, inbox.put_nowait, (index, event))

        voices = self._begin(asks, sink)
        try:
            while not all(voice.speaker.done for voice in voices):
                index, event = await inbox.get()
                piece = self._hear(voices[index], event)
                if piece is not None:
                    yield piece
        finally:
            self._end(voices)

    def generate(self, *asks: Ask) -> list[Reply]:
        """Whole replies, one per choice: the fold of `stream`."""
        replies = self.replies(*asks)
        for piece in self.stream(*asks):
            replies[piece.index].add(piece)
        return replies

    async def agenerate(self, *asks: Ask) -> list[Reply]:
        replies = self.replies(*asks)
        async for piece in self.astream(*asks):
            replies[piece.index].add(piece)
        return replies

    def replies(self, *asks: Ask) -> list[Reply]:
        """Empty replies to fold pieces into, one per choice, each with its seed."""
        return [Reply(seed=child_seed(ask.params.seed, i), prompt_ids=ask.prompt) for ask in asks for i in range(ask.n)]

    # ------------------------------------------------------------------ inside

    def _requests(self, ask: Ask) -> list[Request]:
        if ask.n < 1:
            raise BadParameter("n", f"must be at least 1, not {ask.n}")
        if ask.n > self.service.most:
            raise BadParameter("n", f"must be at most {self.service.most}, which is what may run and wait here, not {ask.n}")
        name = f"{ask.label or 'r'}-{next(self._numbers)}"
        return [
            Request(
                id=f"{name}-{i}",
                prompt=ask.prompt,
                params=replace(ask.params, seed=child_seed(ask.params.seed, i)),
                predicted=ask.predicted,
                speculate=ask.speculate,
            )
            for i in range(ask.n)
        ]

    def _begin(self, asks: Sequence[Ask], sink: Callable[[int], Sink]) -> list[Voice]:
        voices: list[Voice] = []
        for ask in asks:
            for request in self._requests(ask):
                voices.append(Voice(request, Speaker(len(voices), ask, self.tokenizer)))
        self.service.submit([(voice.request, sink(index)) for index, voice in enumerate(voices)])
        return voices

    def _hear(self, voice: Voice, event: Event) -> Piece | None:
        if voice.speaker.done:  # what happened between a stop string and the engine's reading of the cancellation
            return None
        if event.error is not None:
            raise event.error
        piece = voice.speaker.hear(event)
        if piece.finish is not None and event.finish is None:  # a stop string: the engine does not know yet
            self.service.cancel(voice.request.id)
        return piece

    def _end(self, voices: list[Voice]) -> None:
        for voice in voices:
            if not voice.speaker.done:
                self.service.cancel(voice.request.id)


def fresh_seed() -> int:
    """A seed for a request that brought none."""
    return secrets.randbelow(SEED_LIMIT)


def _call_soon(loop: asyncio.AbstractEventLoop, put: Callable[[tuple[int, Event]], None], item: tuple[int, Event]) -> None:
    """Hand an event to the loop; a loop that closed meanwhile has no reader left."""
    try:
        loop.call_soon_threadsafe(put, item)
    except RuntimeError:
        if not loop.is_closed():
            raise
