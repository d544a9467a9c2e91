"""Would the drafting policy have paid? Recorded acceptance and measured step costs, replayed through the real policy.

    python -m bench.policy_sim [--json]                 regret of the policy against the best fixed draft length
    python -m bench.policy_sim --record [MODEL]         record the traces anew, from the prompts in bench/prompts

A trace says, for every position of a reply, how many drafts of the model's own drafter and of n-grams would have been kept
there. Tokens never depend on drafts, so one run without verification gives the traces for every policy. A cost table gives the
seconds of a step by rows and tokens, and of the drafter by rows and drafted positions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onedraw.build.llm import build_llm
from onedraw.llm.request_options import RequestOptions, make_chat_generation
from onedraw.settings import Settings
from onedraw.speculation.proposers import NgramProposer
from onedraw.speculation.speculator import NO_PROPOSAL, Proposal, Speculator
from onedraw.types import Draft, History, Request

PROMPTS = Path(__file__).parent / "prompts"
TRACES = Path(__file__).parent / "acceptance_traces.json"
LENGTH = 7  # drafts per position in a trace


@dataclass(frozen=True, slots=True)
class Trace:
    """One reply: by position, how many drafts of each source would have been kept; -1 where the source had none."""

    kind: str
    name: str
    temperature: float
    kept: dict[str, list[int]]


class Recorder(Speculator):
    """Notes the drafts for every position and lets none be verified."""

    def __init__(self) -> None:
        super().__init__([NgramProposer()])
        self._ngrams = NgramProposer()
        self.seen: dict[str, dict[int, tuple[int, ...]]] = {}

    def propose(
        self,
        request: Request,
        history: History,
        own: tuple[Draft, ...],
        *,
        room: int,
        running: int,
        tentative: bool = False,
    ) -> Proposal:
        at = len(history.output)
        found = {"device": own, "ngram": self._ngrams.propose(request, history, LENGTH)}
        for source, drafts in found.items():
            self.seen.setdefault(source, {})[at] = tuple(draft.token for draft in drafts[:LENGTH])
        return NO_PROPOSAL


def record(model: str, temperatures: Sequence[float], new_tokens: int) -> list[Trace]:
    traces = []
    recorder = Recorder()
    with build_llm(Settings.of(model=model, max_batch=1, threads=1, self_check=False), speculator=recorder) as llm:
        for file in sorted(PROMPTS.glob("*.json")):
            kind, _, name = file.stem.partition("-")
            messages = json.loads(file.read_text(encoding="utf-8"))["messages"]
            for temperature in temperatures:
                recorder.seen.clear()
                options = RequestOptions(temperature=temperature, max_tokens=new_tokens, seed=7, ignore_eos=True)
                [reply] = llm.run(make_chat_generation(options, llm=llm, messages=messages))
                ids = tuple(token.token for token in reply.tokens)
                kept = {source: [_kept(drafts.get(at), ids[at:]) for at in range(len(ids))] for source, drafts in recorder.seen.items()}
                traces.append(Trace(kind, name, temperature, kept))
                means = {source: sum(max(k, 0) for k in found) / len(found) for source, found in kept.items()}
                print(kind, name, temperature, {s: round(m, 2) for s, m in means.items()}, file=sys.stderr, flush=True)
    return traces


def _kept(drafts: tuple[int, ...] | None, tokens: tuple[int, ...]) -> int:
    if not drafts:
        return -1
    return next((i for i, (a, b) in enumerate(zip(drafts, tokens, strict=False)) if a != b), min(len(drafts), len(tokens)))
