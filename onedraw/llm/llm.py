"""The one door to a running model: an Ask in, Pieces out. Server, command line and Python API all come through here.

It joins the two halves that never see each other: the engine (tokens) and the text package (characters).
A whole reply is a fold of the stream (`Reply.add`).
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from onedraw.engine.service import Event, Service, Sink
from onedraw.engine.stats import Stats
from onedraw.errors import BadParameter, BadRequest, OnedrawError
from onedraw.llm.generation import Generation
from onedraw.llm.mailbox import LoopWakeup, Mailbox
from onedraw.llm.reply import Reply
from onedraw.llm.reply_stream import ReplyStream
from onedraw.sampling.noise import child_seed
from onedraw.text.chat_template import ChatTemplate
from onedraw.text.constraints.base import combine
from onedraw.text.constraints.grammar import GrammarCompiler
from onedraw.text.constraints.thinking_budget import ThinkingBudget
from onedraw.text.reasoning import ReasoningSyntax, detect_reasoning, initial_thinking
from onedraw.text.reply_parser import ReplySyntax, chat_reply_syntax
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.tools.call_cache import CachedReply, ToolCallCache, cached_prompt, prompt_hash
from onedraw.text.tools.dialects import CallableTools, ToolSyntax, ToolUse, detect_tool_syntax
from onedraw.text.tools.prompt import template_inputs
from onedraw.types import SEED_LIMIT, Constraint, ModelCard, Piece, Request

SETTLE_SECONDS = 10.0  # the counters follow the last event within one turn

__all__ = ["LLM", "Generation", "Prompted", "Reply", "fresh_seed", "settled_stats"]


@dataclass(frozen=True, slots=True)
class ActiveChoice:
    """A request, what turns its events into pieces, and their fold, where calls are to be remembered."""

    request: Request
    stream: ReplyStream
    generation: Generation
    reply: Reply


@dataclass(frozen=True, slots=True)
class Prompted:
    """The ids of a chat, and how the reply to it is read. `origin` stands for the text as the template rendered it."""

    ids: tuple[int, ...]
    reading: ReplySyntax
    origin: str


class LLM:
    """A running model: card, tokenizer, template and the service behind them."""

    def __init__(self, *, service: Service, tokenizer: Tokenizer, template: ChatTemplate | None, card: ModelCard) -> None:
        self.service = service
        self.tokenizer = tokenizer
        self.template = template
        self.card = card
        self.memory = ToolCallCache()
        self._numbers = itertools.count()
        self._posts: dict[asyncio.AbstractEventLoop, LoopWakeup] = {}  # of loops that are open, and the last that closed

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, drain_seconds: float = 0.0) -> None:
        self.service.close(drain_seconds)

    # ------------------------------------------------------------------ prompts

    def encode(self, text: str, *, add_special: bool = True) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special=add_special))

    @cached_property
    def reasoning(self) -> ReasoningSyntax | None:
        """How this model thinks aloud, if it does."""
        reasoning = None if self.template is None else detect_reasoning(self.template.source)
        if reasoning is None or self.template is None:
            return None
        switch: dict[str, Any] = {"enable_thinking": True} if reasoning.switch else {}
        try:
            probe = self.template.render([{"role": "user", "content": "?"}], **switch)
        except BadRequest:  # a template with wishes of its own
            return reasoning
        return replace(reasoning, prompted=initial_thinking(probe, reasoning) == "open")

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """What replies are held to, compiled for this tokenizer. Made when it is first needed."""
        return GrammarCompiler(self.tokenizer, self.card.eos_ids)

    @cached_property
    def tool_syntax(self) -> ToolSyntax:
        """How this model calls tools."""
        return detect_tool_syntax("" if self.template is None else self.template.source)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        use: ToolUse | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> Prompted:
        """Chat messages → prompt ids and how the reply is read, through the checkpoint's own template.

        Where a past reply called tools and is remembered, the prompt begins with its very tokens.
        """
        template, tools = self.template, () if use is None else use.tools
        if template is None:
            raise BadRequest(
                "this model has no chat template of its own, or none that is called default; give it a plain prompt, as "
                "/v1/completions does",
                param="messages",
                code="no_chat_template",
            )

        def render(said: Sequence[Mapping[str, Any]], follows: bool) -> str:
            prepared_messages, told = template_inputs(said, tools, self.tool_syntax)
            return template.render(prepared_messages, add_generation_prompt=follows, **told, **template_kwargs)

        text = render(messages, add_generation_prompt)
        ends = [self.tokenizer.decode([token], skip_special=False) for token in self.card.eos_ids]
        marks = self.tokenizer.special_texts
        known = cached_prompt(messages, text, cache=self.memory, render=render, eos_texts=ends, special_texts=marks)
        begun, rest = ((), text) if known is None else known
        ids = (*begun, *self.tokenizer.encode(rest, add_special=False))
        calls = None if use is None else CallableTools(self.tool_syntax.dialect, use.allowed, use.parallel)
        return Prompted(ids, chat_reply_syntax(text, self.reasoning, calls, self.tokenizer), prompt_hash(text))

    def render(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> tuple[int, ...]:
        """The prompt ids alone."""
        return self.chat(messages, **template_kwargs).ids

    # ------------------------------------------------------------------ streams

    def check(self, generation: Generation) -> None:
        """Raise what makes this ask impossible, before any work. Streams do so before their first piece."""
        for request in self._requests(generation):
            self.service.check(request)

    def stream(self, *generations: Generation) -> Generator[Piece, None, None]:
        """Pieces of all choices of all asks as they come, choices numbered through. All asks are taken or none.

        Leaving the loop early cancels what still runs.
        """
        inbox: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        voices = self._begin(generations, lambda index: lambda event: inbox.put((index, event)))
        try:
            while not all(voice.stream.done for voice in voices):
                index, event = inbox.get()
                yield from self._hear(voices[index], event)
        finally:
            self._end(voices)

    async def bursts(self, *generations: Generation) -> AsyncGenerator[list[Piece], None]:
        """`stream` for asyncio, in lists: what has come at once is told at once."""
        inbox: Mailbox[tuple[int, Event]] = Mailbox(self._post())

        def sink(index: int) -> Sink:
            return lambda event: inbox.put((index, event))

        voices = self._begin(generations, sink)
        try:
            while not all(voice.stream.done for voice in voices):
                heard, failed = self._hear_all(voices, await inbox.take())
                if heard:
                    yield heard
                if failed is not None:
                    raise failed
        finally:
            self._end(voices)

    async def astream(self, *generations: Generation) -> AsyncGenerator[Piece, None]:
        """`stream` for asyncio."""
        async with aclosing(self.bursts(*generations)) as bursts:
            async for burst in bursts:
                for piece in burst:
                    yield piece

    def generate(self, *generations: Generation) -> list[Reply]:
        """Whole replies, one per choice: the fold of `stream`."""
        replies = self.replies(*generations)
        for piece in self.stream(*generations):
            replies[piece.index].add(piece)
        return replies

    async def agenerate(self, *generations: Generation) -> list[Reply]:
        replies = self.replies(*generations)
        async for piece in self.astream(*generations):
            replies[piece.index].add(piece)
        return replies

    def replies(self, *generations: Generation) -> list[Reply]:
        """Empty replies to fold pieces into, one per choice, each with its seed."""
        return [
            Reply(seed=child_seed(generation.params.seed, i), prompt_ids=generation.prompt)
            for generation in generations
            for i in range(generation.n)
        ]

    # ------------------------------------------------------------------ inside

    def _requests(self, generation: Generation) -> list[Request]:
        if generation.n < 1:
            raise BadParameter("n", f"must be at least 1, not {generation.n}")
        if generation.n > self.service.max_requests:
            raise BadParameter(
                "n", f"must be at most {self.service.max_requests}, which is what may run and wait here, not {generation.n}"
            )
        name = f"{generation.label or 'r'}-{next(self._numbers)}"
        return [
            Request(
                id=f"{name}-{i}",
                prompt=generation.prompt,
                params=replace(
                    generation.params, seed=child_seed(generation.params.seed, i), constraint=self._constraint(generation)
                ),
                predicted=generation.predicted,
                speculate=generation.speculate,
            )
            for i in range(generation.n)
        ]

    def _constraint(self, generation: Generation) -> Constraint | None:
        """What a reply is held to: its thinking to a budget, its text to a form. Every request walks by itself."""
        reading, budget, grammar = generation.reading, None, None
        if generation.thinking_budget is not None and reading.reasoning is not None:
            budget = ThinkingBudget(
                reading.reasoning,
                limit=generation.thinking_budget,
                closing=self.encode(reading.reasoning.closing, add_special=False),
                token_bytes=self.tokenizer.token_bytes,
                thinking=reading.thinking,
            )
        if generation.guide is not None:
            grammar = self.grammars.constraint(generation.guide, reading)
        return combine(budget, grammar)

    def _begin(self, generations: Sequence[Generation], sink: Callable[[int], Sink]) -> list[ActiveChoice]:
        voices: list[ActiveChoice] = []
        for generation in generations:
            for request in self._requests(generation):
                voices.append(ActiveChoice(request, ReplyStream(len(voices), generation, self.tokenizer), generation, Reply()))
        self.service.submit([(voice.request, sink(index)) for index, voice in enumerate(voices)])
        return voices

    def _hear(self, voice: ActiveChoice, event: Event) -> list[Piece]:
        if voice.stream.done:  # what happened between a stop string and the engine's reading of the cancellation
            return []
        if event.error is not None:
            raise event.error
        pieces = voice.stream.push(event)
        if pieces[-1].finish is not None and event.finish is None:  # a stop string: the engine does not know yet
            self.service.cancel(voice.request.id)
        if voice.generation.origin:
            self._remember(voice, pieces)
        return pieces

    def _hear_all(
        self, voices: Sequence[ActiveChoice], events: Sequence[tuple[int, Event]]
    ) -> tuple[list[Piece], OnedrawError | None]:
        """The pieces behind events, up to one that is an error."""
        heard: list[Piece] = []
        for index, event in events:
            try:
                heard += self._hear(voices[index], event)
            except OnedrawError as error:
                return heard, error
        return heard, None

    def _post(self) -> LoopWakeup:
        """The post of the loop that runs here."""
        loop = asyncio.get_running_loop()
        found = self._posts.get(loop)
        if found is None:
            for known in list(self._posts):  # loops of other threads come and go meanwhile
                if known.is_closed():
                    self._posts.pop(known, None)
            found = self._posts[loop] = LoopWakeup(loop)
        return found

    def _remember(self, voice: ActiveChoice, pieces: Sequence[Piece]) -> None:
        """Keep a reply that ended with calls, before anybody can answer them."""
        reply = voice.reply
        for piece in pieces:
            reply.add(piece)
        if reply.finish == "tool_calls":
            ids = reply.token_ids
            if ids and ids[-1] in voice.generation.params.stop_ids:
                ids.pop()
            calls = tuple((called.call.name, called.arguments) for called in reply.calls)
            self.memory.put(
                reply.calls[0].call.id, CachedReply(voice.generation.origin, (*voice.generation.prompt, *ids), reply.text, calls)
            )

    def _end(self, voices: list[ActiveChoice]) -> None:
        for voice in voices:
            if not voice.stream.done:
                self.service.cancel(voice.request.id)


def fresh_seed() -> int:
    """A seed for a request that brought none."""
    return secrets.randbelow(SEED_LIMIT)


def settled_stats(llm: LLM) -> Stats:
    """The counters once the engine is idle: they are published after a turn's events, not before."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (stats := llm.service.stats()).running or stats.waiting:
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return stats
