"""How the server treats every field of a request: bodies are checked by these tables, and docs/api.md is made from them.

A field is honoured if it has an effect. The input is a JSON object and the rules of its type; the output is its honoured fields,
ready for the typed models of `protocol.py`. Rules of honoured fields are derived from those models; the rules of all other fields
(accepted without effect, or refused) are listed here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field
from pydantic.fields import FieldInfo

from onedraw.errors import BadParameter, BadRequest
from onedraw.limits import MAX_METADATA
from onedraw.types import SEED_RANGE

LONGEST_NAME = 64  # longer than any known field name; a longer unknown name is cut before similar names are searched for
TOOL_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
# Types of tools that the server leaves out of the prompt, because the provider would execute them or their arguments are not
# JSON. Some types end with a date.
LEFT_OUT_TOOL = re.compile(
    r"^(custom|namespace|tool_search|tool_search_tool_(regex|bm25)|mcp|mcp_toolset|web_search|web_search_preview|web_fetch"
    r"|file_search|code_interpreter|code_execution|image_generation|computer|computer_use_preview|local_shell|shell|bash"
    r"|text_editor|apply_patch|memory|advisor)(_[0-9]{4}_?[0-9]{2}_?[0-9]{2})?$"
)
Whole = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # Counts are limited to 32 bits, which every backend can hold.


# The caller's own notes about a response or a batch, which are stored and sent back.
Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
]
ItemT = TypeVar("ItemT")


class FirstError(FailFast):
    """Ends the validation of a list at the first wrong item, so that a list of a million wrong items does not give as many
    errors."""

    __hash__ = object.__hash__  # Pydantic can only use hashable objects as members of a union.


ListOf = Annotated[list[ItemT], FirstError()]


class StrictModel(BaseModel):
    """Base of all request models. Types are not converted (`"1"` is no number), and unknown fields are refused."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="forbid", arbitrary_types_allowed=True)


def field_doc(values: str, note: str, default: Any = None, **limits: Any) -> Any:
    """Return a pydantic field together with the text of its row in docs/api.md: `values` is its type and range, `note` what it
    does."""
    return Field(default, description=note, json_schema_extra={"values": values}, **limits)


def seed_field(reporter: str) -> Any:
    note = "-1 or none: the server draws one; others outside 0 … 2^53 - 1 are hashed into it"
    return field_doc(
        "integer, -2^63 … 2^63 - 1", f"{note}; {reporter} reports the seed that replays it", ge=-SEED_RANGE, lt=SEED_RANGE
    )


class Treatment(StrEnum):
    """What the server does with a field. A field that is `null` counts as not sent, whatever its treatment."""

    HONOURED = "honoured"
    INERT = "accepted, cannot change the answer"
    NEUTRAL = "only neutral values"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    treatment: Treatment
    note: str
    neutral: tuple[Any, ...] = ()  # The values that are accepted; an INERT field without any accepts every value.
    values: str = ""  # The type and range of an honoured field, as docs/api.md shows them.


def inert(name: str, note: str, *neutral: Any) -> Rule:
    return Rule(name, Treatment.INERT, note, neutral)


def neutral(name: str, note: str, *values: Any) -> Rule:
    return Rule(name, Treatment.NEUTRAL, note, values)


def refused(name: str, note: str) -> Rule:
    return Rule(name, Treatment.REFUSED, note)


def read(*names: str) -> tuple[Rule, ...]:
    """Return rules for the honoured fields of JSON objects that are checked by code and not by a pydantic model."""
    return tuple(Rule(name, Treatment.HONOURED, "") for name in names)


CACHE_CONTROL = inert("cache_control", "prefix caching is automatic")
_INERT = (
    inert("user", "not used"),
    inert("metadata", "the caller's own notes"),
    inert("client_metadata", "what a client says about itself"),
    inert("safety_identifier", "not used"),
    inert("prompt_cache_key", "prefix caching is automatic"),
    inert("prompt_cache_retention", "the prefix cache evicts the least recently used"),
    inert("prompt_cache_options", "prefix caching is automatic"),
    inert("service_tier", "the server has one tier", "auto", "default"),
    inert("store", "nothing is stored", False),
    inert("cache_prompt", "a cached prompt has the same bits as a cold one"),
    CACHE_CONTROL,
)
# Fields of llama.cpp's server. Its clients send most of them in every request, with the values that switch them off.
_LLAMA_CPP = (
    inert("id_slot", "a sequence has no slot of its own"),
    inert("n_keep", "the server never shortens a prompt"),
    inert("n_discard", "the server never shortens a prompt"),
    inert("speculative.n_max", "drafts never change a reply; `speculation: false` switches them off"),
    inert("speculative.n_min", "drafts never change a reply"),
    inert("speculative.p_min", "drafts never change a reply"),
    inert("mirostat_tau", "only mirostat has it"),
    inert("mirostat_eta", "only mirostat has it"),
    inert("dynatemp_exponent", "only a dynamic temperature has it"),
    inert("xtc_threshold", "only XTC has it"),
    neutral("dynatemp_range", "no dynamic temperature", 0),
    neutral("xtc_probability", "no XTC", 0),
    neutral("top_n_sigma", "no top-n-sigma sampling", -1, 0),
    neutral("typ_p", "no typical sampling", 1),
    neutral("min_keep", "at least one token is kept", 0, 1),
    neutral("repeat_last_n", "penalties look at the whole prompt and reply", -1),
    neutral("penalize_nl", "penalties apply to every token", True),
    neutral("post_sampling_probs", 'use `logprobs_mode: "processed"`', False),
    neutral("t_max_predict_ms", "a reply whose length depends on time could not be replayed", 0, -1),
    neutral("timings_per_token", "use /metrics", False),
    neutral("return_progress", "use /metrics", False),
    neutral("return_tokens", "use `return_token_ids`", False),
    neutral("response_fields", "replies are sent whole", []),
    neutral("lora", "the server has no adapters", []),
    neutral("reasoning_format", "reasoning is a field of its own", "auto", "deepseek"),
    neutral("parse_tool_calls", "calls are always parsed", True),
    refused("samplers", "the order of the filters is fixed"),
    refused("n_predict", "use `max_tokens`"),
    refused("n_probs", "use `logprobs`"),
    refused("dry_penalty_last_n", "use `dry_range`"),
)
_SHARED = (
    *_INERT,
    neutral("use_beam_search", "no beam search; every reply is one draw, which its seed replays", False),
    neutral("length_penalty", "only beam search has it", 1),
    neutral("early_stopping", "only beam search has it", False),
    neutral("include_stop_str_in_output", "the stop string is never part of the text; `stop_reason` names it", False),
    neutral("spaces_between_special_tokens", "tokens are joined as the tokenizer joins them", True),
    neutral("return_tokens_as_token_ids", "use `return_token_ids`", False),
    neutral("priority", "callers and their requests take turns", 0),
    neutral("typical_p", "no typical sampling", 1),
    neutral("tfs_z", "no tail-free sampling", 1),
    neutral("mirostat", "mirostat depends on all earlier draws, so a seed and a position could not replay a token", 0),
    refused("truncate_prompt_tokens", "the server never shortens a prompt; shorten it before sending"),
    refused("allowed_token_ids", "use `logit_bias`"),
    refused("logits_processors", "code in a request is not run"),
    neutral("guided_decoding_backend", "the server has one grammar engine", "auto", "guidance"),
    refused("guided_whitespace_pattern", "white space in JSON is bounded: a line break, then up to 24 spaces or tabs"),
    refused("cache_salt", "there is one prefix cache for all callers"),
    inert("request_id", "send it as the header `X-Request-Id`, which is sent back"),
    *_LLAMA_CPP,
)
COMPLETION_RULES = (
    *_SHARED,
    neutral("best_of", "ask for `n` choices and pick one", 1),
    neutral("suffix", "no filling in the middle", ""),
)
CHAT_RULES = (
    *_SHARED,
    neutral("functions", "use `tools`", []),
    neutral("function_call", "use `tool_choice`", "none", "auto"),
    neutral("modalities", "text only", ["text"]),
    inert("verbosity", "say it in a message", "low", "medium", "high"),
    neutral("echo", "use /v1/completions", False),
    neutral("add_special_tokens", "the chat template writes the special tokens itself", False),
    neutral("documents", "put them into a message", []),
    neutral("include_reasoning", "reasoning is a field of its own", True),
    refused("audio", "text only"),
    refused("moderation", "nothing is moderated here"),
    refused("web_search_options", "the server sends no requests to other servers"),
    refused("chat_template", "the checkpoint's own template is used; render it yourself and use /v1/completions"),
)
SCORE_RULES = tuple(rule for rule in CHAT_RULES if rule.name != "add_special_tokens")
MESSAGE_RULES = (
    neutral("annotations", "other servers put it into replies; it is not read", []),
    refused("function_call", "use `tool_calls`"),
    refused("audio", "text only"),
    neutral("refusal", "other servers put it into replies; it is not read", ""),
    inert("provider_specific_fields", "a client library's own notes"),
    CACHE_CONTROL,
)
STREAM_RULES = (neutral("include_obfuscation", "chunks are not padded", False),)
TOKENIZE_RULES = (neutral("return_token_strs", "use /detokenize", False),)
TOOL_RULES = (
    CACHE_CONTROL,
    neutral("defer_loading", "every tool is listed in the prompt", False),
    neutral("allowed_callers", "only the model calls tools", ["direct"]),
)


def is_left_out(kind: object) -> bool:
    """Whether tools of this type are left out of the prompt."""
    return isinstance(kind, str) and LEFT_OUT_TOOL.match(kind) is not None


def left_out(types: Sequence[str | None], *, own: Collection[str | None]) -> tuple[str, ...]:
    """Return the tools that the prompt leaves out, as a response's header names them. `own` has the types that are kept."""
    return tuple(f"tools[{number}] ({kind})" for number, kind in enumerate(types) if kind not in own)


def honoured(model: type[BaseModel]) -> tuple[Rule, ...]:
    """Return rules for the fields of a pydantic model, with the descriptions that `field_doc` gave them."""
    return tuple(
        Rule(info.alias or name, Treatment.HONOURED, info.description or "", values=_values(info))
        for name, info in model.model_fields.items()
    )


def _values(info: FieldInfo) -> str:
    extra = info.json_schema_extra
    return str(extra["values"]) if isinstance(extra, dict) else ""


def table(model: type[BaseModel], rules: tuple[Rule, ...] = ()) -> dict[str, Rule]:
    return {rule.name: rule for rule in (*honoured(model), *rules)}


def sift(
    raw: Mapping[str, Any], rules: Mapping[str, Rule], *, path: str = "", ignored: list[str] | None = None
) -> dict[str, Any]:
    """Return the honoured fields that are not null. Names of unknown fields are appended to `ignored`; if it is None, they are
    errors. A value of another field that its rule does not accept is an error."""
    kept: dict[str, Any] = {}
    for name, value in raw.items():
        rule = rules.get(name)
        if value is None:
            continue
        if rule is None:
            if ignored is None:
                raise _unknown(name, rules, path=path)
            ignored.append(path + name)
        elif rule.treatment is Treatment.HONOURED:
            kept[name] = value
        elif not _is_neutral(value, rule):
            raise BadParameter(path + name, _refusal(rule))
    return kept


def _is_neutral(value: Any, rule: Rule) -> bool:
    if rule.treatment is Treatment.INERT and not rule.neutral:
        return True
    # In Python True == 1, but JSON's true and 1 are different values.
    return any(isinstance(value, bool) == isinstance(allowed, bool) and value == allowed for allowed in rule.neutral)


def _refusal(rule: Rule) -> str:
    allowed = " or ".join(repr(value) for value in (*rule.neutral, None)).replace("None", "null")
    allowed = allowed.replace("True", "true").replace("False", "false").replace("'", '"')
    return f"not supported ({rule.note}); only {allowed} can be sent here"


def _unknown(name: str, rules: Mapping[str, Rule], *, path: str) -> BadRequest:
    near = difflib.get_close_matches(
        name[:LONGEST_NAME], [n for n, r in rules.items() if r.treatment is Treatment.HONOURED], n=1, cutoff=0.7
    )
    advice = f"did you mean {near[0]}?" if near else "remove it, or serve with --lenient to have unknown fields ignored"
    return BadRequest(f"{path}{name}: unknown field; {advice}", param=path + name, code="unknown_field")
