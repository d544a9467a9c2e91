"""Turn a typed request into generations: the prompt as token ids, and all options checked. Nothing here is about HTTP.

The input is a request of `protocol.py` and the LLM. The output is a PreparedRequest, which also says which details of each token
the reply shows, and the stream of its pieces (the parts of a reply, as they arrive).
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from onedraw.errors import BadParameter, BadRequest, ContextOverflow, ShuttingDown
from onedraw.limits import MAX_PROMPT_LOGPROBS, MAX_PROMPT_TOKENS, MAX_REPLY_LOGPROBS
from onedraw.llm.llm import LLM, PreparedChoice
from onedraw.llm.reply_stream import Generation
from onedraw.llm.request_options import make_chat_generation, make_generation, score_options, settle_seed, thinking_switches
from onedraw.sampling.noise import prompt_seed
from onedraw.server.batch.lines import LineIdentity, digits
from onedraw.server.protocol import (
    COMPLETION_MAX_TOKENS,
    MAX_REPLIES,
    ChatRequest,
    CompletionRequest,
    Message,
    Prompt,
    ScoreRequest,
    TokenizeRequest,
)
from onedraw.types import Call, Piece, Usage

# Keys that are refused in chat_template_kwargs.
TEMPLATE_NAMES = frozenset({"messages", "add_generation_prompt", "continue_final_message", "tools", "self", "use"})

PrepareChoices = Callable[..., list[PreparedChoice]]  # makes the choices of the generations that it is called with


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request: what to generate, and which details the reply shows. Choices (the n replies to each prompt) are numbered
    over all prompts: number c is choice c % n of prompt c // n."""

    id: str
    kind: Literal["chat", "completion"]
    generations: tuple[Generation, ...]  # one generation per prompt
    choices: tuple[PreparedChoice, ...]
    n: int  # number of choices for each prompt
    echoes: tuple[str | None, ...]  # per prompt, the text that is repeated before the reply; None without `echo`
    logprobs: bool  # whether the reply has the logprobs of its tokens
    prompt_logprobs: int | None  # how many alternatives `prompt_logprobs` has for each token of the prompt; None: no such field
    token_ids: bool  # whether the reply has the ids of prompt and reply
    checksums: bool  # whether the reply has a checksum of each token's scores
    details: bool = False  # whether the reply has the text of each token and whether it was drafted
    line: LineIdentity | None = None  # ids and time of the reply to a line of a batch; None: random ids, and the present time
    names: tuple[Mapping[str, str], ...] = ()  # maps from our field names to the caller's, applied in order to `param` of errors

    def generation_of(self, choice: int) -> Generation:
        return self.generations[choice // self.n]

    def echo_of(self, choice: int) -> str | None:
        return self.echoes[choice // self.n]

    def seed_of(self, choice: int) -> int:
        return self.generation_of(choice).seed_of(choice % self.n)

    def call_id(self, choice: int, call: Call) -> str:
        """Return the id of a tool call as the reply shows it."""
        return call.id if self.line is None else f"call_{digits(self.line.id, choice, call.index)}"

    @property
    def shows_tokens(self) -> bool:
        """Whether the reply shows anything per token, in addition to the text."""
        return self.logprobs or self.token_ids or self.checksums or self.details


def prepare(
    request: CompletionRequest | ChatRequest,
    llm: LLM,
    *,
    prefix: str | None = None,
    names: Mapping[str, str] | None = None,
    caller: str = "",
    line: LineIdentity | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> PreparedRequest:
    """Check everything that can be wrong with a request, and tokenize its prompt. This takes long for a long prompt, so call it
    on a thread.

    `prefix` is the beginning of the id of a reply to a chat. `names` maps our field names to the caller's, where they differ.
    `caller` names who sent the request; requests of different callers take turns. A `line` of a batch runs in the background,
    after all other requests, and its reply depends on nothing but the line. The work on a list of prompts stops once `cancelled`
    returns True.
    """
    spelled = {ours: theirs for theirs, (ours, _) in request.guided().items()}
    if request.repetition_penalty is None:
        spelled["repetition_penalty"] = "repeat_penalty"
    spellings = (spelled, names or {})
    if line is not None:
        request = _batched(request, line)

    def choices(*generations: Generation) -> list[PreparedChoice]:
        return llm.prepare(*generations, caller=caller, background=line is not None)

    try:
        match request:
            case ScoreRequest():
                prepared = _score(request, llm, _identity("score-", line), choices, cached_calls=line is None)
            case ChatRequest():
                prepared = _chat(request, llm, _identity(prefix or "chatcmpl-", line), choices, cached_calls=line is None)
            case CompletionRequest():
                prepared = _completion(request, llm, _identity("cmpl-", line), choices, cancelled)
        _check_logprobs(request, prepared)
    except BadRequest as error:
        raise _renamed(error, spellings) from None
    return replace(prepared, names=spellings, line=line)


def _identity(prefix: str, line: LineIdentity | None) -> str:
    return prefix + (secrets.token_hex(12) if line is None else line.id)


def _batched(request: CompletionRequest | ChatRequest, line: LineIdentity) -> CompletionRequest | ChatRequest:
    """Return a request as a line of a batch, with the line's seed if it has none. `stream` and
    `return_token_details` are refused."""
    if request.stream:
        raise BadParameter("stream", "a line of a batch is not streamed; remove it")
    if request.return_token_details:
        raise BadParameter("return_token_details", "depends on other requests, and a line of a batch must not; remove it")
    return request.model_copy(update={"seed": line.seed}) if request.seed in (None, -1) else request


def _check_logprobs(request: CompletionRequest | ChatRequest, prepared: PreparedRequest) -> None:
    """Refuse a request whose reply would have too many logprobs, which take far more memory than its tokens."""
    name = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
    asked = [choice.request for choice in prepared.choices]
    scored = _prompt_logprobs(request)
    of_prompts = 0 if scored is None else (1 + scored) * sum(len(one.prompt) for one in asked)
    if of_prompts > MAX_PROMPT_LOGPROBS:
        raise BadParameter(
            name if request.prompt_logprobs is None else "prompt_logprobs",
            f"the prompts would have {of_prompts:,} logprobs in all, and at most {MAX_PROMPT_LOGPROBS:,} are returned; "
            "ask for fewer alternatives, or split the request",
        )
    of_replies = sum(
        (1 + one.params.logprobs + len(one.params.logprob_token_ids)) * one.params.max_tokens
        for one in asked
        if one.params.logprobs is not None
    )
    if of_replies > MAX_REPLY_LOGPROBS:
        raise BadParameter(
            name,
            f"the replies may have {of_replies:,} logprobs in all, and at most {MAX_REPLY_LOGPROBS:,} are returned; "
            "ask for fewer alternatives, or lower max_tokens or n",
        )


def _prompt_logprobs(request: CompletionRequest | ChatRequest) -> int | None:
    """Return how many alternatives to each prompt token a request wants, by `echo` or `prompt_logprobs`; None: no logprobs."""
    echoed = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
    return max((one for one in (echoed, request.prompt_logprobs) if one is not None), default=None)


def _renamed(error: BadRequest, spellings: Sequence[Mapping[str, str]]) -> BadRequest:
    """Return the error with the caller's name of its parameter."""
    for names in spellings:
        if isinstance(error, BadParameter):
            error = error.renamed(names)
        else:
            error.param = names.get(error.param or "", error.param)
    return error


def count_prompt(request: ChatRequest, llm: LLM, *, names: Mapping[str, str]) -> int:
    """Count the tokens of a chat's prompt, even if it is longer than the context."""
    try:
        return len(prepare(request, llm, names=names).generations[0].prompt)
    except ContextOverflow as error:
        return error.prompt


def _completion(
    request: CompletionRequest, llm: LLM, identity: str, choices: PrepareChoices, cancelled: Callable[[], bool]
) -> PreparedRequest:
    seed = settle_seed(request.seed)
    scored = _prompt_logprobs(request)
    if len(request.prompt) * request.n > MAX_REPLIES:
        raise BadParameter(
            "prompt", f"{len(request.prompt)} prompts × n = {request.n} is over {MAX_REPLIES} replies; split the list"
        )
    llm.service.check_count(len(request.prompt) * request.n, param="prompt" if len(request.prompt) > 1 else "n")
    generations, echoes, tokens = [], [], 0
    for number, prompt in enumerate(request.prompt):
        if cancelled():
            raise ShuttingDown("the request was cancelled before it was read")
        if isinstance(prompt, str):
            ids = llm.encode_within_context(prompt, param="prompt", add_special=request.add_special_tokens)
        else:
            ids = prompt
        tokens += len(ids)
        if tokens > MAX_PROMPT_TOKENS:
            raise BadParameter("prompt", f"the prompts have over {MAX_PROMPT_TOKENS:,} tokens in all; split the list")
        options = request.options(seed=prompt_seed(seed, number), prompt_logprobs=scored)
        generations.append(
            make_generation(options, llm=llm, prompt=ids, default_max_tokens=COMPLETION_MAX_TOKENS, label=identity)
        )
        echoes.append(_echo(prompt, llm) if request.echo else None)
    logprobs = request.logprobs is not None
    return _prepared(
        request, generations, choices(*generations), id=identity, kind="completion", echoes=echoes, logprobs=logprobs
    )


def _echo(prompt: Prompt, llm: LLM) -> str:
    return prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt, skip_special=False)


def _chat(request: ChatRequest, llm: LLM, identity: str, choices: PrepareChoices, *, cached_calls: bool) -> PreparedRequest:
    options = request.options(logprobs=(request.top_logprobs or 0) if request.logprobs else None)
    try:
        generation = make_chat_generation(
            options, llm=llm, label=identity, use=request.tool_use(), cached_calls=cached_calls, **_template_inputs(request)
        )
    except BadRequest as error:
        if error.param == "prompt":
            error.param = "messages"  # The caller sent messages; the prompt was made from them.
        raise
    prepared = choices(generation)
    return _prepared(request, [generation], prepared, id=identity, kind="chat", echoes=[None], logprobs=request.logprobs)


def _score(request: ScoreRequest, llm: LLM, identity: str, choices: PrepareChoices, *, cached_calls: bool) -> PreparedRequest:
    reply = request.reply_ids
    if request.reply is not None:
        reply = list(llm.encode_within_context(request.reply, param="reply"))
    given = {"continue_ids": request.continue_ids, "min_tokens": request.min_tokens, "logprobs": request.top_logprobs}
    options = request.options(**score_options(tuple(reply), given))
    if request.prompt is None:
        generation = make_chat_generation(
            options, llm=llm, label=identity, use=request.tool_use(), cached_calls=cached_calls, **_template_inputs(request)
        )
    else:
        [prompt] = request.prompt
        if isinstance(prompt, str):
            prompt = llm.encode_within_context(prompt, param="prompt", add_special=request.add_special_tokens)
        generation = make_generation(options, llm=llm, prompt=prompt, label=identity)
    prepared = choices(generation)
    return _prepared(request, [generation], prepared, id=identity, kind="chat", echoes=[None], logprobs=True)


def _prepared(
    request: CompletionRequest | ChatRequest,
    generations: Sequence[Generation],
    choices: Sequence[PreparedChoice],
    *,
    id: str,
    kind: Literal["chat", "completion"],
    echoes: list[str | None],
    logprobs: bool,
) -> PreparedRequest:
    return PreparedRequest(
        id=id,
        kind=kind,
        generations=tuple(generations),
        choices=tuple(choices),
        n=request.n,
        echoes=tuple(echoes),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        token_ids=request.return_token_ids,
        checksums=request.return_checksums,
        details=request.return_token_details,
    )


def chat_prompt(request: TokenizeRequest, llm: LLM) -> tuple[int, ...]:
    """Render a chat with the checkpoint's template and return its token ids."""
    given = _template_inputs(request)
    return llm.chat_prompt(**given.pop("template_kwargs"), **given).ids


def chat_text(request: ChatRequest, llm: LLM) -> str:
    """Render a chat with the checkpoint's template, as text."""
    given = _template_inputs(request)
    options = request.options(logprobs=None)
    switches = {**thinking_switches(options, llm.reasoning), **given.pop("template_kwargs")}
    return llm.chat_prompt(use=request.tool_use(), **switches, **given).text


def _template_inputs(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Return the messages and the variables for the chat template."""
    taken = sorted(TEMPLATE_NAMES & set(request.chat_template_kwargs))
    if taken:
        raise BadParameter("chat_template_kwargs", f"{taken[0]} cannot be set here, because the server sets it; remove it")
    messages: list[Message] = request.messages or []
    thinking = request.enable_thinking if isinstance(request, ChatRequest) else None
    switch = {} if thinking is None else {"enable_thinking": thinking}
    return {
        "messages": [message.plain() for message in messages],
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
        "template_kwargs": {**switch, **request.chat_template_kwargs},
    }


async def bursts(prepared: PreparedRequest, llm: LLM) -> AsyncGenerator[list[Piece], None]:
    """Yield the pieces of all choices, in lists of those that arrive together. Closing the generator cancels the
    unfinished choices."""
    async with aclosing(llm.bursts(prepared.choices)) as stream:
        try:
            async for burst in stream:
                if any(piece.finish == "cancelled" for piece in burst):
                    raise ShuttingDown("the request was cancelled before it finished")
                yield burst
        except BadRequest as error:  # A grammar that could be compiled may still fail in the middle of a reply.
            raise _renamed(error, prepared.names) from None


def total_usage(prepared: PreparedRequest, usages: Mapping[int, Usage]) -> Usage:
    """Add up the usage of all choices, which `usages` maps by index. Each prompt counts once, however many choices continue it,
    and a prompt token counts as cached only if no choice had to compute it."""
    cached = 0
    for number in range(len(prepared.generations)):
        cached += min((usage.cached for choice, usage in usages.items() if choice // prepared.n == number), default=0)
    return Usage(
        prompt=sum(len(generation.prompt) for generation in prepared.generations),
        completion=sum(usage.completion for usage in usages.values()),
        cached=cached,
        kept=sum(usage.kept for usage in usages.values()),
        rejected=sum(usage.rejected for usage in usages.values()),
        reasoning=sum(usage.reasoning for usage in usages.values()),
    )
