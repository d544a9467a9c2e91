"""Measure in the real engine how many tokens a step gives with a drafter: tokens per step, with a confidence interval.

In: an LLM with its drafter, and generations. Out: a TokensPerStep. The tokens do not depend on the drafter; the number of steps
does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onedraw.errors import BadRequest, BadSetting
from onedraw.llm.llm import LLM
from onedraw.llm.reply_stream import Generation
from onedraw.llm.request_options import NEUTRAL_SAMPLING, RequestOptions, generation_for
from onedraw.training.data import NamedPrompt

RESAMPLES = 1000  # number of bootstrap samples of the replies, for the confidence interval


@dataclass(frozen=True, slots=True)
class ReplyCount:
    """One reply: its token ids, and which of them were drafts that were kept."""

    ids: tuple[int, ...]
    kept: tuple[bool, ...]

    @property
    def steps(self) -> int:
        """Decode steps: each ends with a token that is not a draft, or with the reply. The first token comes from the prompt's
        step, which has no drafts."""
        return sum(not kept for kept in self.kept[1:-1]) + (len(self.kept) > 1)


@dataclass(frozen=True, slots=True)
class TokensPerStep:
    """Tokens per decode step over all replies, and the bounds of its 95 % confidence interval (bootstrap over replies)."""

    replies: int
    tokens: int
    mean: float
    low: float
    high: float


def run_counted(
    llm: LLM, generations: Sequence[Generation], *, at_once: int, notify: Callable[[str], None] = lambda line: None
) -> list[ReplyCount]:
    """Generate replies, `at_once` at a time, and count their kept drafts."""

    async def every() -> list[ReplyCount]:
        slots, done = asyncio.Semaphore(at_once), 0

        async def one(generation: Generation) -> ReplyCount:
            nonlocal done
            async with slots:
                [reply] = await llm.arun(replace(generation, n=1))
            done += 1
            notify(f"measured {done} of {len(generations)} replies")
            return ReplyCount(tuple(reply.token_ids), tuple(token.kept for token in reply.tokens))

        return list(await asyncio.gather(*(one(generation) for generation in generations)))

    return asyncio.run(every())


def prompt_generations(
    llm: LLM, prompts: Sequence[NamedPrompt], *, temperature: float, new_tokens: int, speculate: bool = True
) -> dict[str, list[Generation]]:
    """Requests for replies to prompts, by kind, with neutral sampling. The seed of a request is the number of its prompt."""
    found: dict[str, list[Generation]] = {}
    for seed, named in enumerate(prompts):
        wanted: dict[str, Any] = {**NEUTRAL_SAMPLING, "temperature": temperature, "max_tokens": new_tokens, "seed": seed}
        try:
            generation = generation_for(llm, named.prompt, RequestOptions.of(**wanted, speculation=speculate))
        except BadRequest as error:
            raise BadSetting(f"prompt {seed + 1} cannot be used: {error}") from None
        found.setdefault(named.kind, []).append(replace(generation, label="measured"))
    return found


def acceptance(counts: Sequence[ReplyCount], *, seed: int = 0) -> TokensPerStep:
    """Sum up the replies of at least two tokens. Without any, a step counts as one token."""
    counted = [(len(count.ids) - 1, count.steps) for count in counts if len(count.ids) > 1]
    if not counted:
        return TokensPerStep(0, 0, 1.0, 1.0, 1.0)
    draw = random.Random(seed)
    resampled = sorted(_rate(draw.choices(counted, k=len(counted))) for _ in range(RESAMPLES))
    low, high = resampled[RESAMPLES // 40], resampled[-RESAMPLES // 40 - 1]
    return TokensPerStep(len(counted), sum(tokens for tokens, _ in counted), _rate(counted), low, high)


def _rate(counted: Sequence[tuple[int, int]]) -> float:
    return sum(tokens for tokens, _ in counted) / max(sum(steps for _, steps in counted), 1)
