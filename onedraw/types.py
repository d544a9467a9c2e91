"""The frozen nouns that cross package borders, and the axis glossary.

In: nothing. Out: the types every other package speaks. No torch, no text, no web.

Axes, used in shape comments everywhere
    T  tokens of a turn, all rows one after the other      C  positions at which a token is chosen
    V  vocabulary          H  query heads                  K  key/value heads
    G  query heads per key/value head (H // K)             D  head size
    E  hidden width        F  feed-forward width           P  pages     S  slots in a page

Glossary
    row      what one sequence does in one turn            plan     the rows of one turn
    lane     a slot of per-sequence state                  page     a slot of S key/value positions
    lease    what a sequence holds of lanes and pages      draft    a guessed token, not yet chosen
    position absolute index of a token, the prompt counts  outcome  what a turn chose
    known    tokens that are settled: prompt and chosen    computed positions whose state is settled
    piece    what a client sees of a reply                 channel  which part of a reply a piece is
    constraint  what a reply may go on with               call     a tool call in a reply
    group    layers that keep the same positions in pages  checkpoint  state and last logits of a prompt, in a slot
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from onedraw.errors import BadParameter

SEED_LIMIT = 2**53  # seeds travel through JSON numbers, which are exact below this
MAX_TOP_LOGPROBS = 128
PENDING_TOKEN = -1  # stands for the token of a row that awaits it

LogprobsMode = Literal["raw", "processed"]
Finish = Literal["stop", "length", "cancelled", "tool_calls"]  # the last one only the text layer can tell
Channel = Literal["content", "reasoning", "tool"]
TokenMask = npt.NDArray[np.uint32]  # a set of tokens: token i is bit i % 32 of word i // 32; ids past the end are not in it
EMPTY_MASK: TokenMask = np.zeros(0, dtype=np.uint32)  # the set of none


class Constraint(Protocol):
    """What a reply may go on with: a pure function of what it has said so far, drafts that are only supposed included.

    It may remember its last walk to save time, so every request has one of its own. Used on one thread at a time.
    """

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        """The tokens that may stand behind output and drafts; None: all of them."""
        ...


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """What constrains a reply, as data: a grammar is its text. The service builds the live Constraint from it; the engine does
    not look inside."""


@dataclass(frozen=True, slots=True)
class DryParams:
    """ "Don't repeat yourself": a penalty on the token that would extend a repetition.

    If the last n tokens also stand earlier in the history and were followed there by token x, and
    n >= allowed_length, x loses multiplier * base ** (n - allowed_length). Matches never cross a breaker.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    range: int = 0  # how many of the last tokens are searched; 0: all of them
    breakers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        _check("dry_multiplier", self.multiplier, low=0.0)
        _check("dry_base", self.base, low=1.0)
        _check("dry_allowed_length", self.allowed_length, low=1)
        _check("dry_range", self.range, low=0)


LARGEST = 1e9  # of what is added to a logit, and of what it is multiplied with: float32 has room for both


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything that shapes the choice of a token, besides the logits and the history."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # over output
    presence_penalty: float = 0.0  # over output
    dry: DryParams | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added), tokens distinct
    seed: int = 0
    max_tokens: int = 16  # 0 only with prompt_logprobs: score the prompt, choose nothing
    min_tokens: int = 0  # before these many, no stop id may be chosen
    stop_ids: frozenset[int] = frozenset()  # a chosen one ends the reply; it belongs to the ids
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that may not be completed
    logprobs: int | None = None  # how many alternatives beside the chosen; None: no logprobs
    logprobs_mode: LogprobsMode = "raw"
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    checksums: bool = False  # a checksum of logits and scores with every chosen token

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, low=0.0, high=100.0)
        _check("top_k", self.top_k, low=0)
        _check("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _check("min_p", self.min_p, low=0.0, high=1.0)
        _check("repetition_penalty", self.repetition_penalty, low=1 / LARGEST, high=LARGEST)
        _check("frequency_penalty", self.frequency_penalty, low=-100.0, high=100.0)
        _check("presence_penalty", self.presence_penalty, low=-100.0, high=100.0)
        _check("seed", self.seed, low=0, high=SEED_LIMIT - 1)
        _check("max_tokens", self.max_tokens, low=1 if self.prompt_logprobs is None else 0)
        _check("min_tokens", self.min_tokens, low=0, high=max(self.max_tokens, 0))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), low=0, high=MAX_TOP_LOGPROBS)
        for _, value in self.logit_bias:
            if not value <= LARGEST:
                raise BadParameter("logit_bias", f"must be a number of up to {LARGEST:g}, or -inf, not {value}")
        if any(not word for word in self.bad_words):
            raise BadParameter("bad_words", "an empty word would ban everything")

    @property
    def greedy(self) -> bool:
        """No noise: temperature 0, or a top_k of 1, which leaves nothing to draw."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def may_ban_all(self) -> bool:
        """Whether bans may leave nothing to choose. Without any, filters leave the likeliest token, if there is one."""
        return bool(self.logit_bias or self.bad_words or self.min_tokens)

    @property
    def counts_history(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


def _check(name: str, value: float, *, low: float, high: float = math.inf, open_low: bool = False) -> None:
    """Refuse NaN and what lies outside [low, high] ((low, high] when open_low). Python's whole numbers may be of any size."""
    if value != value or value > high or value < low or (open_low and value == low):
        opening = "(" if open_low else "["
        bound = (
            f"in {opening}{_shown(low)}, {_shown(high)}]" if high != math.inf else f"{'>' if open_low else '>='} {_shown(low)}"
        )
        raise BadParameter(name, f"must be {bound}, not {_shown(value)}")


def _shown(value: float) -> str:
    """Whole numbers in full."""
    if not isinstance(value, int):
        return f"{value:g}"
    return str(value) if abs(value) < 2**64 else "a number of that size"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued once. Several choices or prompts are several requests."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    predicted: tuple[int, ...] = ()  # what the caller expects the reply to be; drafted, never trusted
    speculate: bool = True  # may carry drafts
    constraint: ConstraintSpec | None = None  # a response format, a thinking budget


@dataclass(slots=True)
class History:
    """The tokens a choice may look back on. Owner: the sequence, on the engine thread.

    A backend reads it between submit and collect, when it does not change. `output` and the counts grow together.
    """

    prompt: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    constraint: Constraint | None = None  # bans made from `output`

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def slice(self, start: int, stop: int) -> list[int]:
        """Tokens at absolute positions [start, stop)."""
        edge = len(self.prompt)
        if stop <= edge:
            return list(self.prompt[start:stop])
        if start >= edge:
            return self.output[start - edge : stop - edge]
        return [*self.prompt[start:], *self.output[: stop - edge]]


class Draft(NamedTuple):
    """A guessed token; `parent` is the index of the draft it follows, -1 for the row's last known token."""

    token: int
    parent: int


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A page whose content another sequence goes on writing to, copied to a page of one's own before the row runs."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class CheckpointSave:
    """Keep in `slot` the state that holds after positions [0, position): a multiple of the chunk, or the prompt's end.

    At the prompt's end, where the row chooses, the logits of the last position are kept with it.
    """

    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class Row:
    """What one sequence does in one turn: known tokens [start, stop), then drafts.

    Before it runs, `copies` are made and the lane takes the state of checkpoint `restore`, where given. A row without
    tokens has the whole prompt from a checkpoint: it chooses from the logits kept there and runs nothing.
    """

    request_id: str
    lane: int
    pages: tuple[Sequence[int], ...]  # per group, page of position p: [p // page_size]; covers stop + drafts; -1: let go
    start: int
    tokens: tuple[int, ...]  # known tokens at [start, start + len(tokens))
    drafts: tuple[Draft, ...]
    prompt_stop: int  # positions before it are prompt; from it on the step form holds
    samples: bool  # the row reaches the end of the known tokens
    params: SamplingParams
    history: History
    scores_prompt: bool = False  # give the logprobs of prompt tokens at [start + 1, min(stop + 1, prompt_stop))
    restore: int | None = None  # a checkpoint's slot
    copies: tuple[PageCopy, ...] = ()
    saves: tuple[CheckpointSave, ...] = ()  # in order of position, within (start, stop]
    awaits_token: bool = (
        False  # its one token is what the sequence's row under way chooses: PENDING_TOKEN here, and not in the history yet
    )

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logprob of one token and of the likeliest at its position, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One chosen token. How it came is no part of what it is: runs that chose alike are equal, drafts or none."""

    token: int
    logprobs: Logprobs | None = None
    checksum: int | None = None
    kept: bool = field(default=False, compare=False)  # a draft had guessed it
    rejected: int = field(default=0, compare=False)  # drafts of its row that were thrown away, on the row's last choice


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What a row gave: kept drafts, then one new token; nothing chosen for a middle chunk."""

    sampled: tuple[SampledToken, ...] = ()
    scored: tuple[Logprobs, ...] = ()  # see Row.scores_prompt
    kept: tuple[int, ...] = ()  # which drafts they are, all but the last of `chosen`
    next_drafts: tuple[Draft, ...] = ()  # the backend's own drafts for the row after this one
    no_token_left: bool = False  # the law left no token at the position after `chosen`
    fault: str = ""  # what made it barren, where it was not the law


@dataclass(frozen=True, slots=True)
class Outcome:
    rows: tuple[RowOutcome, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a reply cost, and where they came from."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0  # prompt tokens taken from the prefix cache
    kept: int = 0  # drafts kept
    rejected: int = 0  # drafts rejected
    reasoning: int = 0  # of `completion`, tokens of reasoning, its markers included


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in a reply: which one of it, and by what name its result will come back."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ReplyToken(SampledToken):
    """A sampled token with its text. `offset` is where the text begins in the text of all tokens of the reply."""

    text: str = field(default="", compare=False)  # the characters that the token completes
    offset: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a client sees: text that is final, and the ids, logprobs and checksums behind it.

    Ids may run ahead of text (half a character, a possible stop string) within one piece stream, never the
    other way round. The last piece has a finish, and only it has usage.
    """

    index: int = 0  # which choice
    channel: Channel = "content"
    text: str = ""
    tokens: tuple[ReplyToken, ...] = ()
    finish: Finish | None = None
    stop_reason: str | int | None = None  # the stop string or stop id that ended the reply
    usage: Usage | None = None
    prompt_logprobs: tuple[Logprobs, ...] | None = None  # on the first piece, when asked for
    call: Call | None = None  # on the channel "tool": whose arguments `text` is a part of, as JSON


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a client may know of the served model."""

    name: str
    family: str
    vocab: int
    max_context: int
    eos_ids: tuple[int, ...]
    defaults: Mapping[str, float | int]  # sampling values of the checkpoint's generation_config
    fingerprint: str
    created: int = 0
    dtype: str = "f32"
    device: str = "cpu"
