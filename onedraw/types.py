"""The frozen types that cross package borders, and the axis letters of shape comments. No torch, no text, no web.

Axes
    T  tokens of a step, all rows one after the other      C  positions at which a token is sampled
    V  vocabulary          H  query heads                  K  key/value heads
    G  query heads per key/value head (H // K)             D  head size
    E  hidden width        F  feed-forward width           P  pages     S  slots in a page

Glossary
    row      the work of one sequence in one step          plan     the rows of one step
    lane     a slot of per-sequence state                  page     memory for S key/value positions
    lease    lane, pages and slots held by a sequence      draft    a proposed token, not yet verified
    position absolute index of a token, prompt included    outcome  the result of a step
    known    tokens of the prompt and sampled ones         computed positions whose state is committed
    piece    a part of a reply, as a client receives it    channel  content, reasoning or tool call
    constraint  restricts the tokens of a reply            call     a tool call in a reply
    group    layers with the same attention window         checkpoint  state and last logits of a prompt, in a slot
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
PENDING_TOKEN = -1  # placeholder for the token of a row with `awaits_token`

LogprobsMode = Literal["raw", "processed"]
Finish = Literal["stop", "length", "cancelled", "tool_calls"]  # "tool_calls" is set by the text layer only
Channel = Literal["content", "reasoning", "tool"]
TokenMask = npt.NDArray[np.uint32]  # token i is bit i % 32 of word i // 32; ids past the end are not allowed
EMPTY_MASK: TokenMask = np.zeros(0, dtype=np.uint32)  # allows no token


class Constraint(Protocol):
    """The tokens that may follow a reply: a pure function of its output so far and the drafts after it.

    It may cache parser state, so every request has its own. Used on one thread at a time.
    """

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        """The tokens that may follow output and drafts; None: all tokens."""
        ...


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """What constrains a reply, as data: a grammar is its text. The service builds the live Constraint from it; the engine does
    not look inside."""


@dataclass(frozen=True, slots=True)
class DryParams:
    """ "Don't repeat yourself": a penalty on the token that would extend a repetition.

    If the last n tokens also occur earlier in the history, followed by token x, and n >= allowed_length, the logit of x is
    reduced by multiplier * base ** (n - allowed_length). Matches never cross a breaker.
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


LARGEST = 1e9  # limit of logit bias and of repetition penalty, well within float32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything that affects sampling besides the logits and the history."""

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
    max_tokens: int = 16  # 0 only with prompt_logprobs: score the prompt, sample nothing
    min_tokens: int = 0  # no stop id is sampled before this many tokens
    stop_ids: frozenset[int] = frozenset()  # sampling one ends the reply; it is part of the reply's ids
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that may not be completed
    logprobs: int | None = None  # number of alternatives beside the sampled token; None: no logprobs
    logprobs_mode: LogprobsMode = "raw"
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    checksums: bool = False  # a checksum of logits and scores with every sampled token

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
        """No noise: temperature 0, or top_k 1, which leaves one token."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def may_ban_all(self) -> bool:
        """Whether bans may leave no token. Without bans, the filters always leave the most likely token."""
        return bool(self.logit_bias or self.bad_words or self.min_tokens)

    @property
    def counts_history(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


def _check(name: str, value: float, *, low: float, high: float = math.inf, open_low: bool = False) -> None:
    """Refuse NaN and values outside [low, high] ((low, high] with open_low). Integers may be of any size."""
    if value != value or value > high or value < low or (open_low and value == low):
        opening = "(" if open_low else "["
        bound = (
            f"in {opening}{_shown(low)}, {_shown(high)}]" if high != math.inf else f"{'>' if open_low else '>='} {_shown(low)}"
        )
        raise BadParameter(name, f"must be {bound}, not {_shown(value)}")


def _shown(value: float) -> str:
    """Integers in full, unless they are huge."""
    if not isinstance(value, int):
        return f"{value:g}"
    return str(value) if abs(value) < 2**64 else "a number of that size"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued once: plain data, which can cross a process border. Several choices are several requests."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    predicted: tuple[int, ...] = ()  # the reply that the caller expects, used as drafts
    speculate: bool = True  # may carry drafts
    constraint: ConstraintSpec | None = None  # a response format, a thinking budget


@dataclass(slots=True)
class History:
    """Prompt and output tokens of a sequence. Owner: the sequence, on the engine thread.

    A backend reads it between submit and collect, when it does not change.
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
    """A draft token; `parent` is the index of the draft it follows, -1 for the row's last known token."""

    token: int
    parent: int


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy a page, which another sequence may still write to, to an own page before the row runs."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class CheckpointSave:
    """Save in `slot` the state after positions [0, position): a multiple of the chunk, or the prompt's end.

    At the prompt's end, if the row samples, the logits of the last position are saved too.
    """

    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class Row:
    """The work of one sequence in one step: known tokens [start, stop), then drafts.

    Before it runs, `copies` are made and the state of checkpoint slot `restore`, if given, is loaded into the lane. A row
    without tokens has its whole prompt from a checkpoint: it runs no layer and samples from the saved logits.
    """

    request_id: str
    lane: int
    pages: tuple[Sequence[int], ...]  # per group, page of position p: [p // page_size]; covers stop + drafts; -1: freed
    start: int
    tokens: tuple[int, ...]  # known tokens at [start, start + len(tokens))
    drafts: tuple[Draft, ...]
    prompt_stop: int  # positions before it are prompt (chunked form), later ones are generated (recurrent form)
    samples: bool  # the row reaches the end of the known tokens
    params: SamplingParams
    history: History
    scores_prompt: bool = False  # return logprobs of prompt tokens at [start + 1, min(stop + 1, prompt_stop))
    restore: int | None = None  # checkpoint slot to load
    copies: tuple[PageCopy, ...] = ()
    saves: tuple[CheckpointSave, ...] = ()  # in order of position, within (start, stop]
    awaits_token: bool = False  # its one token is sampled by the sequence's row in flight: PENDING_TOKEN, not in the history yet

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logprob of one token and of the most likely ones at its position, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token. `kept` and `rejected` do not compare: a run with drafts equals one without."""

    token: int
    logprobs: Logprobs | None = None
    checksum: int | None = None
    kept: bool = field(default=False, compare=False)  # it was drafted
    rejected: int = field(default=0, compare=False)  # rejected drafts of its row, on the row's last token


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """The result of a row: kept drafts, then one new token; no token for a middle chunk."""

    sampled: tuple[SampledToken, ...] = ()
    scored: tuple[Logprobs, ...] = ()  # see Row.scores_prompt
    kept: tuple[int, ...] = ()  # indices of the kept drafts: all but the last of `sampled`
    next_drafts: tuple[Draft, ...] = ()  # drafts of the backend's own drafter for the next row
    no_token_left: bool = False  # no token is allowed at the position after `sampled`
    fault: str = ""  # the cause of `no_token_left`, if it was not the sampling rule


@dataclass(frozen=True, slots=True)
class Outcome:
    rows: tuple[RowOutcome, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a reply."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0  # prompt tokens taken from the prefix cache
    kept: int = 0  # drafts kept
    rejected: int = 0  # drafts rejected
    reasoning: int = 0  # reasoning tokens within `completion`, markers included


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in a reply: its index there, the id that its result will refer to, and the tool's name."""

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
    """A part of a reply as a client receives it: final text, with its ids, logprobs and checksums.

    Ids may come before their text (an incomplete character, a possible stop string), never after it. Only the last piece has
    a finish and usage.
    """

    index: int = 0  # which choice
    channel: Channel = "content"
    text: str = ""
    tokens: tuple[ReplyToken, ...] = ()
    finish: Finish | None = None
    stop_reason: str | int | None = None  # the stop string or stop id that ended the reply
    usage: Usage | None = None
    prompt_logprobs: tuple[Logprobs, ...] | None = None  # on the first piece, if requested
    call: Call | None = None  # on channel "tool": `text` is a part of this call's JSON arguments


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The public properties of the served model."""

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
