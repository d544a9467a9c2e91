"""Render chat messages to the text of a prompt, with the checkpoint's own Jinja template.

The input is messages, tools and keyword arguments; the output is text in which special tokens are spelled out.

A template comes with the checkpoint, so it is untrusted code. It runs in Jinja's immutable sandbox, configured as in
transformers, and sees only plain JSON values. The sandbox limits a single range() (100,000), the length of a repeated string
or list, the size of a power, and the length of the output. It does not limit the time and memory of loops without output, nor
the width in padding filters and format strings. So serve only checkpoints whose authors you trust not to waste time and
memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from onedraw.errors import BadParameter, BadRequest, CorruptFile
from onedraw.text.gguf_tokenizer import require_types
from onedraw.text.tokenizer import read_text, special_text, tokenizer_config

MAX_OUTPUT = 2**26  # most characters of a rendered prompt; far more than fit into any context
MAX_REPEATED = 2**20  # most elements of a string or list that a template makes with `*`
MAX_POWER_BITS = 2**12  # most bits of a number that a template makes with `**`


class ChatTemplate:
    """A compiled template. It is immutable, so several threads may use it."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CorruptFile(
                f"the checkpoint's chat template cannot be compiled: line {error.lineno}: {error.message}"
            ) from None
        except (RecursionError, SyntaxError, MemoryError) as error:
            # Jinja turns a template into Python code, in which loops cannot be nested as deep, and computes its constants.
            raise CorruptFile(
                f"the checkpoint's chat template cannot be compiled: it is nested too deep, or too large ({type(error).__name__})"
            ) from None

    @classmethod
    def from_folder(cls, path: str | Path) -> ChatTemplate | None:
        """Read the template of a checkpoint folder: chat_template.jinja if there is one, else from tokenizer_config.json."""
        folder = Path(path)
        config = tokenizer_config(folder)
        file = folder / "chat_template.jinja"
        source = read_text(file) if file.is_file() else _default_source(config.get("chat_template"))
        if source is None:
            return None
        bos, eos = (special_text(config, name) or "" for name in ("bos_token", "eos_token"))
        try:
            return cls(source, bos_token=bos, eos_token=eos)
        except CorruptFile as error:
            raise CorruptFile(f"{file if file.is_file() else folder / 'tokenizer_config.json'}: {error}") from None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> ChatTemplate | None:
        """Read the template from a GGUF file's metadata. None if the file has none."""
        require_types(metadata)
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        tokens = metadata.get("tokenizer.ggml.tokens", ())
        bos, eos = (
            tokens[i] if i is not None and 0 <= i < len(tokens) else ""
            for i in (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
        )
        return cls(source, bos_token=bos, eos_token=eos)

    def save(self, folder: Path) -> None:
        """Write chat_template.jinja, from which `from_folder` makes an equal template if the folder has the same tokenizer."""
        (folder / "chat_template.jinja").write_text(self.source, encoding="utf-8", newline="")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt's text. An error in the template, or one it raises itself, becomes a BadRequest with its message."""
        for name in ("messages", "documents"):
            if name in kwargs:
                raise BadRequest(f"{name} cannot be set as a template argument; remove it", param="chat_template_kwargs")
        return self._rendered(self._placed(messages), add_generation_prompt=add_generation_prompt, tools=tools, **kwargs)

    def _placed(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages in a form in which the template renders all of them. A system message where the template would drop
        or refuse it becomes part of a user message at that place, between tags. Moved to the front, it would change the tokens of
        all messages before it, and a cached prefix of the conversation would be lost."""
        if not any(message.get("role") == "system" for message in messages) or self.system_messages == "anywhere":
            return list(messages)
        placed: list[Mapping[str, Any]] = []
        parts: list[str] = []  # the contents that make up the last message
        joins = False  # whether the next user message is appended to the last one

        def end() -> None:
            if len(parts) > 1:
                placed[-1] = {**placed[-1], "content": "\n\n".join(parts)}

        for message in messages:
            before = placed[-1] if placed else {}
            opens = self.system_messages == "first" and len(placed) == (before.get("role") == "system")
            if message.get("role") == "system" and isinstance(message.get("content"), str) and not opens:
                message, joins = {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}, True
            same = before.get("role") == message.get("role")
            joins = joins and message.get("role") == "user"
            if same and (joins or message.get("role") == "system") and _are_texts(before, message):
                parts.append(message["content"])
            else:
                end()
                placed.append(message)
                parts = [message["content"]] if _are_texts(message) else []
        end()
        return placed

    @cached_property
    def system_messages(self) -> Literal["anywhere", "first", "never"]:
        """Where this template renders system messages, found by rendering a few chats."""
        turns = [("system", "probe-1"), ("system", "probe-2"), ("user", "probe-3"), ("system", "probe-4")]
        turns += [("assistant", "probe-5"), ("system", "probe-6"), ("user", "probe-7")]
        return "anywhere" if self._shows(*turns) else "first" if self._shows(turns[0], turns[2]) else "never"

    def _shows(self, *turns: tuple[str, str]) -> bool:
        try:
            text = self._rendered([{"role": role, "content": said} for role, said in turns], add_generation_prompt=True)
        except BadRequest:
            return False
        return all(said in text for _, said in turns)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        context = {
            **self._tokens,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **kwargs,
        }
        try:
            return self._run(_plain(context))
        except BadRequest:
            raise
        except RecursionError:
            reason = "the template or the messages are nested too deep"
        except jinja2.TemplateError as error:
            reason = str(error.message or error)
        except Exception as error:  # not a narrower class, since a template can raise any Python exception
            reason = f"{type(error).__name__}: {error}"
        raise BadRequest(f"the chat template cannot render the messages: {reason}", param="messages", code="chat_template_error")

    def _run(self, context: dict[str, Any]) -> str:
        pieces, length = [], 0
        for piece in self._template.generate(context):
            length += len(piece)
            if length > MAX_OUTPUT:
                raise jinja2.TemplateError(f"its output exceeds {MAX_OUTPUT} characters")
            pieces.append(piece)
        return "".join(pieces)


_END = "7f3e9a51c0d24b86"  # is appended to a message that is to be continued, to find its end in the rendered text


def final_content(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message, which a reply is to continue."""
    last, at = messages[-1], f"messages[{len(messages) - 1}]"
    content = last.get("content")
    if last.get("role") != "assistant":
        raise BadParameter(f"{at}.role", 'must be "assistant" for a message that is continued')
    if last.get("tool_calls") or not isinstance(content, str):
        raise BadParameter(f"{at}.tool_calls", "a message with tool calls cannot be continued")
    return content


def render_to_end(
    messages: Sequence[Mapping[str, Any]], content: str, render: Callable[[Sequence[Mapping[str, Any]], bool], str]
) -> str:
    """Render messages up to the end of the last one's content, without what the template writes after it."""
    text, _, rest = render([*messages[:-1], {**messages[-1], "content": content + _END}], False).partition(_END)
    if _END in rest or not text.endswith(content.lstrip()):  # `lstrip`, since templates may strip white space before a content
        raise BadParameter(
            f"messages[{len(messages) - 1}].content", "cannot be continued: the chat template writes it differently"
        )
    return text


def _are_texts(*messages: Mapping[str, Any]) -> bool:
    return all(isinstance(message.get("content"), str) for message in messages)


def _default_source(found: Any) -> str | None:
    """Return the text of the template. If the configuration has several templates, it is the one named `default`."""
    if isinstance(found, list):
        found = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
    if isinstance(found, dict):
        found = found.get("default")
    return found if isinstance(found, str) else None


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under both names that templates use, `reasoning_content` and `thinking`."""
    reasoning = next(
        (message[name] for name in ("reasoning_content", "thinking", "reasoning") if message.get(name) is not None), None
    )
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Copy a value into plain JSON types, so that a template cannot reach the methods of any other object."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            raise BadRequest(
                f"a value of type {type(value).__name__} cannot be passed to the chat template; use JSON values",
                param="messages",
                code="chat_template_error",
            )


# ---------------------------------------------------------------------- Jinja environment


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with limits on the two operators whose result can be far larger than their operands."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int) and len(many) * times > MAX_REPEATED:
                    raise jinja2.exceptions.SecurityError(f"a repetition exceeds {MAX_REPEATED} elements")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_POWER_BITS:
            raise jinja2.exceptions.SecurityError(f"a power exceeds {MAX_POWER_BITS} bits")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """Allows `{% generation %} … {% endgeneration %}` in templates. The tag marks the assistant's text for training; for
    rendering it only begins a scope of variables."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares this attribute as a set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Dictionary:
    """The function `dict` for templates. Python's own type would allow an escape from the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """The function `namespace` for templates, which refuses attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` is taken from the arguments, as in jinja2, so that a template may call namespace(self=…).
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dictionary()
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, without the HTML escapes of jinja2's own version, which a model has not seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
