"""Bodies of Ollama's /api/chat, /api/generate and /api/show, turned into the equivalent chat or completion request.

The input is the honoured fields of a body (those that have an effect); the output is the fields of a request of `protocol.py`, so
a reply has the tokens that the same request has on /v1/chat/completions or /v1/completions.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from onedraw.errors import BadParameter
from onedraw.server.fields import (
    TOOL_NAME,
    ListOf,
    Rule,
    StrictModel,
    Whole,
    field_doc,
    inert,
    left_out,
    neutral,
    seed_field,
)
from onedraw.server.protocol import ANY_MODEL, ToolSpec, texts
from onedraw.types import MAX_TOP_LOGPROBS

_NO_IMAGES = "this model reads text"
_AT_START = "decided when the server starts"
OPTION_RULES: tuple[Rule, ...] = (
    *(inert(name, _AT_START) for name in ("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv")),
    *(inert(name, _AT_START) for name in ("use_mmap", "use_mlock", "logits_all")),
    inert("num_keep", "the server never shortens a prompt"),
    inert("mirostat_tau", "only mirostat has it"),
    inert("mirostat_eta", "only mirostat has it"),
    neutral("vocab_only", "the whole model is loaded", False),
    neutral("embedding_only", "the server has no embeddings", False),
    neutral("mirostat", "mirostat depends on all earlier draws, so a seed and a position could not replay a token", 0),
    neutral("tfs_z", "no tail-free sampling", 1),
    neutral("typical_p", "no typical sampling", 1),
    neutral("penalize_newline", "penalties apply to every token", True),
    neutral("repeat_last_n", "penalties look at the whole prompt and reply", -1),
)
_SHARED = (
    inert("keep_alive", "the model stays loaded"),
    inert("truncate", "a prompt over the context is refused, never shortened", True, False),
    inert("shift", "a reply ends at the context", True, False),
)
CHAT_RULES: tuple[Rule, ...] = (
    *_SHARED,
    inert("system", "Ollama does not read it here either; send a system message"),
    inert("metadata", "the caller's own notes"),
)
GENERATE_RULES: tuple[Rule, ...] = (
    *_SHARED,
    neutral("images", _NO_IMAGES, []),
    neutral("suffix", "no filling in the middle", ""),
    neutral("template", "the checkpoint's own template is used; render it yourself and send it with raw: true", ""),
    neutral("context", "send the conversation as messages to /api/chat", []),
)
MESSAGE_RULES: tuple[Rule, ...] = (neutral("images", _NO_IMAGES, []),)
_INDEX = inert("index", "calls are read in their order")
CALL_RULES: tuple[Rule, ...] = (neutral("type", "tools are functions", "function"), _INDEX)
FUNCTION_RULES: tuple[Rule, ...] = (_INDEX, inert("description", "not shown to the model"))
SHOW_RULES: tuple[Rule, ...] = (
    inert("verbose", "the whole vocabulary is never sent"),
    inert("system", "not used"),
    inert("template", "not used"),
    inert("options", "not used"),
)


class OllamaOptions(StrictModel):
    temperature: float | None = field_doc("number, 0 … 100", "0 is greedy")
    top_k: Whole | None = field_doc("integer >= -1", "0 and -1: off; 1 is greedy at any temperature")
    top_p: float | None = field_doc("number, over 0 … 1", "nucleus sampling among the tokens that top_k kept; 1: off")
    min_p: float | None = field_doc("number, 0 … 1", "relative to the likeliest token; 0: off")
    repeat_penalty: float | None = field_doc("number over 0", "over prompt and reply; 1: off")
    presence_penalty: float | None = field_doc("number, -100 … 100", "over the reply; 0: off")
    frequency_penalty: float | None = field_doc("number, -100 … 100", "over the reply; 0: off")
    seed: int | None = seed_field("the last object of a reply")
    num_predict: Whole | None = field_doc(
        "integer >= -2", "the most tokens of the reply, which ends at the context at the latest; -1, -2 or none: only there"
    )
    num_ctx: Whole | None = field_doc(
        "integer >= 1", "refused if it is over the server's context (`--max-context`), else without effect", ge=1
    )
    stop: Annotated[tuple[str, ...], PlainValidator(texts)] = field_doc(
        "string or list", "ends the reply and is not part of its text; searched in the answer, not in thinking or calls", ()
    )

    def fields(self, *, context: int, num_predict: int | None = None) -> dict[str, Any]:
        """Return the fields of the equivalent request. `context` is the server's context length in tokens, and `num_predict`
        applies if the options have no `num_predict`."""
        if self.num_ctx is not None and self.num_ctx > context:
            raise BadParameter(
                "options.num_ctx", f"is {self.num_ctx}, over the context of {context}; lower it, or serve with --max-context"
            )
        same = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed")
        given = {name: getattr(self, name) for name in same if getattr(self, name) is not None}
        limit = num_predict if self.num_predict is None else self.num_predict
        penalty = {} if self.repeat_penalty is None else {"repetition_penalty": self.repeat_penalty}
        return given | penalty | {"max_tokens": -1 if limit in (None, -2) else limit, "stop": self.stop}


OPTION_NAMES: Mapping[str, str] = {
    **{name: f"options.{name}" for name in OllamaOptions.model_fields},
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
}


class OllamaFunction(StrictModel):
    name: str = field_doc("string", "required", ..., pattern=TOOL_NAME)
    arguments: dict[str, Any] = field_doc("object", "the arguments, as in the reply", {})


class OllamaCall(StrictModel):
    function: OllamaFunction = field_doc("object", "`name` and `arguments`, as in the reply; required", ...)
    id: str | None = field_doc("string", "as in the reply")


class OllamaMessage(StrictModel):
    role: Literal["system", "user", "assistant", "tool"] = field_doc('"system", "user", "assistant" or "tool"', "required", ...)
    content: str = field_doc("string", "the text", "")
    thinking: str | None = field_doc("string", "passed to the chat template")
    tool_calls: ListOf[OllamaCall] = field_doc("list of objects", "the assistant's calls: `function`, `id`", [])
    tool_name: str | None = field_doc("string", 'with role "tool": the tool whose result this is')
    tool_call_id: str | None = field_doc("string", 'with role "tool": the call whose result this is, if calls have ids')

    @model_validator(mode="after")
    def _agree(self) -> OllamaMessage:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("agree", "only an assistant message can have tool calls", {"at": ".tool_calls"})
        return self


class OllamaRequest(StrictModel):
    """The fields that /api/chat and /api/generate have in common."""

    model: str | None = field_doc("string", ANY_MODEL)
    stream: bool = field_doc("boolean", "answer in lines of JSON, as they arrive", True)
    format: Literal["json", ""] | dict[str, Any] | None = field_doc(
        '"json", or a JSON schema', "the reply is JSON, of the schema if one is given"
    )
    options: OllamaOptions | None = field_doc("object", "see below")
    think: bool | Literal["low", "medium", "high", "max"] | None = field_doc(
        'boolean, "low", "medium", "high" or "max"', "whether and how much a reasoning model thinks; no effect on other models"
    )
    num_predict: Whole | None = field_doc(
        "integer >= -2", "the same as in `options`, which override it; Open WebUI sends it here"
    )
    logprobs: bool = field_doc("boolean", "logprobs of the tokens", False)
    top_logprobs: int | None = field_doc(
        f"integer, 0 … {MAX_TOP_LOGPROBS}", "and of that many alternatives; only with `logprobs`", ge=0, le=MAX_TOP_LOGPROBS
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> OllamaRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("agree", "only with logprobs: true", {"at": "top_logprobs"})
        return self

    def _common(self, context: int) -> dict[str, Any]:
        options = self.options or OllamaOptions()
        fields = {**options.fields(context=context, num_predict=self.num_predict), "stream": self.stream}
        match self.format:
            case "json":
                fields["response_format"] = {"type": "json_object"}
            case dict() as schema:
                fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        return fields

    def _chat(self, context: int) -> dict[str, Any]:
        shown = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return self._common(context) | shown | self._thinking()

    def _thinking(self) -> dict[str, Any]:
        match self.think:
            case None:
                return {}
            case True:
                return {"enable_thinking": True}
            case False:
                return {"reasoning_effort": "none"}
            case effort:
                return {"reasoning_effort": effort}

    def names(self) -> dict[str, str]:
        """Map field names of the equivalent request to the caller's field names, for errors."""
        return {
            **OPTION_NAMES,
            **dict.fromkeys(("response_format.json_schema.schema", "response_format"), "format"),
            **dict.fromkeys(("reasoning_effort", "enable_thinking"), "think"),
        }


class OllamaChat(OllamaRequest):
    messages: ListOf[OllamaMessage] = field_doc(
        "list of objects", "see below; the reply continues a last message of the assistant; none: nothing is generated", []
    )
    tools: ListOf[ToolSpec] = field_doc("list of objects", "functions that the model may call, as in a chat", [])

    @property
    def left_out(self) -> tuple[str, ...]:
        return left_out([tool.type for tool in self.tools], own=("function",))

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def filled(self) -> OllamaChat:
        """Return the request with a message, so that an empty one can be checked like any other."""
        return self if self.messages else self.model_copy(update={"messages": [OllamaMessage(role="user", content="?")]})

    def chat(self, *, context: int) -> dict[str, Any]:
        """Return the fields of the equivalent chat request."""
        last = self.messages[-1]
        return self._chat(context) | {
            "messages": _to_chat(self.messages),
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools],
            "continue_final_message": last.role == "assistant" and not last.tool_calls,
        }


class OllamaGenerate(OllamaRequest):
    prompt: str = field_doc("string", "the user's message, or with `raw` the text to continue; none: nothing is generated", "")
    system: str | None = field_doc("string", "the system message")
    raw: bool = field_doc("boolean", "continue the prompt as it is, without the chat template", False)

    @model_validator(mode="after")
    def _raw_alone(self) -> OllamaGenerate:
        for name, given in (("system", self.system), ("think", self.think)) if self.raw else ():
            if given:
                raise PydanticCustomError("agree", "cannot be used with raw: true", {"at": name})
        return self

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    def filled(self) -> OllamaGenerate:
        """Return the request with a prompt, so that an empty one can be checked like any other."""
        return self if self.prompt else self.model_copy(update={"prompt": "?"})

    def completion(self, *, context: int) -> dict[str, Any]:
        """Return the fields of the equivalent completion request."""
        fields = self._common(context) | {"prompt": self.prompt}
        return fields | {"logprobs": self.top_logprobs or 0} if self.logprobs else fields

    def chat(self, *, context: int) -> dict[str, Any]:
        """Return the fields of the equivalent chat request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._chat(context) | {"messages": [*system, {"role": "user", "content": self.prompt}]}

    def names(self) -> dict[str, str]:
        return super().names() | {"messages": "prompt"}


class OllamaShow(StrictModel):
    model: str | None = field_doc("string", ANY_MODEL)
    name: str | None = field_doc("string", "the same as `model`")


class OpenCalls:
    """The tool calls of a conversation that have no result yet. A call is found by its id, by the tool's name or by its order,
    without a search through all calls."""

    def __init__(self) -> None:
        self._calls: dict[int, str] = {}  # the ids of the calls, by their number
        self._ids: defaultdict[str, deque[int]] = defaultdict(deque)  # id → numbers of its calls, with or without a result
        self._names: defaultdict[str, deque[int]] = defaultdict(deque)  # name of the tool → numbers of its calls, likewise
        self._all: deque[int] = deque()  # numbers of all calls, likewise
        self._number = 0

    def add(self, id: str, name: str) -> None:
        self._calls[self._number] = id
        for waiting in (self._ids[id], self._names[name], self._all):
            waiting.append(self._number)
        self._number += 1

    def take(self, id: str | None, name: str | None) -> str | None:
        """Take out the first call with this id, else the first of this tool, else the first of all, and return its id."""
        for waiting in (self._ids.get(id or ""), self._names.get(name or ""), self._all):
            while waiting:
                number = waiting.popleft()
                if number in self._calls:
                    return self._calls.pop(number)
        return None


def _to_chat(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Turn messages into chat messages. Many clients send results of tools without the ids of their calls: such a result gets the
    id of the first call of the same tool that has no result yet, else of the first call of all without one."""
    open_calls = OpenCalls()
    found: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        made: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            named = [(call.id or f"call_{number}_{index}", call.function) for index, call in enumerate(message.tool_calls)]
            for id, function in named:
                open_calls.add(id, function.name)
            made["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": one.name, "arguments": json.dumps(one.arguments)}}
                for id, one in named
            ]
        if message.role == "tool":
            answered = open_calls.take(message.tool_call_id, message.tool_name)
            made["tool_call_id"] = message.tool_call_id or answered or f"call_{number}"
            if message.tool_name:
                made["name"] = message.tool_name
        found.append(made)
    return found
