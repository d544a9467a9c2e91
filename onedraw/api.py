"""The Python API: `onedraw.load(model, …)` gives a Model that generates, streams, and closes.

In: a model's name and keyword settings; then prompts (text, chat messages or token ids) and keyword wishes. Out: Replies
and Pieces. It is the same door that the server and the command line use, with the same defaults from the checkpoint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from onedraw.door import Ask, Door, Reply
from onedraw.errors import BadRequest
from onedraw.settings import Settings
from onedraw.types import ModelCard, Piece
from onedraw.wishes import Wishes, settle, settle_chat

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]

DEFAULT_MAX_TOKENS = 256  # where the caller named none; less where the context has less room


def load(model: str = "smollm2", *, progress: Callable[[str], None] | None = None, **settings: Any) -> Model:
    """Load a model and start its engine. Settings are the serving flags: max_context=4096, dtype="f32", threads=2 …"""
    from onedraw.assemble import open_door

    return Model(open_door(Settings.of(model=model, **settings), progress))


class Model:
    """A running model. Owner: whoever loaded it, and closes it (or uses it in a `with`). Its methods are thread-safe."""

    def __init__(self, door: Door) -> None:
        self.door = door

    @property
    def card(self) -> ModelCard:
        """What is known of the model: family, vocabulary, context, sampling defaults, fingerprint."""
        return self.door.card

    def generate(self, prompt: Prompt, **wishes: Any) -> Reply | list[Reply]:
        """The whole reply; a list of them when n is over 1."""
        return _one_or_all(self.door.generate(self._ask(prompt, wishes)))

    def stream(self, prompt: Prompt, **wishes: Any) -> Iterator[Piece]:
        """The reply piece by piece; leaving the loop cancels the rest. A mistake raises here, not in the loop."""
        ask = self._ask(prompt, wishes)
        self.door.check(ask)
        return self.door.stream(ask)

    async def agenerate(self, prompt: Prompt, **wishes: Any) -> Reply | list[Reply]:
        return _one_or_all(await self.door.agenerate(self._ask(prompt, wishes)))

    def astream(self, prompt: Prompt, **wishes: Any) -> AsyncIterator[Piece]:
        ask = self._ask(prompt, wishes)
        self.door.check(ask)
        return self.door.astream(ask)

    def close(self) -> None:
        self.door.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, prompt: Prompt, wishes: Mapping[str, Any]) -> Ask:
        return settle_ask(self.door, prompt, Wishes.of(**wishes))


def settle_ask(door: Door, prompt: Prompt, wishes: Wishes, *, default_max_tokens: int = DEFAULT_MAX_TOKENS) -> Ask:
    """A text, chat messages or token ids → an Ask."""
    if is_chat(prompt):
        messages = [dict(item) for item in prompt]  # type: ignore[arg-type]
        return settle_chat(wishes, door=door, messages=messages, default_max_tokens=default_max_tokens)
    return settle(wishes, door=door, prompt=_ids(door, prompt), default_max_tokens=default_max_tokens)


def _ids(door: Door, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return door.encode(prompt)
    items = list(prompt)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return tuple(items)  # type: ignore[arg-type]
    raise BadRequest("a prompt is a text, a list of chat messages or a list of token ids", param="prompt")


def is_chat(prompt: Prompt) -> bool:
    """Chat messages, whose reply begins a text of its own."""
    return not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(item, Mapping) for item in prompt)


def _one_or_all(replies: list[Reply]) -> Reply | list[Reply]:
    return replies[0] if len(replies) == 1 else replies
