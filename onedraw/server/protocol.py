"""Request bodies of OpenAI's chat and completions, of scoring, tokenize and detokenize, and of weight updates, as typed models.

The input is the honoured fields of a body (those that have an effect), from `parsing.py`; the output is a frozen request model.
Types are checked here. SamplingParams checks the ranges of sampling values, because every interface builds one. A strict tool is
one whose calls must follow its schema completely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from onedraw.errors import BadParameter, Unsupported
from onedraw.llm.request_options import EFFORTS, GUIDED, NEEDS_SEED, Effort, RequestOptions
from onedraw.server.fields import TOOL_NAME, ListOf, StrictModel, Whole, field_doc, is_left_out, left_out, seed_field
from onedraw.text.constraints.format_limits import schema_text
from onedraw.text.constraints.response_format import ANY_OBJECT
from onedraw.text.tools.dialects import NO_PARAMETERS, Tool, ToolUse
from onedraw.types import LONGEST_REPETITION, MAX_LOGPROB_TOKEN_IDS, MAX_TOP_LOGPROBS

WEIGHTS_ADVICE = 'save the weights as safetensors below --weight-dir, and send {"weight_dir": FOLDER} to /update_weights'
Mode = Literal["none", "auto", "required"]


def function_type(value: object) -> str:
    """Return the `type` of a tool: "function", or a type that the prompt leaves out. Refuse any other."""
    if value == "function" or is_left_out(value):
        return str(value)
    raise PydanticCustomError("tool", "tools of type {kind} are not known; describe a function", {"kind": repr(value)[:80]})


FunctionType = Annotated[str, PlainValidator(function_type)]


class CalledFunction(StrictModel):
    name: str = field_doc("string", "required", ..., pattern=TOOL_NAME)
    arguments: str = field_doc("string", "a JSON object, as text", "{}")


class ToolCall(StrictModel):
    id: str = field_doc("string", "as in the reply; required", ...)
    type: Literal["function"] = field_doc('"function"', "", "function")
    function: CalledFunction = field_doc("object", "`name` and `arguments`, as in the reply", ...)
    index: Whole | None = field_doc("integer", "accepted, as in a stream", exclude=True)


class FunctionTool(StrictModel):
    name: str = field_doc("string", "letters, digits, `_ . : / -`; required", ..., pattern=TOOL_NAME)
    description: str | None = field_doc("string", "shown to the model")
    parameters: dict[str, Any] | None = field_doc("object", "a JSON schema of the arguments; none: no arguments")
    strict: bool = field_doc("boolean", "arguments of this tool always follow its schema", False)


class ToolSpec(StrictModel):
    type: FunctionType = field_doc('"function"', "required; tools of other types are left out", ...)
    function: FunctionTool | None = field_doc("object", "see below; required")

    @model_validator(mode="after")
    def _has_a_function(self) -> ToolSpec:
        if self.type == "function" and self.function is None:
            raise PydanticCustomError("missing", "this field is required", {"at": ".function"})
        return self


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the model may call, and whether it must call one."""

    mode: Mode
    names: tuple[tuple[str, str], ...] | None = None  # (tool, path of the field that names it); None allows all tools
    named: bool = False  # the request names exactly one tool, outside of `allowed_tools`


def chat_choice(value: object) -> ToolChoice:
    """Parse `tool_choice` of a chat, where a tool's name is inside `function` and a list of tools inside `allowed_tools`."""
    if isinstance(value, ToolChoice):  # A request of another API was converted to a chat and has parsed it already.
        return value
    given = _object_or_mode(value)
    if isinstance(given, ToolChoice):
        return given
    if given["type"] == "function":
        _only(given, ("type", "function"))
        return ToolChoice("required", (_named(given.get("function"), ".function"),), named=True)
    _only(given, ("type", "allowed_tools"))
    return _allowed(given.get("allowed_tools"), ".allowed_tools", "function")


def response_choice(value: object) -> ToolChoice:
    """Parse `tool_choice` of /v1/responses, where names and lists of tools are in the object itself."""
    given = _object_or_mode(value)
    if isinstance(given, ToolChoice):
        return given
    if given["type"] == "function":
        return ToolChoice("required", (_named({k: v for k, v in given.items() if k != "type"}, ""),), named=True)
    return _allowed({k: v for k, v in given.items() if k != "type"}, "", None)


def _object_or_mode(value: Any) -> ToolChoice | Mapping[str, Any]:
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function" | "allowed_tools"}:
            given: Mapping[str, Any] = value
            return given
        case {"type": str(kind)}:
            raise PydanticCustomError("choice", "tools of type {kind} are not supported", {"kind": kind, "at": ".type"})
        case _:
            raise PydanticCustomError("choice", 'must be "none", "auto", "required", or an object that names tools')


def _allowed(value: object, at: str, inside: str | None) -> ToolChoice:
    """Parse the list of allowed tools. `inside` is the field of an entry that holds the tool's name; None: the entry has it."""
    if not isinstance(value, dict):
        raise PydanticCustomError("choice", "must be an object with mode and tools", {"at": at})
    _only(value, ("mode", "tools"), at)
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise PydanticCustomError("choice", 'must be "auto" or "required"', {"at": f"{at}.mode"})
    if not isinstance(tools, list) or not tools:
        raise PydanticCustomError("choice", "must be a list of tools, at least one", {"at": f"{at}.tools"})
    offered = [(n, one) for n, one in enumerate(tools) if not (isinstance(one, dict) and is_left_out(one.get("type")))]
    if not offered:
        raise PydanticCustomError("choice", "must name a tool of type function", {"at": f"{at}.tools"})
    return ToolChoice(mode, tuple(_reference(tool, f"{at}.tools[{number}]", inside) for number, tool in offered))


def _reference(value: object, at: str, inside: str | None) -> tuple[str, str]:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise PydanticCustomError("choice", 'must be {"type": "function", …}', {"at": f"{at}.type"})
    if inside is None:
        return _named({k: v for k, v in value.items() if k != "type"}, at)
    _only(value, ("type", inside), at)
    return _named(value.get(inside), f"{at}.{inside}")


def _named(value: object, at: str) -> tuple[str, str]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise PydanticCustomError("choice", "must be the name of a tool", {"at": f"{at}.name"})
    _only(value, ("name",), at)
    return value["name"], f"{at}.name"


def _only(value: Mapping[str, Any], names: Sequence[str], at: str = "") -> None:
    for name, inner in value.items():
        if name not in names and inner is not None:
            raise PydanticCustomError("choice", "unknown field", {"at": f"{at}.{name}"})


# ---------------------------------------------------------------------------------------------- request bodies


MAX_CHOICES = 128
ANY_MODEL = "may be left out; any name means the served model, unless `--strict-model-names` is set"
MAX_REPLIES = 4096  # the limit on prompts × n of one request
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

Prompt = str | tuple[int, ...]
RequestT = TypeVar("RequestT", bound=BaseModel)


def _prompts(value: object) -> tuple[Prompt, ...]:
    """Turn a text, a list of texts, a list of token ids, or a list of such lists into a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if len(value) > MAX_REPLIES and not isinstance(value[0], int):
            raise PydanticCustomError("prompt", "is over {most} prompts; split the list", {"most": MAX_REPLIES})
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if _are_ids(value):
            return (tuple(value),)
        if all(isinstance(item, list) and _are_ids(item) for item in value):
            return tuple(tuple(item) for item in value)
        raise PydanticCustomError("prompt", "must be a text, a list of texts, a list of token ids or a list of such lists")
    raise PydanticCustomError(
        "prompt", "must not be empty" if value == [] else "must be a text or a list, not {kind}", _kind(value)
    )


def _are_ids(value: list[object]) -> bool:
    return all(type(item) is int for item in value)


def _kind(value: object) -> dict[str, Any]:
    return {"kind": {bool: "a boolean", int: "a number", float: "a number", dict: "an object"}.get(type(value), "this")}


def texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise PydanticCustomError("texts", "must be a text or a list of texts")


def _bias(value: object) -> dict[int, float]:
    """Parse `logit_bias`. Its keys are token ids written as strings, since JSON allows no other keys."""
    if not isinstance(value, dict):
        raise PydanticCustomError("bias", "must be an object: token id → added to its logit")
    bias: dict[int, float] = {}
    for key, added in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 12) and type(key) is not int:
            raise PydanticCustomError("bias", "{key} is not a token id", {"key": repr(key)})
        if type(added) not in (int, float) or not -100 <= added <= 100:
            raise PydanticCustomError("bias", "the bias of token {key} must be a number in [-100, 100]", {"key": key})
        bias[int(key)] = float(added)
    return bias


PART_FIELDS = ("type", "text", "cache_control")  # prefix caching is automatic, so cache_control has no effect


def _content(value: object) -> str:
    """Return a text, or text parts joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "must be a text or a list of text parts")
    texts = []
    for number, part in enumerate(value):
        at = {"at": f"[{number}]"}
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", None):
            raise PydanticCustomError(
                "part", "parts of type {kind} are not supported; this model reads text", {"kind": kind, **at}
            )
        if not isinstance(part, dict) or kind is None or not isinstance(part.get("text"), str):
            raise PydanticCustomError("part", 'must be {"type": "text", "text": "…"}', at)
        extra = [name for name, value in part.items() if value is not None and name not in PART_FIELDS]
        if extra:
            raise PydanticCustomError("part", "unknown field", {"at": f"[{number}].{extra[0]}"})
        texts.append(part["text"])
    return "\n".join(texts)


class StreamOptions(StrictModel):
    include_usage: bool = field_doc("boolean", "a last chunk without choices carries `usage`", False)
    continuous_usage_stats: bool = field_doc(
        "boolean", "with `include_usage`: every chunk carries the `usage` up to it, without the details", False
    )


class Prediction(StrictModel):
    type: Literal["content"] = field_doc('"content"', "required", ...)
    content: Annotated[str, PlainValidator(_content)] = field_doc(
        "string or list of text parts", "required; text parts are joined by line breaks", ...
    )


class JsonSchema(StrictModel):
    name: str | None = field_doc("string", "the caller's name for it")
    description: str | None = field_doc("string", "the caller's own note")
    schema_: dict[str, Any] = field_doc(
        "object", "the JSON schema; an unsupported keyword is refused with its path", {}, alias="schema"
    )
    strict: bool = field_doc("boolean", "the reply follows the schema either way", True)


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"] = field_doc('"text", "json_object", "json_schema"', "required", ...)
    json_schema: JsonSchema | None = field_doc("object", 'see below; with type "json_schema"')
    schema_: dict[str, Any] | None = field_doc(
        "object", 'with type "json_object": a JSON schema that the object follows', alias="schema"
    )

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("agree", 'must be given with type "json_schema" alone', {"at": ".json_schema"})
        if self.schema_ is not None and self.type != "json_object":
            raise PydanticCustomError("agree", 'is only allowed with type "json_object"', {"at": ".schema"})
        return self


class StructuredOutputs(StrictModel):
    json_: dict[str, Any] | str | None = field_doc("object or string", "a JSON schema, or its text", alias="json")
    json_object: bool = field_doc("boolean", "any JSON object", False)
    regex: str | None = field_doc("string", "the same as `guided_regex`")
    choice: ListOf[str] | None = field_doc("list of strings", "the same as `guided_choice`")
    grammar: str | None = field_doc("string", "the same as `guided_grammar`")


class TokenFields(StrictModel):
    """The fields that say how a token is sampled and where a reply ends, for chat, completions and responses."""

    min_tokens: Whole | None = field_doc("integer >= 0", "the reply does not end before this many tokens")
    temperature: float | None = field_doc("number, 0 … 100", "0 is greedy")
    top_k: Whole | None = field_doc("integer >= -1", "0 and -1: off; 1 is greedy at any temperature")
    top_p: float | None = field_doc("number, over 0 … 1", "nucleus sampling among the tokens that top_k kept; 1: off")
    min_p: float | None = field_doc("number, 0 … 1", "relative to the likeliest token; 0: off")
    repetition_penalty: float | None = field_doc("number over 0", "over prompt and reply; 1: off")
    repeat_penalty: float | None = field_doc("number over 0", "the same as `repetition_penalty`")
    frequency_penalty: float | None = field_doc("number, -100 … 100", "over the reply; 0: off")
    presence_penalty: float | None = field_doc("number, -100 … 100", "over the reply; 0: off")
    dry_multiplier: float | None = field_doc("number >= 0", "strength of the DRY penalty on continuing a repetition; 0: off")
    dry_base: float | None = field_doc("number >= 1", "the DRY penalty grows by this factor per repeated token; default 1.75")
    dry_allowed_length: Whole | None = field_doc(
        f"integer, 1 … {LONGEST_REPETITION}", "the DRY penalty spares repetitions shorter than this; default 2"
    )
    dry_range: Whole | None = field_doc(
        "integer >= -1", "how many of the last tokens DRY searches for repetitions; 0 and -1: all"
    )
    dry_sequence_breakers: Annotated[tuple[str, ...], PlainValidator(texts)] | None = field_doc(
        "list of strings", "repetitions are not matched across these; default line break, colon, quote, asterisk"
    )
    logit_bias: Annotated[dict[int, float], PlainValidator(_bias)] | None = field_doc(
        "object: token id → -100 … 100", "added to the logits of these tokens"
    )
    seed: int | None = seed_field("every choice")
    continue_ids: ListOf[int] = field_doc(
        "list of integers", "ids of the first tokens of the reply, which holds what follows them; needs `seed`; see below", []
    )
    system_fingerprint: str | None = field_doc("string", "refused if the server reports another one with its replies")
    stop: Annotated[tuple[str, ...], PlainValidator(texts)] = field_doc(
        "string or list", "ends the reply and is not part of its text; searched in the answer, not in reasoning or calls", ()
    )
    stop_token_ids: ListOf[int] = field_doc("list of integers", "token ids that end the reply", [])
    ignore_eos: bool = field_doc("boolean", "continue after the end-of-sequence token", False)
    bad_words: Annotated[tuple[str, ...], PlainValidator(texts)] = field_doc(
        "list of strings", "words that the reply never contains", ()
    )
    speculation: bool = field_doc("boolean", "false: no speculative decoding for this request; it never changes a reply", True)

    @model_validator(mode="after")
    def _continued_by_seed(self) -> TokenFields:
        if self.continue_ids and self.seed in (None, -1):
            raise PydanticCustomError("agree", NEEDS_SEED, {"at": "continue_ids"})
        return self

    @model_validator(mode="after")
    def _one_penalty(self) -> TokenFields:
        both = (self.repetition_penalty, self.repeat_penalty)
        if None not in both and both[0] != both[1]:
            raise PydanticCustomError("agree", "is the same as repetition_penalty; send one of them", {"at": "repeat_penalty"})
        return self


class SamplingFields(TokenFields):
    """The fields that chat and completions have in common."""

    model: str | None = field_doc("string", ANY_MODEL)
    stream: bool = field_doc("boolean", "answer in server-sent events", False)
    stream_options: StreamOptions | None = field_doc("object", "see below; only with `stream`")
    max_tokens: Whole | None = field_doc(
        "integer >= -1", "the most tokens of a reply, which ends at the context at the latest; -1: only there; 0: no reply at all"
    )
    max_completion_tokens: Whole | None = field_doc("integer >= -1", "the same as `max_tokens`")
    n: int = field_doc(f"integer, 1 … {MAX_CHOICES}", "choices per prompt, each with its own seed", 1, ge=1, le=MAX_CHOICES)
    logprobs_mode: Literal["raw", "processed", "both"] = field_doc(
        '"raw", "processed" or "both"', "of the model's own distribution, of the one that was sampled from, or see below", "raw"
    )
    logprob_token_ids: ListOf[int] = field_doc(
        f"list of at most {MAX_LOGPROB_TOKEN_IDS} integers",
        "ids of tokens whose logprobs are returned at every position of the reply, after the likeliest alternatives; only with "
        "`logprobs`",
        [],
        max_length=MAX_LOGPROB_TOKEN_IDS,
    )
    prompt_logprobs: int | None = field_doc(
        f"integer, 0 … {MAX_TOP_LOGPROBS}",
        "adds `prompt_logprobs`, the model's own logprobs of the prompt's tokens and of that many alternatives, see below",
        ge=0,
        le=MAX_TOP_LOGPROBS,
    )
    skip_special_tokens: bool = field_doc("boolean", "leave special tokens out of the text", True)
    prediction: Prediction | None = field_doc(
        "object", "see below; the expected reply, used as drafts: faster where it is right, never a different reply"
    )
    response_format: ResponseFormat | None = field_doc("object", "see below; the reply is JSON, of a schema if one is given")
    guided_json: dict[str, Any] | str | None = field_doc("object or string", "a JSON schema, or its text, that the reply follows")
    json_schema: dict[str, Any] | None = field_doc("object", "the same as `guided_json`, as llama.cpp takes it")
    guided_regex: str | None = field_doc("string", "a regular expression that the whole reply matches; no look-around")
    guided_choice: ListOf[str] | None = field_doc("list of strings", "the reply is one of these")
    guided_grammar: str | None = field_doc("string", "a grammar that the reply follows: Lark (llguidance's dialect) or GBNF")
    grammar: str | None = field_doc("string", "a grammar as llama.cpp takes them (GBNF)")
    structured_outputs: StructuredOutputs | None = field_doc("object", "see below; another spelling of the guided fields")
    return_token_ids: bool = field_doc("boolean", "adds `token_ids` and `prompt_token_ids` to each choice", False)
    return_checksums: bool = field_doc("boolean", "adds `score_checksums` to each choice, one string per token", False)
    return_token_details: bool = field_doc("boolean", "adds `token_details` to each choice, see below", False)

    @model_validator(mode="after")
    def _agree(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("agree", "only with stream: true", {"at": "stream_options"})
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise PydanticCustomError("agree", "is the same as max_tokens; send one of them", {"at": "max_completion_tokens"})
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def compiles(self) -> bool:
        """Whether a response format must be compiled for the reply, which may take seconds."""
        shape = self.response_format
        given = (*(getattr(self, name) for name in GUIDED), self.grammar, self.structured_outputs)
        return any(one is not None for one in given) or (shape is not None and shape.type != "text")

    def guided(self) -> dict[str, tuple[str, Any]]:
        """Return the response formats that are given, as a map from the caller's field name to the option's name and value."""
        found: dict[str, tuple[str, Any]] = {}
        match self.response_format:
            case ResponseFormat(type="json_object", schema_=dict() as schema):
                found["response_format.schema"] = ("guided_json", schema)
            case ResponseFormat(type="json_object"):
                found["response_format"] = ("guided_json", ANY_OBJECT)
            case ResponseFormat(json_schema=JsonSchema() as wanted):
                found["response_format.json_schema.schema"] = ("guided_json", wanted.schema_)
        for name in GUIDED:
            if getattr(self, name) is not None:
                found[name] = (name, getattr(self, name))
        if self.json_schema is not None:
            found["json_schema"] = ("guided_json", self.json_schema)
        if self.grammar is not None:
            if "::=" not in self.grammar:
                raise BadParameter("grammar", "is not GBNF, which writes rules with ::=; send a Lark grammar as guided_grammar")
            found["grammar"] = ("guided_grammar", self.grammar)
        if (outputs := self.structured_outputs) is not None:
            if outputs.json_object:
                found["structured_outputs.json_object"] = ("guided_json", ANY_OBJECT)
            for name, value in (("json", outputs.json_), *((n, getattr(outputs, n)) for n in ("regex", "choice", "grammar"))):
                if value is not None:
                    found[f"structured_outputs.{name}"] = (f"guided_{name}", value)
        return found

    def options(self, **changes: Any) -> RequestOptions:
        """Build RequestOptions from the fields of the same name, and from `changes`, which the endpoint decides."""
        named = {f.name: getattr(self, f.name) for f in fields(RequestOptions) if f.name in type(self).model_fields}
        spelled = {
            "max_tokens": self.token_limit,
            "repetition_penalty": self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty,
            "checksums": self.return_checksums,
            "prediction": None if self.prediction is None else self.prediction.content,
        }
        guided = self.guided()
        if len(guided) > 1:
            first, second, *_ = guided
            raise BadParameter(second, f"only one response format is allowed; {first} is given too")
        spelled |= dict.fromkeys(GUIDED) | dict(guided.values())
        return RequestOptions.of(**named | spelled | changes)


class CompletionRequest(SamplingFields):
    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts)] = field_doc(
        "string, list of strings, list of token ids, list of such lists", "what to continue; required", ...
    )
    echo: bool = field_doc("boolean", "repeat the prompt before the reply; with `max_tokens: 0` return the prompt alone", False)
    logprobs: int | None = field_doc(
        f"integer, 0 … {MAX_TOP_LOGPROBS}",
        "logprobs of the tokens and of that many alternatives; with `echo` also of the prompt",
        ge=0,
        le=MAX_TOP_LOGPROBS,
    )
    add_special_tokens: bool = field_doc("boolean", "add the tokenizer's special tokens to a text prompt", True)

    @model_validator(mode="after")
    def _one_reply_continued(self) -> CompletionRequest:
        if self.continue_ids and len(self.prompt) > 1:
            many = "continues one reply: send one request per prompt, each with the seed of its choice"
            raise PydanticCustomError("agree", many, {"at": "continue_ids"})
        if self.continue_ids and self.echo:
            raise PydanticCustomError("agree", "belongs to the beginning of a reply, not to its continuation", {"at": "echo"})
        return self


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"] = field_doc(
        '"system", "developer", "user", "assistant" or "tool"', "required", ...
    )
    content: Annotated[str, PlainValidator(_content)] | None = field_doc(
        "string or list of text parts", "text parts are joined by line breaks; optional only with `tool_calls`"
    )
    name: str | None = field_doc("string", "passed to the chat template")
    reasoning_content: str | None = field_doc("string", "passed to the chat template")
    reasoning: str | None = field_doc("string", "the same as `reasoning_content`")
    tool_calls: ListOf[ToolCall] | None = field_doc("list of objects", "the assistant's calls: `id`, `type`, `function`")
    tool_call_id: str | None = field_doc("string", 'with role "tool": the call that this is the result of')

    @model_validator(mode="after")
    def _complete(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "this field is required", {"at": ".content"})
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("agree", "only an assistant message can have tool calls", {"at": ".tool_calls"})
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise PydanticCustomError("agree", 'is required with role "tool", and only allowed there', {"at": ".tool_call_id"})
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates expect it. They know `developer` by its older name, `system`."""
        message = self.model_dump(exclude_none=True) | {"content": self.content or ""}
        if not self.tool_calls:
            message.pop("tool_calls", None)
        return message | {"role": "system"} if self.role == "developer" else message


class ChatRequest(SamplingFields):
    messages: ListOf[Message] = field_doc("list of objects", "see below; required", ..., min_length=1)
    logprobs: bool = field_doc("boolean", "logprobs of the tokens", False)
    top_logprobs: int | None = field_doc(
        f"integer, 0 … {MAX_TOP_LOGPROBS}", "and of that many alternatives; only with `logprobs`", ge=0, le=MAX_TOP_LOGPROBS
    )
    add_generation_prompt: bool = field_doc("boolean", "end the prompt with the beginning of an assistant message", True)
    continue_final_message: bool = field_doc(
        "boolean", "the prompt ends where the last message ends, an assistant's, and the reply continues it", False
    )
    chat_template_kwargs: dict[str, Any] = field_doc("object", "variables of the checkpoint's chat template", {})
    enable_thinking: bool | None = field_doc("boolean", "the same as in `chat_template_kwargs`, which overrides it")
    reasoning_effort: Effort | None = field_doc(
        ", ".join(f'"{effort}"' for effort in EFFORTS),
        "passed to the chat template if it has such a variable; else `none` turns reasoning off, and the budget is "
        + ", ".join(f"{tokens} tokens for `{effort}`" for effort, tokens in EFFORTS.items() if tokens)
        + "; no effect on a model that does not reason",
    )
    thinking_budget: Whole | None = field_doc(
        "integer >= 0",
        "tokens of reasoning, after which it is closed with the template's own text; overrides the effort",
    )

    tools: ListOf[ToolSpec] = field_doc("list of objects", "see below; functions that the model may call", [])
    tool_choice: Annotated[ToolChoice, PlainValidator(chat_choice)] | None = field_doc(
        '"none", "auto", "required", {"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}',
        "`required` or a name forces a call; `none` hides the tools; with `allowed_tools` the prompt lists all tools and these "
        "may be called; default `auto`",
    )
    parallel_tool_calls: bool = field_doc(
        "boolean", "false: at most one call in a reply, as where `tool_choice` names a tool", True
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("agree", "only with logprobs: true", {"at": "top_logprobs"})
        names: set[str] = set()
        for number, function in self.functions:
            if function.name in names:
                twice = {"at": f"tools[{number}].function.name"}
                raise PydanticCustomError("agree", "another tool has the same name", twice)
            names.add(function.name)
        wanted = self.tool_choice
        if wanted is not None and wanted.mode == "required" and not names:
            raise PydanticCustomError("agree", "only with tools that are functions", {"at": "tool_choice"})
        for name, at in (wanted and wanted.names) or ():
            if name not in names:
                raise PydanticCustomError("agree", "is not a tool of this request", {"at": f"tool_choice{at}"})
        return self

    @property
    def functions(self) -> list[tuple[int, FunctionTool]]:
        """Return the tools that the prompt lists, each with its index among all tools of the request, for errors."""
        return [(number, tool.function) for number, tool in enumerate(self.tools) if tool.function is not None]

    @property
    def left_out(self) -> tuple[str, ...]:
        return left_out([tool.type for tool in self.tools], own=("function",))

    @property
    def compiles(self) -> bool:
        choice = self.tool_choice
        forced = choice is not None and (choice.mode == "required" or choice.names is not None)
        return super().compiles or any(forced or function.strict for _, function in self.functions)

    def tool_use(self) -> ToolUse | None:
        """Return the tools of the request, or None if the prompt shall list no tools."""
        wanted = self.tool_choice or ToolChoice("auto")
        tools = tuple(_tool(number, function) for number, function in self.functions)
        if not tools or wanted.mode == "none":
            return None
        allowed = None if wanted.names is None else {name for name, _ in wanted.names}
        callable = tuple(tool for tool in tools if allowed is None or tool.name in allowed)
        parallel = self.parallel_tool_calls and not wanted.named
        return ToolUse(tools, callable, required=wanted.mode == "required", parallel=parallel)


def _tool(number: int, function: FunctionTool) -> Tool:
    path = f"tools[{number}].function.parameters"
    schema = schema_text(function.parameters, path) if function.parameters else NO_PARAMETERS
    return Tool(function.name, function.description or "", schema, strict=function.strict, param=path)


class ScoreRequest(ChatRequest):
    """The request that a reply was generated with, by chat messages or by a prompt, and the reply."""

    messages: ListOf[Message] | None = field_doc("list of objects", "see below; this or `prompt`", min_length=1)  # type: ignore[assignment]
    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts)] | None = field_doc(
        "string or list of token ids", "the prompt itself, without the chat template"
    )
    add_special_tokens: bool = field_doc("boolean", "add the tokenizer's special tokens to a text prompt", True)
    reply: str | None = field_doc("string", "the reply as a text, which is tokenized; this or `reply_ids`")
    reply_ids: ListOf[int] = field_doc("list of integers", "the ids of the reply's tokens, after those of `continue_ids`", [])
    logprobs: bool = field_doc("boolean", "a score always has them", True)
    prompt_logprobs: None = field_doc("null", "a score is of the reply alone")
    n: int = field_doc("integer, 1 … 1", "one reply is scored", 1, ge=1, le=1)
    stream: Literal[False] = field_doc("false", "a score is not streamed", False)

    @model_validator(mode="after")
    def _one_reply_to_one_prompt(self) -> ScoreRequest:
        if (self.messages is None) == (self.prompt is None):
            raise PydanticCustomError("agree", "send either messages or prompt", {"at": "prompt"})
        if self.prompt is not None and len(self.prompt) > 1:
            raise PydanticCustomError("agree", "only one prompt; send a request for each", {"at": "prompt"})
        if self.prompt is not None and self.tools:
            raise PydanticCustomError("agree", "only with messages", {"at": "tools"})
        if (self.reply is None) == (not self.reply_ids):
            raise PydanticCustomError("agree", "send either reply or reply_ids", {"at": "reply_ids"})
        return self


class TokenizeRequest(StrictModel):
    model: str | None = field_doc("string", ANY_MODEL)
    prompt: str | None = field_doc("string", "a text; this or `messages`")
    add_special_tokens: bool = field_doc("boolean", "add the tokenizer's special tokens", True)
    messages: ListOf[Message] | None = field_doc("list of objects", "a chat, through the chat template", min_length=1)
    add_generation_prompt: bool = field_doc("boolean", "end the prompt with the beginning of an assistant message", True)
    continue_final_message: bool = field_doc(
        "boolean", "the prompt ends where the last message ends, an assistant's, and the reply continues it", False
    )
    chat_template_kwargs: dict[str, Any] = field_doc("object", "variables of the checkpoint's chat template", {})

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("agree", "send either prompt or messages", {"at": "prompt"})
        return self


class DetokenizeRequest(StrictModel):
    model: str | None = field_doc("string", ANY_MODEL)
    tokens: ListOf[int] = field_doc("list of integers", "required", ...)


class WeightUpdateRequest(StrictModel):
    weight_dir: str | None = field_doc(
        "string", "a folder of safetensors with its config.json, below `--weight-dir`; this or `port`"
    )
    port: int | None = field_doc(
        "integer", "where a trainer on the server's machine sends them: `onedraw.send_weights` does it", ge=1, le=65535
    )
    update_info: dict[str, Any] | None = field_doc(
        "object", "where vLLM's clients send `weight_dir`; a transfer over NCCL is refused"
    )

    @model_validator(mode="after")
    def _one_folder(self) -> WeightUpdateRequest:
        if [self.weight_dir, self.update_info, self.port].count(None) != 2:
            raise PydanticCustomError("missing", "send one of weight_dir, update_info and port", {"at": "weight_dir"})
        return self

    @property
    def folder(self) -> str:
        if self.weight_dir is not None:
            return self.weight_dir
        found = (self.update_info or {}).get("weight_dir")
        if not isinstance(found, str):
            raise Unsupported(
                f"weights are not received over NCCL; {WEIGHTS_ADVICE}", param="update_info", code="nccl_unsupported"
            )
        return found
