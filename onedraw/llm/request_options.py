"""Turn the options of a request, as the caller wrote them, into a Generation with checked SamplingParams.

The input is keyword options from HTTP, the command line or Python, and the prompt. In the resulting Generation every value is
decided: a missing one is what the model's authors recommend (generation_config.json or the catalogue), else the neutral value
that turns the option off. DRY ("don't repeat yourself") is a penalty on tokens that would extend a repetition.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from onedraw.engine.client import CONTINUE_IDS, REPLY_IDS
from onedraw.errors import BadParameter, BadRequest, ContextOverflow
from onedraw.limits import MAX_CHARACTERS, MAX_FORMAT_CHARACTERS
from onedraw.llm.reply_stream import Generation
from onedraw.sampling.noise import hashed_seed
from onedraw.text.constraints.format_limits import schema_text
from onedraw.text.constraints.grammar import bound_whitespace
from onedraw.text.constraints.response_format import (
    ChoiceFormat,
    JsonFormat,
    LarkFormat,
    RegexFormat,
    ReplyFormat,
    grammar_format,
)
from onedraw.text.reasoning import ReasoningSyntax
from onedraw.text.reply_parser import PLAIN_TEXT, ReplySyntax
from onedraw.text.tokenizer import has_surrogate
from onedraw.text.tools.dialects import NO_PARAMETERS, Tool, ToolUse
from onedraw.text.tools.grammar import ToolCallGrammar
from onedraw.types import SEED_LIMIT, SEED_RANGE, DryParams, LogprobsMode, SamplingParams

if TYPE_CHECKING:
    from onedraw.llm.llm import LLM


Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]  # a text, token ids, or chat messages

DEFAULT_MAX_TOKENS = 256  # the default in the Python API and `onedraw generate`, or less if the context has less room
NO_LIMIT = -1  # the value of max_tokens that means: as many as the context has room for
NEEDS_SEED = "needs the seed of the reply that is continued, which every choice reports as `seed`"
DEFAULT_BREAKERS = ("\n", ":", '"', "*")  # Across these texts DRY finds no repetition, by default.
TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls")  # options of a chat that RequestOptions does not have
CONTINUE = "continue_final_message"  # the name of the option of a chat with which the reply continues the last message
# These values turn every filter and penalty off: the model's own distribution, whatever its authors recommend.
NEUTRAL_SAMPLING: Mapping[str, float | int] = {
    **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    **{"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
}
# the options that set a response format, of which a request has at most one
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# effort → thinking budget in tokens, for models whose chat template has no variable for the effort. None means unlimited.
EFFORTS: Mapping[Effort, int | None] = {
    **{"none": 0, "minimal": 512, "low": 2048, "medium": 8192},
    **{"high": None, "xhigh": None, "max": None},
}


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options as the caller wrote them. None means that an option was not given. docs/api.md explains each of them."""

    temperature: float | None = None
    top_k: int | None = None  # 0 and -1 turn this filter off
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_range: int | None = None  # number of last tokens that are searched; 0 and -1: the whole history
    dry_sequence_breakers: tuple[str, ...] | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    continue_ids: tuple[int, ...] = ()  # the first tokens of the reply, which the caller has; only those after them are returned
    reply_ids: tuple[int, ...] = ()  # a reply, after `continue_ids`, whose tokens are scored instead of sampling others
    system_fingerprint: str | None = None  # the fingerprint that the model must have; None: any
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    logprob_token_ids: tuple[int, ...] = ()  # tokens whose logprobs are returned at every sampled position too
    prompt_logprobs: int | None = None
    checksums: bool = False
    skip_special_tokens: bool = True
    prediction: str | None = None  # the reply that the caller expects; used as drafts, which are verified like any others
    speculation: bool = True  # False turns drafts off for this request
    reasoning_effort: Effort | None = None  # how much a reasoning model shall reason before it answers
    thinking_budget: int | None = None  # most tokens of reasoning before the end marker is forced
    guided_json: str | Mapping[str, Any] | None = None  # a JSON schema as an object or text, which the reply follows
    guided_regex: str | None = None  # a regular expression that the whole reply matches
    guided_choice: tuple[str, ...] | None = None  # the reply is one of these texts
    guided_grammar: str | None = None  # a Lark or GBNF grammar that the reply follows

    @classmethod
    def of(cls, **options: Any) -> RequestOptions:
        """Build options from keywords. An unknown name is refused, and None counts as not given."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise BadParameter(unknown[0], f"unknown option; known options: {', '.join(sorted(known))}")
        for name in ("stop", "bad_words"):
            if isinstance(options.get(name), str):
                options[name] = (options[name],)
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items() if v is not None}
        return cls(**given)


def generation_from_keywords(llm: LLM, prompt: Prompt, options: Mapping[str, Any]) -> Generation:
    """Build a Generation from a prompt and the keyword options of the Python API."""
    named = {name: value for name, value in options.items() if name not in (*TOOL_OPTIONS, CONTINUE)}
    tools = {name: options[name] for name in TOOL_OPTIONS if options.get(name) is not None}
    continues = bool(options.get(CONTINUE))
    return generation_for(llm, prompt, RequestOptions.of(**named), use=_tool_use(**tools), continue_final_message=continues)


def score_options(reply: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which a request scores a reply instead of sampling one. `reply` comes after the tokens of
    the option `continue_ids`."""
    if not reply:
        raise BadRequest("the reply is empty; it needs at least one token", param=REPLY_IDS, code="empty_reply")
    count = len(options.get(CONTINUE_IDS) or ()) + len(reply)
    least = options.get("min_tokens")
    return {
        **options,
        REPLY_IDS: reply,
        "max_tokens": count,
        "min_tokens": None if least is None else min(least, count),  # a value above the number of tokens has no effect
        "logprobs": options.get("logprobs") or 0,
        "logprobs_mode": "both",
    }


def generation_for(
    llm: LLM,
    prompt: Prompt,
    options: RequestOptions,
    *,
    use: ToolUse | None = None,
    continue_final_message: bool = False,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
) -> Generation:
    """Build a Generation from a text, chat messages or token ids."""
    if is_chat(prompt):
        messages = [dict(item) for item in prompt]  # type: ignore[arg-type]
        return make_chat_generation(
            options,
            llm=llm,
            messages=messages,
            use=use,
            continue_final_message=continue_final_message,
            default_max_tokens=default_max_tokens,
        )
    if continue_final_message:
        raise BadParameter(CONTINUE, "only chat messages can be continued")
    if use is not None:
        raise BadParameter("tools", "only chat messages can have tools")
    return make_generation(options, llm=llm, prompt=_ids(llm, prompt), default_max_tokens=default_max_tokens)


def is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(item, Mapping) for item in prompt)


def _ids(llm: LLM, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return llm.encode_within_context(prompt, param="prompt", add_special=True)
    items = list(prompt)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return tuple(items)  # type: ignore[arg-type]
    raise BadRequest("a prompt is a text, a list of chat messages or a list of token ids", param="prompt")


def _tool_use(
    tools: Sequence[Mapping[str, Any]] = (), tool_choice: str = "auto", parallel_tool_calls: bool = True
) -> ToolUse | None:
    """Parse tools in OpenAI's shape. `tool_choice` is auto, none, required, or the name of a tool that must be called,
    once."""
    if not tools or tool_choice == "none":
        return None
    known = []
    for number, tool in enumerate(tools):
        function = tool.get("function", tool)
        path = f"tools[{number}].function.parameters"
        schema = schema_text(function["parameters"], path) if function.get("parameters") else NO_PARAMETERS
        known.append(
            Tool(function["name"], function.get("description") or "", schema, strict=bool(function.get("strict")), param=path)
        )
    allowed = tuple(tool for tool in known if tool_choice in ("auto", "required", tool.name))
    if not allowed:
        raise BadParameter("tool_choice", f"must be auto, none, required or the name of a tool, not {tool_choice}")
    parallel = parallel_tool_calls and tool_choice in ("auto", "required")
    return ToolUse(tuple(known), allowed, required=tool_choice != "auto", parallel=parallel)


def make_chat_generation(
    options: RequestOptions,
    *,
    llm: LLM,
    messages: Sequence[dict[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    use: ToolUse | None = None,
    default_max_tokens: int | None = None,
    cached_calls: bool = True,
    label: str = "",
) -> Generation:
    """Build a Generation from chat messages. `template_kwargs` take precedence over what `reasoning_effort` implies; for
    `cached_calls` see `LLM.chat_prompt`."""
    switches = {**thinking_switches(options, llm.reasoning), **(template_kwargs or {})}
    chat = llm.chat_prompt(
        messages,
        use=use,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        cached_calls=cached_calls,
        **switches,
    )
    generation = make_generation(
        options,
        llm=llm,
        prompt=chat.ids,
        syntax=chat.syntax,
        default_max_tokens=default_max_tokens,
        label=label,
    )
    if use is None:
        return generation
    response_format = tool_call_format(use, generation.response_format, llm=llm)
    if response_format is not None and options.ignore_eos:
        raise BadParameter("ignore_eos", "cannot be used with constrained tool calls, which end the reply themselves")
    return replace(generation, response_format=response_format, origin=chat.origin)


def tool_call_format(use: ToolUse, other: ReplyFormat | None, *, llm: LLM) -> ReplyFormat | None:
    """Return the response format of a reply with tools. It is a grammar if a call is required, if some tools may not be called
    or are strict, or if the reply's content has a format of its own; otherwise None, and the model writes calls freely."""
    if use.required:
        other = None  # A required call is the whole reply, so there is no content that could have a format.
    if other is not None and not isinstance(other, JsonFormat):
        raise BadParameter(other.param, "only JSON can be combined with tools; send no tools with this format")
    if other is None and not use.required and not use.restricted and not any(tool.strict for tool in use.allowed):
        return None
    grammars = llm.constraints.grammars
    content = (
        None if other is None else json.dumps(bound_whitespace(grammars.check_schema(json.loads(other.schema), other.param)))
    )
    grammar = ToolCallGrammar(
        llm.tool_syntax.dialect, tokenizer=llm.tokenizer, lark_text=grammars.lark_text, check=grammars.check_schema
    )
    lark = grammar.write(use.allowed, required=use.required, parallel=use.parallel, content=content)
    return LarkFormat(lark, "tools", numbers=True)


def thinking_switches(options: RequestOptions, reasoning: ReasoningSyntax | None) -> dict[str, Any]:
    """Return the variables of the chat template that `reasoning_effort` implies; none if the model does not reason."""
    effort = options.reasoning_effort
    if effort is None or reasoning is None:
        return {}
    switches: dict[str, Any] = {"enable_thinking": effort != "none"} if reasoning.switch else {}
    return switches | ({"reasoning_effort": effort} if reasoning.effort else {})


def make_generation(
    options: RequestOptions,
    *,
    llm: LLM,
    prompt: tuple[int, ...],
    default_max_tokens: int | None = None,
    syntax: ReplySyntax = PLAIN_TEXT,
    label: str = "",
) -> Generation:
    """Build a Generation from token ids. `default_max_tokens` None means as many as the context has room for. A reply ends at the
    context, however large `max_tokens` is."""
    card = llm.card
    check_ids("prompt", prompt, vocab=card.vocab)
    if not prompt:
        raise BadRequest("the prompt is empty; it needs at least one token", param="prompt", code="empty_prompt")
    max_tokens, min_tokens = _length(options, default_max_tokens, prompt=len(prompt), context=card.max_context)
    check_ids("stop_token_ids", options.stop_token_ids, vocab=card.vocab)
    check_fingerprint(options.system_fingerprint, card.fingerprint)
    if options.continue_ids and options.seed in (None, -1):
        raise BadParameter(CONTINUE_IDS, NEEDS_SEED)
    if options.reply_ids and options.n > 1:
        raise BadParameter("n", "only one reply is scored; remove it")
    if (missing := len(options.continue_ids) + len(options.reply_ids) - max_tokens) > 0 and options.reply_ids:
        raise ContextOverflow(
            f"the prompt of {len(prompt)} tokens and the reply have {missing} tokens more than the context of "
            f"{card.max_context} or max_tokens allows",
            param=REPLY_IDS,
            prompt=len(prompt),
        )
    if options.logprob_token_ids and (options.logprobs is None or max_tokens == 0):
        raise BadParameter("logprob_token_ids", "belongs to the logprobs of sampled tokens; ask for logprobs and for tokens")
    eos = () if options.ignore_eos else card.eos_ids
    params = SamplingParams(
        **_sampling_values(options, card.defaults),
        dry=_dry(options, llm),
        logit_bias=_bias(options.logit_bias, vocab=card.vocab),
        seed=settle_seed(options.seed),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_ids=frozenset((*eos, *options.stop_token_ids)),
        bad_words=_bad_words(options.bad_words, llm),
        logprobs=options.logprobs,
        logprobs_mode=options.logprobs_mode,
        logprob_token_ids=options.logprob_token_ids,
        # A request without a reply only makes sense for the logprobs of its prompt, so max_tokens 0 implies prompt logprobs.
        prompt_logprobs=0 if max_tokens == 0 and options.prompt_logprobs is None else options.prompt_logprobs,
        checksums=options.checksums,
    )
    response_format = format_of(options)
    if response_format is not None and options.ignore_eos:
        raise BadParameter("ignore_eos", "cannot be used with a response format, which ends the reply itself")
    if any(not s for s in options.stop):
        raise BadParameter("stop", "an empty stop string would stop everything")
    _check_texts("stop", options.stop)
    return Generation(
        prompt=prompt,
        params=params,
        stop=options.stop,
        n=options.n,
        skip_special=options.skip_special_tokens,
        syntax=syntax,
        thinking_budget=_budget(options, syntax),
        response_format=response_format,
        given=options.continue_ids,
        forced=options.continue_ids + options.reply_ids if options.reply_ids else (),
        predicted=llm.encode_within_context(options.prediction, param="prediction") if options.prediction else (),
        speculate=options.speculation,
        label=label,
    )


def check_fingerprint(wanted: str | None, actual: str) -> None:
    """Raise if a request names another fingerprint than the model's, since the model may then sample other tokens."""
    if wanted is not None and wanted != actual:
        raise BadParameter(
            "system_fingerprint",
            f"is {wanted!r}, and this model runs as {actual!r}, so its tokens may be others; send the request to a server with "
            "that fingerprint, or without this field for a reply of this one",
        )


def _length(options: RequestOptions, default: int | None, *, prompt: int, context: int) -> tuple[int, int]:
    """Return max_tokens and min_tokens of the reply: the caller's numbers or the default, cut to the context.
    A min_tokens above the caller's max_tokens is not cut, so that SamplingParams refuses it."""
    room, min_tokens = context - prompt, options.min_tokens or 0
    given = default if options.max_tokens is None else options.max_tokens
    wanted = max(room, 1) if given is None or given == NO_LIMIT else given
    if room < min(wanted, 1):  # With max_tokens 0 nothing is sampled, so the prompt may fill the context.
        # Coding agents compact a conversation when an error says this in the words of Anthropic's and OpenAI's APIs.
        raise ContextOverflow(
            f"prompt is too long: {prompt} tokens > {context - 1} maximum. This model's maximum context length is {context} "
            "tokens, the reply included; shorten the prompt, or raise --max-context if the model allows more",
            param="prompt",
            prompt=prompt,
        )
    max_tokens = min(wanted, room)
    return max_tokens, min(min_tokens, max_tokens) if min_tokens <= wanted else min_tokens


def check_ids(name: str, ids: tuple[int, ...], *, vocab: int) -> None:
    for token in ids:
        if not 0 <= token < vocab:
            raise BadParameter(name, f"token id {token} is outside the vocabulary of {vocab}; send ids from 0 to {vocab - 1}")


def _check_texts(name: str, texts: Sequence[str], *, most: int = MAX_CHARACTERS) -> None:
    if sum(map(len, texts)) > most:
        raise BadParameter(name, f"has too many characters; all texts together may have {most:,}")
    if any(map(has_surrogate, texts)):
        raise BadParameter(name, "contains half of a surrogate pair; send valid Unicode")


def _sampling_values(options: RequestOptions, defaults: Mapping[str, float | int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in NEUTRAL_SAMPLING:
        value = getattr(options, name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            values[name] = value
    if values.get("top_k") == -1:
        values["top_k"] = 0
    return values


def _dry(options: RequestOptions, llm: LLM) -> DryParams | None:
    if options.dry_range is not None and options.dry_range < -1:
        raise BadParameter("dry_range", f"must be >= -1, not {options.dry_range}")
    texts = DEFAULT_BREAKERS if options.dry_sequence_breakers is None else options.dry_sequence_breakers
    if any(not text for text in texts):
        raise BadParameter("dry_sequence_breakers", "has an empty text, which would match every token; remove it")
    _check_texts("dry_sequence_breakers", texts)
    found = DryParams(
        multiplier=options.dry_multiplier or 0.0,
        base=1.75 if options.dry_base is None else options.dry_base,
        allowed_length=2 if options.dry_allowed_length is None else options.dry_allowed_length,
        range=0 if options.dry_range is None or options.dry_range == -1 else options.dry_range,
        breakers=llm.tokenizer.ids_containing(texts) if options.dry_multiplier else frozenset(),
    )
    return found if options.dry_multiplier else None  # DryParams is built even if DRY is off, because it checks the values.


def _budget(options: RequestOptions, syntax: ReplySyntax) -> int | None:
    """Return the most tokens of reasoning, by thinking_budget, else by reasoning_effort if the chat template has no variable for
    the effort. None: no limit."""
    limit, reasoning = options.thinking_budget, syntax.reasoning
    if limit is not None and limit < 0:
        raise BadParameter("thinking_budget", f"must be >= 0, not {limit}")
    if reasoning is None:  # A model that does not reason never exceeds a budget.
        for name, value in (("thinking_budget", limit), ("reasoning_effort", options.reasoning_effort)):
            if syntax is PLAIN_TEXT and value not in (None, "none"):
                raise BadParameter(name, "only applies to chat messages, and this prompt is text or token ids; remove it")
        return None
    if limit is None and options.reasoning_effort is not None and not reasoning.effort:
        return EFFORTS[options.reasoning_effort]
    return limit


def format_of(options: RequestOptions) -> ReplyFormat | None:
    """Return the response format, or None if none of its options is given. Two of them are an error."""
    given = [name for name in GUIDED if getattr(options, name) is not None]
    if len(given) > 1:
        raise BadParameter(given[1], f"only one response format is allowed; {given[0]} is given too")
    for name in given:
        value = getattr(options, name)
        texts = [value] if isinstance(value, str) else value if isinstance(value, tuple) else []
        _check_texts(name, texts, most=MAX_FORMAT_CHARACTERS)
    match given:
        case ["guided_json"]:
            return JsonFormat.of(options.guided_json, "guided_json")
        case ["guided_regex"]:
            return RegexFormat(options.guided_regex or "", "guided_regex")
        case ["guided_choice"]:
            return ChoiceFormat(options.guided_choice or (), "guided_choice")
        case ["guided_grammar"]:
            return grammar_format(options.guided_grammar or "", "guided_grammar")
        case _:
            return None


def _bias(bias: Mapping[int, float] | None, *, vocab: int) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    check_ids("logit_bias", tuple(bias), vocab=vocab)
    return tuple(sorted((int(k), float(v)) for k, v in bias.items()))


def _bad_words(words: tuple[str, ...], llm: LLM) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, once as it is and once after a space, since most tokenizers make them differ."""
    spelled: dict[tuple[int, ...], None] = {}
    if any(not word.strip(" ") for word in words):
        raise BadParameter("bad_words", "has a word without a character other than a space; remove it")
    _check_texts("bad_words", words)
    for word in words:
        for text in (word, " " + word.lstrip(" ")):
            ids = llm.encode(text, add_special=False)
            if ids:
                spelled[ids] = None
    return tuple(spelled)


def settle_seed(given: int | None) -> int:
    """Return the seed that a request runs with and that its reply reports. None and -1 mean a random one. Other 64-bit integers
    outside [0, 2^53) are hashed into that range, because many JSON readers cannot represent larger integers exactly."""
    if given is None or given == -1:
        return secrets.randbelow(SEED_LIMIT)
    if not -SEED_RANGE <= given < SEED_RANGE:
        raise BadParameter("seed", "must be a 64-bit integer; send -1 to let the server choose one")
    return given if 0 <= given < SEED_LIMIT else hashed_seed(given)
