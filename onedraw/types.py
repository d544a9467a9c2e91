"""The frozen types that cross package borders, and the axis letters of shape comments. No torch, no text, no web.

Axes
    T  tokens of a step, all rows one after the other      C  positions at which a token is sampled
    V  vocabulary          H  query heads                  K  key/value heads
    G  query heads per key/value head (H // K)             D  head size
    E  hidden width        F  feed-forward width           P  pages     S  slots in a page

Glossary
    row      the work of one sequence in one step          plan     the rows of one step
    lane     a slot of per-sequence state                  page     memory for S key/value positions
    lease    what a sequence holds: lane, pages, checkpoint  draft    a proposed token, not yet verified
    position absolute index of a token, prompt included    outcome  the result of a step
    known    tokens of the prompt and sampled ones         computed positions whose state is committed
    piece    a part of a reply, as a client receives it    channel  content, reasoning or tool call
    constraint  restricts the tokens of a reply            call     a tool call in a reply
    group    layers with the same attention window         checkpoint  state and last logits of a prompt, in a slot
    caller   who sends requests: an API key or an address  choice   one of the n replies that a caller asks for
    host     the CPU program, as opposed to the device that runs the model
    commit   after a step, advance the state by the tokens that were kept
    chunk    number of prompt positions that recurrent layers compute at once; chunks begin at multiples of it
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from onedraw.errors import BadParameter

SEED_LIMIT = 2**53  # Seeds travel as JSON numbers, which many programs hold exactly only below this.
SEED_RANGE = 2**63  # A caller may give any signed 64-bit integer as the seed.
MAX_TOP_LOGPROBS = 128  # the limit on `logprobs`: how many of the most likely tokens are returned with each token
MAX_LOGPROB_TOKEN_IDS = 128  # the limit on `logprob_token_ids`: how many given tokens have logprobs at every sampled position
PENDING_TOKEN = -1  # stands in Row.tokens for a token that the previous step is still sampling; see Row.awaits_token

LogprobsMode = Literal["raw", "processed", "both"]
# The engine never sets "tool_calls": it does not see text. "moved": a pause ended the reply, which can be continued elsewhere.
Finish = Literal["stop", "length", "cancelled", "tool_calls", "moved"]
Channel = Literal["content", "reasoning", "tool"]
TokenMask = npt.NDArray[np.uint32]  # token i is allowed if bit i % 32 of word i // 32 is set; ids beyond the end are not allowed
EMPTY_MASK: TokenMask = np.zeros(0, dtype=np.uint32)  # the mask that allows no token


class Constraint(Protocol):
    """Restricts the tokens that may follow a reply, as a pure function of its output so far and the drafts after it.

    It may cache the state of a parser, so every request has a Constraint object of its own, used on one thread at a time.
    """

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        """Return the tokens that may follow the output and the drafts. None allows all tokens."""
        ...

    def legal(self, output: Sequence[int]) -> int:
        """Return how many leading tokens of an output that a caller sent were allowed one after the other."""
        ...


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """Describes a constraint as plain data, for example by the text of a grammar. `engine/client.py` has the Constraint object
    built from it. The engine itself never reads the content."""


LONGEST_REPETITION = 64  # DRY counts a longer repetition as one of this length, which bounds its work per token


@dataclass(frozen=True, slots=True)
class DryParams:
    """ "Don't repeat yourself": a penalty on the token that would extend a repetition.

    If the last n tokens also occur earlier in the history, followed by token x, and n >= allowed_length, the logit of x is
    reduced by multiplier * base ** (n - allowed_length). A repetition never extends across a breaker, such as a line break.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    range: int = 0  # number of last tokens that are searched for repetitions; 0 means all
    breakers: frozenset[int] = frozenset()  # tokens that end a repetition

    def __post_init__(self) -> None:
        _check("dry_multiplier", self.multiplier, low=0.0)
        _check("dry_base", self.base, low=1.0)
        _check("dry_allowed_length", self.allowed_length, low=1, high=LONGEST_REPETITION)
        _check("dry_range", self.range, low=0)


LARGEST = 1e9  # the limit on logit bias and repetition penalty; far below the largest float32, so scores stay finite


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything besides the logits and the history that affects sampling."""

    temperature: float = 1.0
    top_k: int = 0  # keep the k most likely tokens; 0 turns this filter off
    top_p: float = 1.0  # keep the most likely tokens that together have this probability; 1 turns this filter off
    min_p: float = 0.0  # keep tokens that are at least this share as likely as the best; 0 turns this filter off
    repetition_penalty: float = 1.0  # applies to tokens of the prompt and the output; 1 turns it off
    frequency_penalty: float = 0.0  # applies to tokens of the output only, per occurrence
    presence_penalty: float = 0.0  # applies to tokens of the output only, once
    dry: DryParams | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, number added to its logit); no token occurs twice
    seed: int = 0
    max_tokens: int = 16  # 0, to score the prompt and sample nothing, is only allowed with prompt_logprobs
    min_tokens: int = 0  # no stop id is sampled before the reply has this many tokens
    stop_ids: frozenset[int] = frozenset()  # tokens that end the reply; its token ids include the one that did
    bad_words: tuple[tuple[int, ...], ...] = ()  # banned token sequences: the last token is banned where the others precede it
    logprobs: int | None = None  # number of alternatives that are returned with each token's logprob; None: no logprobs
    logprobs_mode: LogprobsMode = "raw"
    logprob_token_ids: tuple[int, ...] = ()  # tokens whose logprobs are returned too, where `logprobs` is not None
    prompt_logprobs: int | None = None  # the same as `logprobs` for prompt tokens from the second on
    checksums: bool = False  # whether every sampled token has a checksum of its logits and scores

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
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            many = f"has {len(self.logprob_token_ids)} token ids, and at most {MAX_LOGPROB_TOKEN_IDS} are allowed"
            raise BadParameter("logprob_token_ids", many)
        for _, value in self.logit_bias:
            if not value <= LARGEST:
                raise BadParameter("logit_bias", f"must be a number of up to {LARGEST:g}, or -inf, not {value}")
        if any(not word for word in self.bad_words):
            raise BadParameter("bad_words", "has an empty word, which would ban everything; remove it")

    @property
    def greedy(self) -> bool:
        """Whether sampling uses no noise: temperature is 0, or top_k is 1 and leaves one token."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def may_ban_all(self) -> bool:
        """Whether these parameters may exclude every token. Only bans can (a bias of -inf, bad words, stop ids before
        min_tokens): filters always leave the most likely token."""
        return bool(self.logit_bias or self.bad_words or self.min_tokens)

    @property
    def counts_history(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


def _check(name: str, value: float, *, low: float, high: float = math.inf, open_low: bool = False) -> None:
    """Refuse NaN and values outside [low, high], or (low, high] with open_low. Integers may be arbitrarily large."""
    if value != value or value > high or value < low or (open_low and value == low):
        opening = "(" if open_low else "["
        bound = (
            f"in {opening}{_shown(low)}, {_shown(high)}]" if high != math.inf else f"{'>' if open_low else '>='} {_shown(low)}"
        )
        raise BadParameter(name, f"must be {bound}, not {_shown(value)}")


def _shown(value: float) -> str:
    """Return a number as text for an error message: in full if it is an integer that is not too long."""
    if not isinstance(value, int):
        return f"{value:g}"
    return str(value) if abs(value) < 2**64 else "a number of that size"


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that is continued once, as plain data that could be sent to another process. A call of the API for n choices
    makes n of them.

    `caller`, `parent` and `background` decide which request goes first when requests wait for a lane (see `engine/fairness.py`).
    They do not affect the sampled tokens.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    # Tokens with which the reply begins, generated earlier; later tokens are sampled as if these had been sampled here.
    given: tuple[int, ...] = ()
    # First tokens of the reply, including `given`: each is taken as sampled, whatever the noise, to get its logprob.
    forced: tuple[int, ...] = ()
    predicted: tuple[int, ...] = ()  # the reply that the caller expects; used as drafts, which are verified like any others
    speculate: bool = True  # whether drafts may be used for this request
    constraint: ConstraintSpec | None = None  # a response format, a thinking budget, or both
    caller: str = ""  # the name of an API key, or a client address; empty for callers of the library
    parent: str = ""  # an id that all choices of one API call share; empty if there is only one choice
    background: bool = False  # whether all other requests go first; true for a line of a batch


@dataclass(slots=True)
class History:
    """The prompt and output tokens of a sequence, to which the sequence appends on the engine's thread.

    A backend may read them while it computes a step (between `submit` and `collect`), because they do not change then.
    """

    prompt: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    constraint: Constraint | None = None  # restricts the next token, given `output`
    forced: tuple[int, ...] = ()  # the output that the request forces, from its first token on; it may be longer than `output`

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def forced_at(self, drafts: int) -> int | None:
        """Return the token that is forced after `output` and that many drafts; None if one is sampled there."""
        index = len(self.output) + drafts
        return self.forced[index] if index < len(self.forced) else None

    def slice(self, start: int, stop: int) -> list[int]:
        """Return the tokens at absolute positions [start, stop)."""
        edge = len(self.prompt)
        if stop <= edge:
            return list(self.prompt[start:stop])
        if start >= edge:
            return self.output[start - edge : stop - edge]
        return [*self.prompt[start:], *self.output[: stop - edge]]


class Draft(NamedTuple):
    """A drafted token. `parent` is the index of the draft that it follows, or -1 for the row's last known token."""

    token: int
    parent: int


@dataclass(frozen=True, slots=True)
class PageCopy:
    """An order to copy KV page `source` to the sequence's own page `target` before its row runs. The source is a partly filled
    page of a cached prefix, to which another sequence may still write."""

    group: int  # index of the group of layers whose page is copied
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class CheckpointSave:
    """An order to save the recurrent state after positions [0, position) in checkpoint slot `slot`, while a row runs.

    `position` is a multiple of the chunk, or the prompt's end. At the prompt's end the logits of the last position are saved as
    well, if the row samples.
    """

    position: int
    slot: int


MAX_DRAFTS = 64  # the most drafts that one row can carry


@dataclass(frozen=True, slots=True)
class Row:
    """The work of one sequence in one step: known tokens at positions [start, stop), then drafts.

    Before the row runs, the backend makes `copies` and loads the state of checkpoint slot `restore`, if given, into the lane. A
    row without tokens has its whole prompt from a checkpoint: no layer runs, and the saved logits are sampled from.
    """

    request_id: str
    lane: int  # slot of the sequence's state on the device
    # For each group, entry i is the page of positions [i * page_size, (i + 1) * page_size), or -1 if a sliding window has moved
    # beyond it. The positions of the drafts have pages too.
    pages: tuple[Sequence[int], ...]
    start: int
    tokens: tuple[int, ...]  # the known tokens at positions [start, start + len(tokens))
    drafts: tuple[Draft, ...]
    prompt_stop: int  # Positions below it belong to the prompt: recurrent layers compute them in chunks, later ones one by one.
    samples: bool  # whether the row reaches the end of the known tokens, so that a token is sampled
    params: SamplingParams
    history: History
    scores_prompt: bool = False  # return the logprobs of prompt tokens at [start + 1, min(stop + 1, prompt_stop))
    restore: int | None = None  # checkpoint slot whose state is loaded first
    copies: tuple[PageCopy, ...] = ()
    saves: tuple[CheckpointSave, ...] = ()  # checkpoints to save, by position within (start, stop]
    # Whether the row's only token is still being sampled by the previous step. `tokens` has PENDING_TOKEN in its place then, and
    # the history lacks it.
    awaits_token: bool = False
    draft_limit: int = MAX_DRAFTS  # the backend's own drafter makes at most this many drafts for the sequence's next row; 0: none

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def samples_by_history(self) -> bool:
        """Whether the host must know all earlier tokens before it can prepare sampling, as a constraint, DRY and bad words
        require."""
        return self.history.constraint is not None or self.params.dry is not None or bool(self.params.bad_words)


@dataclass(frozen=True, slots=True)
class Plan:
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logprob of a token, of the most likely tokens at its position, the best first, and of the tokens that the request asks
    for by id, in its order. With the mode "both" these are raw, and `processed` and `mass` are set."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    processed: float | None = None  # the token's logprob in the distribution that is sampled from; -inf if a filter excludes it
    # The share of the probability that min-p, top-k and top-p left, after bias, penalties, bans and temperature.
    mass: float | None = None
    asked: tuple[tuple[int, float], ...] = ()  # -inf if a filter or a ban excludes the token and the mode is "processed"

    @property
    def alternatives(self) -> tuple[tuple[int, float], ...]:
        """The most likely tokens, then those asked for that are not among them. No token occurs twice."""
        return tuple(dict((*self.top, *self.asked)).items()) if self.asked else self.top


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token. `==` ignores `kept` and `rejected`, so that the result of a run with drafts equals that of one without."""

    token: int
    logprobs: Logprobs | None = None
    checksum: int | None = None
    kept: bool = field(default=False, compare=False)  # whether this token was a draft that was kept
    rejected: int = field(default=0, compare=False)  # number of rejected drafts of its row; only on the row's last token


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """The result of a row: the kept drafts, then one new token. A row that does not sample has no tokens."""

    sampled: tuple[SampledToken, ...] = ()
    scored: tuple[Logprobs, ...] = ()  # logprobs of prompt tokens, see Row.scores_prompt
    kept: tuple[int, ...] = ()  # indices of the kept drafts, which are all tokens of `sampled` but the last
    next_drafts: tuple[Draft, ...] = ()  # drafts for the next row, from a drafter on the device
    no_token_left: bool = False  # whether no token is allowed at the position after `sampled`
    fault: str = ""  # why no token is left, if not because of the sampling parameters: the logits were not finite


@dataclass(frozen=True, slots=True)
class Outcome:
    rows: tuple[RowOutcome, ...]
    seconds: float = 0.0  # duration of the step, without the backend's own drafter
    drafter_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a reply, and how long it waited. Tokens of `Request.given` are in none of the counts, so that the counts of
    a reply's tokens and those of its continuation add up."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0  # prompt tokens that came from the prefix cache
    kept: int = 0  # drafts that were kept
    rejected: int = 0  # drafts that were rejected
    reasoning: int = 0  # tokens of `completion` that are reasoning, including its markers
    queued: float = field(default=0.0, compare=False)  # seconds that the request waited in the engine's queue


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in a reply: its index among the calls, the id to which its result will refer, and the tool's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ReplyToken(SampledToken):
    """A sampled token with its text. `offset` is the index of its first character in the text of all tokens of the reply."""

    text: str = field(default="", compare=False)  # the characters that this token completes
    offset: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reply as a client receives it: text that is final, with token ids, logprobs and checksums.

    A token may come in an earlier piece than its text (which may wait to complete a character or a stop string), but never in a
    later one. Only the last piece has a finish reason and usage.
    """

    index: int = 0  # index of the choice
    channel: Channel = "content"
    text: str = ""
    tokens: tuple[ReplyToken, ...] = ()
    finish: Finish | None = None
    stop_reason: str | int | None = None  # the stop string or stop id that ended the reply
    usage: Usage | None = None
    prompt_logprobs: tuple[Logprobs, ...] | None = None  # set on the first piece, if requested
    call: Call | None = None  # set on channel "tool": `text` is a part of this call's JSON arguments


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The public properties of the served model."""

    name: str
    family: str
    vocab: int
    max_context: int
    eos_ids: tuple[int, ...]
    defaults: Mapping[str, float | int]  # sampling values that the model's authors recommend
    fingerprint: str
    created: int = 0  # Unix time
    dtype: str = "f32"
    device: str = "cpu"
