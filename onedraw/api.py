"""The Python API: `onedraw.load(model, …)` gives a Model that generates, streams, and closes.

In: a model's name and keyword settings; then prompts (text, chat messages or token ids) and keyword wishes. Out: Replies
and Pieces. It is the same door that the server and the command line use, with the same defaults from the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from onedraw.errors import BadParameter, BadRequest
from onedraw.llm.llm import LLM, Generation, Reply
from onedraw.llm.options import RequestOptions, make_chat_generation, make_generation
from onedraw.settings import Settings
from onedraw.text.tools.dialects import NO_PARAMETERS, Tool, ToolUse
from onedraw.types import ModelCard, Piece

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]

TOOL_WISHES = ("tools", "tool_choice", "parallel_tool_calls")  # beside the wishes, in a chat
DEFAULT_MAX_TOKENS = 256  # where the caller named none; less where the context has less room


def load(model: str = "smollm2", *, progress: Callable[[str], None] | None = None, **settings: Any) -> Model:
    """Load a model and start its engine. Settings are the serving flags: max_context=4096, dtype="f32", threads=2 …"""
    from onedraw.build.llm import build_llm

    return Model(build_llm(Settings.of(model=model, **settings), progress))


class Model:
    """A running model. Owner: whoever loaded it, and closes it (or uses it in a `with`). Its methods are thread-safe."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @property
    def card(self) -> ModelCard:
        """What is known of the model: family, vocabulary, context, sampling defaults, fingerprint."""
        return self.llm.card

    def generate(self, prompt: Prompt, **options: Any) -> Reply | list[Reply]:
        """The whole reply; a list of them when n is over 1. In a chat also tools, tool_choice, parallel_tool_calls."""
        return _one_or_all(self.llm.generate(self._generation(prompt, options)))

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Piece]:
        """The reply piece by piece; leaving the loop cancels the rest. A mistake raises here, not in the loop."""
        generation = self._generation(prompt, options)
        self.llm.check(generation)
        return self.llm.stream(generation)

    async def agenerate(self, prompt: Prompt, **options: Any) -> Reply | list[Reply]:
        return _one_or_all(await self.llm.agenerate(self._generation(prompt, options)))

    def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[Piece]:
        generation = self._generation(prompt, options)
        self.llm.check(generation)
        return self.llm.astream(generation)

    def close(self) -> None:
        self.llm.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generation(self, prompt: Prompt, options: Mapping[str, Any]) -> Generation:
        named = {name: value for name, value in options.items() if name not in TOOL_WISHES}
        tools = {name: options[name] for name in TOOL_WISHES if options.get(name) is not None}
        return generation_for(self.llm, prompt, RequestOptions.of(**named), use=_tool_use(**tools))


def generation_for(
    llm: LLM, prompt: Prompt, options: RequestOptions, *, use: ToolUse | None = None, default_max_tokens: int = DEFAULT_MAX_TOKENS
) -> Generation:
    """A text, chat messages or token ids → an Ask."""
    if is_chat(prompt):
        messages = [dict(item) for item in prompt]  # type: ignore[arg-type]
        return make_chat_generation(options, llm=llm, messages=messages, use=use, default_max_tokens=default_max_tokens)
    if use is not None:
        raise BadParameter("tools", "only chat messages can have tools")
    return make_generation(options, llm=llm, prompt=_ids(llm, prompt), default_max_tokens=default_max_tokens)


def _tool_use(
    tools: Sequence[Mapping[str, Any]] = (), tool_choice: str = "auto", parallel_tool_calls: bool = True
) -> ToolUse | None:
    """Tools in OpenAI's form; `tool_choice` is auto, none, required, or the name of a tool that must be called."""
    if not tools or tool_choice == "none":
        return None
    known = []
    for number, tool in enumerate(tools):
        function = tool.get("function", tool)
        schema = json.dumps(function["parameters"]) if function.get("parameters") else NO_PARAMETERS
        path = f"tools[{number}].function.parameters"
        known.append(
            Tool(function["name"], function.get("description") or "", schema, strict=bool(function.get("strict")), param=path)
        )
    may = tuple(tool for tool in known if tool_choice in ("auto", "required", tool.name))
    if not may:
        raise BadParameter("tool_choice", f"{tool_choice} is no tool of this request; else auto, none or required")
    return ToolUse(tuple(known), may, required=tool_choice != "auto", parallel=parallel_tool_calls)


def _ids(llm: LLM, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return llm.encode(prompt)
    items = list(prompt)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return tuple(items)  # type: ignore[arg-type]
    raise BadRequest("a prompt is a text, a list of chat messages or a list of token ids", param="prompt")


def is_chat(prompt: Prompt) -> bool:
    """Chat messages, whose reply begins a text of its own."""
    return not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(item, Mapping) for item in prompt)


def _one_or_all(replies: list[Reply]) -> Reply | list[Reply]:
    return replies[0] if len(replies) == 1 else replies
