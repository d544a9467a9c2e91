"""A generation: one prompt to be continued, as data.

Every interface builds one (`options.py`), the LLM turns it into requests of the engine, and records keep it on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onedraw.sampling.noise import child_seed
from onedraw.text.constraints.response_format import ReplyFormat
from onedraw.text.reply_parser import PLAIN_TEXT, ReplySyntax
from onedraw.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt to be continued `n` times. Records hold it by its field names, or by their `key`.

    `params.seed` is the seed of choice 0; the other choices get seeds that are hashed from it.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    n: int = 1
    skip_special: bool = True  # leave special tokens out of the text
    syntax: ReplySyntax = field(default=PLAIN_TEXT, metadata={"key": "reading"})  # how the reply's text is parsed
    thinking_budget: int | None = None  # tokens of reasoning before it is closed
    response_format: ReplyFormat | None = field(default=None, metadata={"key": "guide"})
    origin: str = ""  # hash of the prompt's text, where the reply may call tools and is to be cached
    predicted: tuple[int, ...] = ()  # the reply that the caller expects: drafted, never trusted
    speculate: bool = True  # may be drafted
    label: str = ""  # becomes part of the request ids

    def seed_of(self, choice: int) -> int:
        return child_seed(self.params.seed, choice)
