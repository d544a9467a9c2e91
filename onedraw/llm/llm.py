"""The running model: class LLM, which `onedraw.load` returns and which the server, the command line and `prove` use.

The input is a prompt with options, or a Generation that an interface built itself. The output is pieces of the reply as they are
generated, or whole replies. LLM connects the engine, which handles token ids only, with the text package, which handles text.
A generation asks for n replies to one prompt, its choices. A piece is a part of a reply as an interface receives it.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from onedraw.engine.client import CheckedRequest, EngineClient, Event, Sink
from onedraw.engine.stats import Stats
from onedraw.errors import BadParameter, BadRequest, OnedrawError, TextTooLong, Unsupported
from onedraw.limits import MAX_CHARACTERS_COUNTED
from onedraw.llm.mailbox import LoopWakeup, Mailbox
from onedraw.llm.reply import Reply, new_replies
from onedraw.llm.reply_stream import Generation, ReplyStream
from onedraw.llm.request_options import Prompt, generation_from_keywords, score_options
from onedraw.text.chat_template import ChatTemplate, final_content, render_to_end
from onedraw.text.constraints.factory import ConstraintFactory, reply_constraint
from onedraw.text.reasoning import ReasoningSyntax, detect_reasoning, initial_thinking
from onedraw.text.reply_parser import ReplySyntax, chat_reply_syntax
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.tools.call_cache import CachedReply, ToolCallCache, cached_prompt, prompt_hash
from onedraw.text.tools.dialects import CallableTools, ToolSyntax, ToolUse, detect_tool_syntax, template_inputs
from onedraw.types import ModelCard, Piece, Request, Usage

ONE_CHOICE = (
    "continue_ids continues one choice: continue each with a request of its own, with n = 1 and the seed that the choice reported"
)
TOKENS_ON_LOOP = 256  # Events with more tokens are read on a thread, so that the event loop stays free for other requests.
IDLE_SECONDS = 10.0  # the longest that `idle_stats` waits for the engine to become idle


@dataclass(frozen=True, slots=True)
class PreparedChoice:
    """One choice of a generation, whose request is checked. It can be submitted once, since its stream has state."""

    generation: Generation
    checked: CheckedRequest
    stream: ReplyStream  # turns events into pieces; it has already read the tokens that the request gave
    fingerprint: str  # the model's fingerprint when this choice was prepared
    # Collects the pieces if a reply with tool calls is to be cached, see `_cache_calls`.
    reply: Reply = field(default_factory=Reply)

    @property
    def request(self) -> Request:
        return self.checked.request


Accept = Callable[[str], None]


class WeightUpdates(Protocol):
    """Replaces the weights of the model. `accept` is called with the new fingerprint once they are in use."""

    @property
    def most_bytes(self) -> int: ...

    def from_folder(self, folder: Path, accept: Accept) -> None: ...

    def from_file(self, file: Path, accept: Accept) -> None: ...

    def from_tensors(self, named: Iterable[tuple[str, Any]], accept: Accept) -> None: ...

    def from_process(self, port: int, accept: Accept) -> None: ...


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a chat, and how the reply to it is parsed. `origin` is a hash of the rendered `text`."""

    ids: tuple[int, ...]
    syntax: ReplySyntax
    origin: str
    text: str


class LLM:
    """A running model. The caller owns it and closes it, or uses it in a `with`. Its methods are thread-safe."""

    def __init__(
        self,
        *,
        service: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        card: ModelCard,
        constraints: ConstraintFactory,
        weight_updates: WeightUpdates | None = None,
    ) -> None:
        """`weight_updates` is None for a model whose weights cannot be replaced."""
        self.service = service
        self.tokenizer = tokenizer
        self.template = template
        self.card = card  # name, family, vocabulary, context, sampling defaults, fingerprint
        self.constraints = constraints  # The service builds its constraints with the same factory, so they share caches.
        self.weight_updates = weight_updates
        self._call_cache = ToolCallCache()
        self._numbers = itertools.count()  # counts requests, so that every request id is unique
        self._wakeups: dict[asyncio.AbstractEventLoop, LoopWakeup] = {}  # one for each event loop that uses the LLM

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop the engine. Running requests may finish within `drain_seconds` and are cancelled after that."""
        self.service.close(drain_seconds)
        self.constraints.close()

    # ------------------------------------------------------------------ prompt in, reply out

    def generate(self, prompt: Prompt, **options: Any) -> Reply | list[Reply]:
        """Return the whole reply to a text, chat messages or token ids; with n over 1, a list of replies.

        Options are the fields of RequestOptions; a chat also takes tools, tool_choice and parallel_tool_calls.
        """
        return _one_or_all(self.run(generation_from_keywords(self, prompt, options)))

    def score(self, prompt: Prompt, reply: str | Sequence[int], **options: Any) -> Reply:
        """Return a given reply with the logprobs, raw and processed, that its tokens have when this model generates it with these
        options, and the share of the probability that the filters leave at each of them. Of the options, only `seed` and
        `max_tokens` do not matter."""
        ids = self.encode_within_context(reply, param="reply") if isinstance(reply, str) else tuple(reply)
        return self.run(generation_from_keywords(self, prompt, score_options(ids, options)))[0]

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Piece]:
        """Return an iterator over the reply's pieces. Closing it cancels the request. Errors in the options are raised by this
        call, not by the first `next`."""
        return self.pieces(self.prepare(generation_from_keywords(self, prompt, options)))

    async def agenerate(self, prompt: Prompt, **options: Any) -> Reply | list[Reply]:
        """Do the same as `generate` in a coroutine."""
        return _one_or_all(await self.arun(generation_from_keywords(self, prompt, options)))

    def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[Piece]:
        """Do the same as `stream` with an asynchronous iterator."""
        return self.apieces(self.prepare(generation_from_keywords(self, prompt, options)))

    # ------------------------------------------------------------------ weights

    def update_weights(self, folder: Path | str) -> ModelCard:
        """Replace the weights by those of a folder, which must be of the same model, shapes and stored types, and return the card
        with the new fingerprint. Running requests go on with the new weights. If this raises, the old ones stay in use."""
        self._updates.from_folder(Path(folder), self._accept)
        return self.card

    def load_weights(self, tensors: Iterable[tuple[str, Any]]) -> ModelCard:
        """Replace the weights by tensors of torch or arrays of numpy, one for each tensor of the checkpoint, by name."""
        self._updates.from_tensors(tensors, self._accept)
        return self.card

    def load_weight_file(self, file: Path) -> ModelCard:
        """Replace the weights by those of a safetensors file."""
        self._updates.from_file(file, self._accept)
        return self.card

    def receive_weights(self, port: int) -> ModelCard:
        """Replace the weights by tensors that another process of this machine sends, see `onedraw.send_weights`."""
        self._updates.from_process(port, self._accept)
        return self.card

    @property
    def most_weight_bytes(self) -> int:
        """The largest size in bytes that a file with the weights of this model may have."""
        return self._updates.most_bytes

    def _accept(self, fingerprint: str) -> None:
        """Use a card with the new fingerprint from now on. The engine's thread calls this before it uses new weights."""
        self.card = replace(self.card, fingerprint=fingerprint)

    @property
    def _updates(self) -> WeightUpdates:
        if self.weight_updates is None:
            raise Unsupported("the weights of this model cannot be replaced", code="weight_updates_unsupported")
        return self.weight_updates

    # ------------------------------------------------------------------ prompts

    def encode(self, text: str, *, add_special: bool = True) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special=add_special))

    def encode_within_context(self, text: str, *, param: str, add_special: bool = False) -> tuple[int, ...]:
        """Tokenize a text that a client sent. A long text that cannot fit into the context is refused before it is tokenized;
        `param` names it in the error."""
        most = self.card.max_context
        if len(text) > max(most, MAX_CHARACTERS_COUNTED) and self.tokenizer.least_tokens(text, enough=most) > most:
            raise TextTooLong(
                f"prompt is too long: a text of {len(text):,} characters cannot fit. This model's maximum context length is "
                f"{most} tokens; shorten the text, or raise --max-context if the model allows more",
                param=param,
            )
        return self.encode(text, add_special=add_special)

    @cached_property
    def reasoning(self) -> ReasoningSyntax | None:
        """How this model marks its reasoning in the text; None if it does not reason."""
        reasoning = None if self.template is None else detect_reasoning(self.template.source)
        if reasoning is None or self.template is None:
            return None
        switch: dict[str, Any] = {"enable_thinking": True} if reasoning.switch else {}
        try:
            probe = self.template.render([{"role": "user", "content": "?"}], **switch)
        except BadRequest:  # This template refuses a chat of one user message, so nothing more can be learned from it.
            return reasoning
        return replace(reasoning, prompted=initial_thinking(probe, reasoning) == "open")

    @cached_property
    def tool_syntax(self) -> ToolSyntax:
        """How this model spells tool calls, which the source of its chat template shows."""
        return detect_tool_syntax("" if self.template is None else self.template.source)

    def chat_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        use: ToolUse | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        cached_calls: bool = True,
        **template_kwargs: Any,
    ) -> ChatPrompt:
        """Render chat messages with the checkpoint's chat template and tokenize the text. With `continue_final_message` the text
        ends where the last message ends.

        If the messages contain a cached reply with tool calls, the prompt begins with the tokens that were generated for it:
        tokenizing its text again could give other tokens. Without `cached_calls` the prompt depends on the messages alone.
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

        begun = final_content(messages) if continue_final_message else None
        text = render(messages, add_generation_prompt) if begun is None else render_to_end(messages, begun, render)
        eos_texts = [self.tokenizer.decode([token], skip_special=False) for token in self.card.eos_ids]
        special = self.tokenizer.special_texts
        cached = None
        if cached_calls:
            cached = cached_prompt(
                messages, text, cache=self._call_cache, render=render, eos_texts=eos_texts, special_texts=special
            )
        prefix, rest = ((), text) if cached is None else cached
        ids = (*prefix, *self.encode_within_context(rest, param="messages"))
        calls = None if use is None else CallableTools(self.tool_syntax.dialect, use.allowed, use.parallel, use.required)
        return ChatPrompt(
            ids, chat_reply_syntax(text, self.reasoning, calls, self.tokenizer, begun=begun), prompt_hash(text), text
        )

    # ------------------------------------------------------------------ generations in, pieces out

    def prepare(self, *generations: Generation, caller: str = "", background: bool = False) -> list[PreparedChoice]:
        """Return the choices of these generations, in order. Each request and its constraint are built once, and an error is
        raised if one of them cannot run.

        `caller` names who sends the requests. When requests wait, callers take turns; so do the calls of this method by one
        caller, while the choices of one call share a turn. With `background` all other requests go before these.
        """
        turn = {"caller": caller, "parent": f"call-{next(self._numbers)}", "background": background}
        return [choice for generation in generations for choice in self._choices(generation, turn)]

    def pieces(self, choices: Sequence[PreparedChoice]) -> Generator[Piece, None, None]:
        """Submit all choices, or none of them, and yield their pieces. `Piece.index` is the choice's index in `choices`.

        Leaving the loop early cancels the choices that are not finished.
        """
        events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._begin(choices, lambda index: lambda event: events.put((index, event)))
        try:
            while not all(choice.stream.done for choice in choices):
                index, event = events.get()
                yield from self._push(choices[index], event)
        finally:
            self._cancel(choices)

    async def bursts(self, choices: Sequence[PreparedChoice]) -> AsyncGenerator[list[Piece], None]:
        """Do the same as `pieces` for asyncio, in lists: events that arrived together give one list."""
        mailbox: Mailbox[tuple[int, Event]] = Mailbox(self._wakeup())

        def sink(index: int) -> Sink:
            return lambda event: mailbox.put((index, event))

        self._begin(choices, sink)
        try:
            while not all(choice.stream.done for choice in choices):
                events = await mailbox.take()
                if sum(len(event.sampled) for _, event in events) <= TOKENS_ON_LOOP:
                    found, error = self._push_all(choices, events)
                else:
                    found, error = await asyncio.to_thread(self._push_all, choices, events)
                if found:
                    yield found
                if error is not None:
                    raise error
        finally:
            self._cancel(choices)

    async def apieces(self, choices: Sequence[PreparedChoice]) -> AsyncGenerator[Piece, None]:
        """Do the same as `pieces` for asyncio."""
        async with aclosing(self.bursts(choices)) as bursts:
            async for burst in bursts:
                for piece in burst:
                    yield piece

    def run(self, *generations: Generation) -> list[Reply]:
        """Generate, and return one whole reply per choice."""
        replies = new_replies(generations)
        for piece in self.pieces(self.prepare(*generations)):
            replies[piece.index].add(piece)
        return replies

    async def arun(self, *generations: Generation) -> list[Reply]:
        """Do the same as `run` in a coroutine."""
        replies = new_replies(generations)
        async for piece in self.apieces(self.prepare(*generations)):
            replies[piece.index].add(piece)
        return replies

    # ------------------------------------------------------------------ inside

    def _choices(self, generation: Generation, turn: Mapping[str, Any]) -> list[PreparedChoice]:
        """Return the choices of a generation. `turn` has the request fields that decide when a request runs: `caller`,
        `parent` (one id for all requests of a call of `prepare`) and `background`."""
        if generation.n < 1:
            raise BadParameter("n", f"must be at least 1, not {generation.n}")
        if generation.n > self.service.max_requests:
            most = self.service.max_requests
            raise BadParameter("n", f"must be at most {most}, the requests that can run and wait here, not {generation.n}")
        if generation.given and generation.n > 1:
            raise BadParameter("n", ONE_CHOICE)
        name = f"{generation.label or 'r'}-{next(self._numbers)}"
        constraint = reply_constraint(
            generation.syntax, thinking_budget=generation.thinking_budget, response_format=generation.response_format
        )
        requests = [
            Request(
                id=f"{name}-{i}",
                prompt=generation.prompt,
                params=replace(generation.params, seed=generation.seed_of(i)),
                given=generation.given,
                forced=generation.forced,
                predicted=generation.predicted,
                speculate=generation.speculate,
                constraint=constraint,
                **turn,
            )
            for i in range(generation.n)
        ]
        checked = [self.service.check(request) for request in requests]  # check first: streams need valid ids
        now = self.card.fingerprint
        return [PreparedChoice(generation, one, ReplyStream(0, generation, self.tokenizer), now) for one in checked]

    def _begin(self, choices: Sequence[PreparedChoice], sink: Callable[[int], Sink]) -> None:
        for index, choice in enumerate(choices):
            choice.stream.index = index
            if choice.generation.origin:
                for piece in choice.stream.begun:
                    choice.reply.add(piece)
        # Per choice: whether the text of the tokens that the request gave (continue_ids) already ends the reply. The engine only
        # computes the logprobs of the prompt then, if they are requested.
        over = [choice.stream.ended_by_text for choice in choices]
        scored = [choice.request.params.prompt_logprobs is not None for choice in choices]
        self.service.submit(
            [
                (_without_new_tokens(choice.checked) if over[index] else choice.checked, sink(index))
                for index, choice in enumerate(choices)
                if scored[index] or not over[index]
            ]
        )
        for index, choice in enumerate(choices):
            if over[index] and not scored[index]:
                sink(index)(Event(choice.request.id, finish="stop", usage=Usage(prompt=len(choice.request.prompt))))

    def _push(self, choice: PreparedChoice, event: Event) -> list[Piece]:
        if choice.stream.done:  # After a stop string, events still arrive until the engine has cancelled the request.
            return []
        if event.error is not None:
            raise event.error
        pieces = choice.stream.push(event)
        if pieces[-1].finish is not None and event.finish is None:  # A stop string ended the reply, which the engine cannot see.
            self.service.cancel(choice.request.id)
        if choice.generation.origin:
            self._cache_calls(choice, pieces)
        return pieces

    def _push_all(
        self, choices: Sequence[PreparedChoice], events: Sequence[tuple[int, Event]]
    ) -> tuple[list[Piece], OnedrawError | None]:
        """Return the pieces of these events up to the first error, and that error if there is one. Later events are dropped."""
        found: list[Piece] = []
        for index, event in events:
            try:
                found += self._push(choices[index], event)
            except OnedrawError as error:
                return found, error
        return found, None

    def _cancel(self, choices: Sequence[PreparedChoice]) -> None:
        for choice in choices:
            if not choice.stream.done:
                self.service.cancel(choice.request.id)

    def _cache_calls(self, choice: PreparedChoice, pieces: Sequence[Piece]) -> None:
        """Cache a reply that ended with tool calls. The last piece is yielded only afterwards, so the cache has the reply before
        a client can send it back in its next request."""
        reply, generation = choice.reply, choice.generation
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
        """Return the LoopWakeup of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._wakeups.get(loop)
        if found is None:
            for known in list(self._wakeups):  # a copy, because other threads may add their loops during the iteration
                if known.is_closed():
                    self._wakeups.pop(known, None)
            found = self._wakeups[loop] = LoopWakeup(loop)
        return found


def idle_stats(llm: LLM) -> Stats:
    """Return the engine's counters once it is idle, or after IDLE_SECONDS. An engine publishes them only after it has sent the
    events of a step, so a caller that has read the last event may be too early for them."""
    deadline = time.monotonic() + IDLE_SECONDS
    while (stats := llm.service.stats()).running or stats.waiting:
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return stats


def _without_new_tokens(checked: CheckedRequest) -> CheckedRequest:
    """Return a request whose reply consists of the tokens that it gives."""
    request = checked.request
    count = len(request.given)
    params = replace(request.params, max_tokens=count, min_tokens=min(request.params.min_tokens, count))
    return replace(checked, request=replace(request, params=params, forced=request.forced[:count]))


def _one_or_all(replies: list[Reply]) -> Reply | list[Reply]:
    return replies[0] if len(replies) == 1 else replies
