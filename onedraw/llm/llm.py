"""The running model, as every interface uses it: the object that `onedraw.load` returns.

In: prompts with options, or generations that an interface built itself. Out: pieces, as they come, or whole replies. It joins
the engine, which knows token ids, and the text package, which knows characters.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from onedraw.engine.service import CheckedRequest, Event, Service, Sink
from onedraw.engine.stats import Stats
from onedraw.errors import BadParameter, BadRequest, OnedrawError
from onedraw.llm.mailbox import LoopWakeup, Mailbox
from onedraw.llm.reply import Reply, new_replies
from onedraw.llm.reply_stream import Generation, ReplyStream
from onedraw.llm.request_options import Prompt, generation_from_keywords
from onedraw.text.chat_template import ChatTemplate
from onedraw.text.constraints.factory import ConstraintFactory, reply_constraint
from onedraw.text.reasoning import ReasoningSyntax, detect_reasoning, initial_thinking
from onedraw.text.reply_parser import ReplySyntax, chat_reply_syntax
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.tools.call_cache import CachedReply, ToolCallCache, cached_prompt, prompt_hash
from onedraw.text.tools.dialects import CallableTools, ToolSyntax, ToolUse, detect_tool_syntax, template_inputs
from onedraw.types import ModelCard, Piece, Request

IDLE_SECONDS = 10.0  # longest wait for the engine to become idle


@dataclass(frozen=True, slots=True)
class PreparedChoice:
    """One choice of a generation, checked and ready to run."""

    generation: Generation
    checked: CheckedRequest

    @property
    def request(self) -> Request:
        return self.checked.request


@dataclass(frozen=True, slots=True)
class ActiveChoice:
    """A choice that runs. `reply` is folded only where its tool calls are to be cached."""

    prepared: PreparedChoice
    stream: ReplyStream
    reply: Reply


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a chat, and how the reply to it is parsed. `origin`: a hash of the rendered text."""

    ids: tuple[int, ...]
    syntax: ReplySyntax
    origin: str


class LLM:
    """A running model. Owner: its caller, who closes it or uses it in a `with`. Methods may be called from any thread."""

    def __init__(
        self,
        *,
        service: Service,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        card: ModelCard,
        constraints: ConstraintFactory,
    ) -> None:
        self.service = service
        self.tokenizer = tokenizer
        self.template = template
        self.card = card  # name, family, vocabulary, context, sampling defaults, fingerprint
        self.constraints = constraints  # the service builds constraints through it too
        self._call_cache = ToolCallCache()
        self._numbers = itertools.count()
        self._wakeups: dict[asyncio.AbstractEventLoop, LoopWakeup] = {}  # one per event loop

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop the engine. Running requests may finish within `drain_seconds`."""
        self.service.close(drain_seconds)

    # ------------------------------------------------------------------ prompt in, reply out

    def generate(self, prompt: Prompt, **options: Any) -> Reply | list[Reply]:
        """The whole reply to a text, chat messages or token ids; with n over 1 a list of replies.

        Options are the fields of RequestOptions; a chat also takes tools, tool_choice and parallel_tool_calls.
        """
        return _one_or_all(self.run(generation_from_keywords(self, prompt, options)))

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Piece]:
        """The reply piece by piece; leaving the loop cancels the rest. Wrong options raise here, not in the loop."""
        return self.pieces(self.prepare(generation_from_keywords(self, prompt, options)))

    async def agenerate(self, prompt: Prompt, **options: Any) -> Reply | list[Reply]:
        """`generate` for asyncio."""
        return _one_or_all(await self.arun(generation_from_keywords(self, prompt, options)))

    def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[Piece]:
        """`stream` for asyncio."""
        return self.apieces(self.prepare(generation_from_keywords(self, prompt, options)))

    # ------------------------------------------------------------------ prompts

    def encode(self, text: str, *, add_special: bool = True) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special=add_special))

    @cached_property
    def reasoning(self) -> ReasoningSyntax | None:
        """How this model marks its reasoning; None if it does not reason."""
        reasoning = None if self.template is None else detect_reasoning(self.template.source)
        if reasoning is None or self.template is None:
            return None
        switch: dict[str, Any] = {"enable_thinking": True} if reasoning.switch else {}
        try:
            probe = self.template.render([{"role": "user", "content": "?"}], **switch)
        except BadRequest:  # a template that needs other messages
            return reasoning
        return replace(reasoning, prompted=initial_thinking(probe, reasoning) == "open")

    @cached_property
    def tool_syntax(self) -> ToolSyntax:
        """How this model calls tools."""
        return detect_tool_syntax("" if self.template is None else self.template.source)

    def chat_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        use: ToolUse | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> ChatPrompt:
        """Chat messages → a prompt, through the checkpoint's chat template.

        If an earlier reply of this server called tools and is cached, the prompt begins with that reply's own tokens.
        """
        template, tools = self.template, () if use is None else use.tools
        if template is None:
            raise BadRequest(
                "this model has no chat template, or none that is named default; send a plain prompt to /v1/completions",
                param="messages",
                code="no_chat_template",
            )

        def render(messages: Sequence[Mapping[str, Any]], reply_follows: bool) -> str:
            inputs, variables = template_inputs(messages, tools, self.tool_syntax)
            return template.render(inputs, add_generation_prompt=reply_follows, **variables, **template_kwargs)

        text = render(messages, add_generation_prompt)
        eos_texts = [self.tokenizer.decode([token], skip_special=False) for token in self.card.eos_ids]
        special = self.tokenizer.special_texts
        cached = cached_prompt(messages, text, cache=self._call_cache, render=render, eos_texts=eos_texts, special_texts=special)
        prefix, rest = ((), text) if cached is None else cached
        ids = (*prefix, *self.tokenizer.encode(rest, add_special=False))
        calls = None if use is None else CallableTools(self.tool_syntax.dialect, use.allowed, use.parallel)
        return ChatPrompt(ids, chat_reply_syntax(text, self.reasoning, calls, self.tokenizer), prompt_hash(text))

    # ------------------------------------------------------------------ generations in, pieces out

    def prepare(self, *generations: Generation) -> list[PreparedChoice]:
        """The choices of these generations, in order. Builds each request and its constraint once, and raises if one of them
        cannot run."""
        return [choice for generation in generations for choice in self._choices(generation)]

    def pieces(self, choices: Sequence[PreparedChoice]) -> Generator[Piece, None, None]:
        """Pieces of all choices as they come; `Piece.index` is the place in `choices`. All of them are submitted, or none.

        Leaving the loop early cancels the choices that still run.
        """
        events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        active = self._begin(choices, lambda index: lambda event: events.put((index, event)))
        try:
            while not all(choice.stream.done for choice in active):
                index, event = events.get()
                yield from self._push(active[index], event)
        finally:
            self._cancel(active)

    async def bursts(self, choices: Sequence[PreparedChoice]) -> AsyncGenerator[list[Piece], None]:
        """`pieces` for asyncio, in lists: pieces that arrive together are handed out together."""
        mailbox: Mailbox[tuple[int, Event]] = Mailbox(self._wakeup())

        def sink(index: int) -> Sink:
            return lambda event: mailbox.put((index, event))

        active = self._begin(choices, sink)
        try:
            while not all(choice.stream.done for choice in active):
                found, error = self._push_all(active, await mailbox.take())
                if found:
                    yield found
                if error is not None:
                    raise error
        finally:
            self._cancel(active)

    async def apieces(self, choices: Sequence[PreparedChoice]) -> AsyncGenerator[Piece, None]:
        """`pieces` for asyncio."""
        async with aclosing(self.bursts(choices)) as bursts:
            async for burst in bursts:
                for piece in burst:
                    yield piece

    def run(self, *generations: Generation) -> list[Reply]:
        """Whole replies, one per choice."""
        replies = new_replies(generations)
        for piece in self.pieces(self.prepare(*generations)):
            replies[piece.index].add(piece)
        return replies

    async def arun(self, *generations: Generation) -> list[Reply]:
        """`run` for asyncio."""
        replies = new_replies(generations)
        async for piece in self.apieces(self.prepare(*generations)):
            replies[piece.index].add(piece)
        return replies

    # ------------------------------------------------------------------ inside

    def _choices(self, generation: Generation) -> list[PreparedChoice]:
        if generation.n < 1:
            raise BadParameter("n", f"must be at least 1, not {generation.n}")
        if generation.n > self.service.max_requests:
            most = self.service.max_requests
            raise BadParameter("n", f"must be at most {most}, the requests that can run and wait here, not {generation.n}")
        name = f"{generation.label or 'r'}-{next(self._numbers)}"
        constraint = reply_constraint(
            generation.syntax, thinking_budget=generation.thinking_budget, response_format=generation.response_format
        )
        requests = [
            Request(
                id=f"{name}-{i}",
                prompt=generation.prompt,
                params=replace(generation.params, seed=generation.seed_of(i)),
                predicted=generation.predicted,
                speculate=generation.speculate,
                constraint=constraint,
            )
            for i in range(generation.n)
        ]
        return [PreparedChoice(generation, self.service.check(request)) for request in requests]

    def _begin(self, choices: Sequence[PreparedChoice], sink: Callable[[int], Sink]) -> list[ActiveChoice]:
        active = [
            ActiveChoice(choice, ReplyStream(index, choice.generation, self.tokenizer), Reply())
            for index, choice in enumerate(choices)
        ]
        self.service.submit([(choice.checked, sink(index)) for index, choice in enumerate(choices)])
        return active

    def _push(self, choice: ActiveChoice, event: Event) -> list[Piece]:
        if choice.stream.done:  # an event from between a stop string and its cancellation in the engine
            return []
        if event.error is not None:
            raise event.error
        pieces = choice.stream.push(event)
        if pieces[-1].finish is not None and event.finish is None:  # a stop string, which the engine does not know
            self.service.cancel(choice.prepared.request.id)
        if choice.prepared.generation.origin:
            self._cache_calls(choice, pieces)
        return pieces

    def _push_all(
        self, active: Sequence[ActiveChoice], events: Sequence[tuple[int, Event]]
    ) -> tuple[list[Piece], OnedrawError | None]:
        """The pieces of events, up to the first error."""
        found: list[Piece] = []
        for index, event in events:
            try:
                found += self._push(active[index], event)
            except OnedrawError as error:
                return found, error
        return found, None

    def _cancel(self, active: Sequence[ActiveChoice]) -> None:
        for choice in active:
            if not choice.stream.done:
                self.service.cancel(choice.prepared.request.id)

    def _cache_calls(self, choice: ActiveChoice, pieces: Sequence[Piece]) -> None:
        """Cache a reply that ended with tool calls before its last piece is handed out, and so before a client can use it."""
        reply, generation = choice.reply, choice.prepared.generation
        for piece in pieces:
            reply.add(piece)
        if reply.finish == "tool_calls":
            ids, calls = reply.token_ids, reply.calls
            if ids and ids[-1] in generation.params.stop_ids:
                ids.pop()
            named = tuple((one.call.name, one.arguments) for one in calls)
            cached = CachedReply(generation.origin, (*generation.prompt, *ids), reply.text, named)
            self._call_cache.put(calls[0].call.id, cached)

    def _wakeup(self) -> LoopWakeup:
        """Of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._wakeups.get(loop)
        if found is None:
            for known in list(self._wakeups):  # other threads may add theirs meanwhile
                if known.is_closed():
                    self._wakeups.pop(known, None)
            found = self._wakeups[loop] = LoopWakeup(loop)
        return found


def idle_stats(llm: LLM) -> Stats:
    """The counters once the engine is idle: they are published after the events of a step."""
    deadline = time.monotonic() + IDLE_SECONDS
    while (stats := llm.service.stats()).running or stats.waiting:
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return stats


def _one_or_all(replies: list[Reply]) -> Reply | list[Reply]:
    return replies[0] if len(replies) == 1 else replies
