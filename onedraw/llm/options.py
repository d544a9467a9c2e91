"""What a caller may wish of a reply, in the caller's words: strings, missing values, the checkpoint's defaults.

In: keyword wishes from HTTP, the command line or Python. Out: an Ask for the door, with every value settled and checked.
This is the one place where user-level names become SamplingParams.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from onedraw.errors import BadParameter, BadRequest, ContextOverflow
from onedraw.llm.llm import LLM, Generation, fresh_seed
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
from onedraw.text.tools.dialects import ToolUse
from onedraw.text.tools.grammar import ToolCallGrammar
from onedraw.types import DryParams, LogprobsMode, SamplingParams

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
MOST_FORM = 1 << 25  # characters of what a reply is held to: any that fits into a body
MOST_CHARACTERS = 1 << 16  # of all stop strings, of all words that are not to be said, of all texts that break a sequence
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Tokens of thinking, for models whose template knows no effort of its own; None: as much as they like.
EFFORTS: Mapping[Effort, int | None] = {
    **{"none": 0, "minimal": 512, "low": 2048, "medium": 8192},
    **{"high": None, "xhigh": None, "max": None},
}


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """None: not asked for; then the checkpoint's generation_config decides, then the neutral value."""

    temperature: float | None = None
    top_k: int | None = None  # 0 or -1: off
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_range: int | None = None  # 0 or -1: the whole history
    dry_sequence_breakers: tuple[str, ...] | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    prompt_logprobs: int | None = None
    checksums: bool = False
    skip_special_tokens: bool = True
    prediction: str | None = None  # text the reply is expected to be; drafted, never trusted
    speculation: bool = True  # False: this request carries no drafts
    reasoning_effort: Effort | None = None  # how much a model that thinks aloud should think
    thinking_budget: int | None = None  # tokens of thinking, after which it is closed
    guided_json: str | Mapping[str, Any] | None = None  # a JSON schema, or its text; the reply is a value that it describes
    guided_regex: str | None = None  # a regular expression that the whole reply matches
    guided_choice: tuple[str, ...] | None = None  # the reply is one of these
    guided_grammar: str | None = None  # a grammar, Lark or GBNF, that the reply follows

    @classmethod
    def of(cls, **options: Any) -> RequestOptions:
        """Wishes from keywords; an unknown name is refused with the known ones; None means not asked for."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise BadParameter(unknown[0], f"unknown; known: {', '.join(sorted(known))}")
        for name in ("stop", "bad_words"):
            if isinstance(options.get(name), str):
                options[name] = (options[name],)
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items() if v is not None}
        return cls(**given)


def make_chat_generation(
    options: RequestOptions,
    *,
    llm: LLM,
    messages: Sequence[dict[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    use: ToolUse | None = None,
    default_max_tokens: int | None = None,
    label: str = "",
) -> Generation:
    """Chat messages → an Ask. `template_kwargs` stand above what the effort says."""
    switches = {**thinking_switches(options, llm.reasoning), **(template_kwargs or {})}
    prompted = llm.chat(messages, use=use, add_generation_prompt=add_generation_prompt, **switches)
    generation = make_generation(
        options,
        llm=llm,
        prompt=prompted.ids,
        reading=prompted.reading,
        default_max_tokens=default_max_tokens,
        label=label,
    )
    if use is None:
        return generation
    guide = call_guide(use, generation.guide, llm=llm)
    if guide is not None and options.ignore_eos:
        raise BadParameter("ignore_eos", "a reply whose calls are held to their schemas ends by itself")
    return replace(generation, guide=guide, origin=prompted.origin)


def call_guide(use: ToolUse, other: ReplyFormat | None, *, llm: LLM) -> ReplyFormat | None:
    """What a reply with tools is held to: calls where they are required or strict, beside the form of its content."""
    if other is not None and use.required:
        raise BadParameter(other.param, "a reply that must call a tool has no other form; use tool_choice auto")
    if other is not None and not isinstance(other, JsonFormat):
        raise BadParameter(other.param, "a reply that may call tools can only be held to JSON; send no tools with it")
    if other is None and not use.required and not use.restricted and not any(tool.strict for tool in use.allowed):
        return None
    grammars = llm.grammars
    content = (
        None if other is None else json.dumps(bound_whitespace(grammars.check_schema(json.loads(other.schema), other.param)))
    )
    grammar = ToolCallGrammar(
        llm.tool_syntax.dialect, tokenizer=llm.tokenizer, lark_text=grammars.lark_text, check=grammars.check_schema
    )
    lark = grammar.write(use.allowed, required=use.required, parallel=use.parallel, content=content)
    return LarkFormat(lark, "tools", numbers=True)


def thinking_switches(options: RequestOptions, reasoning: ReasoningSyntax | None) -> dict[str, Any]:
    """What the chat template is told about the effort."""
    effort = options.reasoning_effort
    if effort is None:
        return {}
    if reasoning is None:
        if effort == "none":
            return {}
        raise BadParameter("reasoning_effort", "this model does not think aloud, so none can be asked of it")
    switches: dict[str, Any] = {"enable_thinking": effort != "none"} if reasoning.switch else {}
    return switches | ({"reasoning_effort": effort} if reasoning.effort else {})


def make_generation(
    options: RequestOptions,
    *,
    llm: LLM,
    prompt: tuple[int, ...],
    default_max_tokens: int | None = None,
    reading: ReplySyntax = PLAIN_TEXT,
    label: str = "",
) -> Generation:
    """An Ask with every value decided. default_max_tokens None: as many as the context has room for; it yields to the
    context, only a length that was asked for can be too long. `reading`: how the reply's text is read.
    """
    card = llm.card
    check_ids("prompt", prompt, vocab=card.vocab)
    if not prompt:
        raise BadRequest("the prompt is empty; it needs at least one token", param="prompt", code="empty_prompt")
    max_tokens = _length(options.max_tokens, default_max_tokens, prompt=len(prompt), context=card.max_context)
    check_ids("stop_token_ids", options.stop_token_ids, vocab=card.vocab)
    eos = () if options.ignore_eos else card.eos_ids
    params = SamplingParams(
        **_sampling_values(options, card.defaults),
        dry=_dry(options, llm),
        logit_bias=_bias(options.logit_bias, vocab=card.vocab),
        seed=fresh_seed() if options.seed is None else options.seed,
        max_tokens=max_tokens,
        min_tokens=options.min_tokens or 0,
        stop_ids=frozenset((*eos, *options.stop_token_ids)),
        bad_words=_bad_words(options.bad_words, llm),
        logprobs=options.logprobs,
        logprobs_mode=options.logprobs_mode,
        prompt_logprobs=options.prompt_logprobs,
        checksums=options.checksums,
    )
    guide = guide_of(options)
    if guide is not None and options.ignore_eos:
        raise BadParameter("ignore_eos", "a reply that is held to a form ends where the form ends")
    if any(not s for s in options.stop):
        raise BadParameter("stop", "an empty stop string would stop everything")
    _check_texts("stop", options.stop)
    return Generation(
        prompt=prompt,
        params=params,
        stop=options.stop,
        n=options.n,
        skip_special=options.skip_special_tokens,
        reading=reading,
        thinking_budget=_budget(options, reading),
        guide=guide,
        predicted=llm.encode(options.prediction, add_special=False) if options.prediction else (),
        speculate=options.speculation,
        label=label,
    )


def _length(asked: int | None, default: int | None, *, prompt: int, context: int) -> int:
    """The most tokens of a reply: those asked for, which must fit, else as many as the default and the context allow."""
    room = context - prompt
    if asked is None:
        asked = max(room, 1) if default is None else min(default, max(room, 1))
    if asked > room:
        raise ContextOverflow(
            f"the prompt has {prompt} tokens and the reply may have {asked}: together {prompt + asked}, "
            f"over the context of {context}; shorten the prompt, ask for fewer tokens or raise --max-context",
            param="max_tokens" if room > 0 else "prompt",
            prompt=prompt,
        )
    return asked


def check_ids(name: str, ids: tuple[int, ...], *, vocab: int) -> None:
    for token in ids:
        if not 0 <= token < vocab:
            raise BadParameter(name, f"token id {token} is outside the vocabulary of {vocab}")


def _check_texts(name: str, texts: Sequence[str], *, most: int = MOST_CHARACTERS) -> None:
    if sum(map(len, texts)) > most:
        raise BadParameter(name, f"at most {most:,} characters in all")
    if any(map(has_surrogate, texts)):
        raise BadParameter(name, "half of a surrogate pair is no text")


def _sampling_values(options: RequestOptions, defaults: Mapping[str, float | int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        wish = getattr(options, name)
        if wish is None:
            wish = defaults.get(name)
        if wish is not None:
            values[name] = wish
    if values.get("top_k") == -1:
        values["top_k"] = 0
    return values


def _dry(options: RequestOptions, llm: LLM) -> DryParams | None:
    if options.dry_range is not None and options.dry_range < -1:
        raise BadParameter("dry_range", f"must be >= -1, not {options.dry_range}")
    texts = DEFAULT_BREAKERS if options.dry_sequence_breakers is None else options.dry_sequence_breakers
    if any(not text for text in texts):
        raise BadParameter("dry_sequence_breakers", "an empty text stands in every token and would break everything")
    _check_texts("dry_sequence_breakers", texts)
    found = DryParams(
        multiplier=options.dry_multiplier or 0.0,
        base=1.75 if options.dry_base is None else options.dry_base,
        allowed_length=2 if options.dry_allowed_length is None else options.dry_allowed_length,
        range=0 if options.dry_range is None or options.dry_range == -1 else options.dry_range,
        breakers=llm.tokenizer.ids_containing(texts) if options.dry_multiplier else frozenset(),
    )
    return found if options.dry_multiplier else None  # what is asked for is checked, whether it has an effect or not


def _budget(options: RequestOptions, reading: ReplySyntax) -> int | None:
    limit, reasoning = options.thinking_budget, reading.reasoning
    if limit is not None and limit < 0:
        raise BadParameter("thinking_budget", f"must be >= 0, not {limit}")
    if reasoning is None:
        for name, wish in (("thinking_budget", limit), ("reasoning_effort", options.reasoning_effort)):
            if wish not in (None, "none"):
                raise BadParameter(name, "this model does not think aloud, or the prompt is no chat")
        return None
    if limit is None and options.reasoning_effort is not None and not reasoning.effort:
        return EFFORTS[options.reasoning_effort]
    return limit


def guide_of(options: RequestOptions) -> ReplyFormat | None:
    """The one form that the reply is held to, if any."""
    given = [name for name in GUIDED if getattr(options, name) is not None]
    if len(given) > 1:
        raise BadParameter(given[1], f"a reply is held to one form; {given[0]} is given too")
    for name in given:
        form = getattr(options, name)
        _check_texts(name, [form] if isinstance(form, str) else form if isinstance(form, tuple) else [], most=MOST_FORM)
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
    """Each word as it is spelled at the start of a text and after a space."""
    spelled: dict[tuple[int, ...], None] = {}
    if any(not word.strip(" ") for word in words):
        raise BadParameter("bad_words", "a word needs a character beside spaces")
    _check_texts("bad_words", words)
    for word in words:
        for text in (word, " " + word.lstrip(" ")):
            ids = llm.encode(text, add_special=False)
            if ids:
                spelled[ids] = None
    return tuple(spelled)
