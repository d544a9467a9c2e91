"""Replay recorded acceptance and measured step costs through the drafting policy, and compare it with every fixed draft length.

    python -m bench.policy_sim [--json]                 regret of the policy against the best fixed draft length
    python -m bench.policy_sim --record [MODEL]         record the traces anew, from the prompts in bench/prompts

A trace says, for every position of a reply, how many drafts of the model's own drafter and of n-grams would have been kept
there. Tokens never depend on drafts, so one run without verification gives the traces for every policy. A cost table gives the
seconds of a step by rows and tokens, and of the drafter by rows, drafted positions and positions it catches up with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from onedraw.build.llm import build_llm
from onedraw.cli.terminal import table
from onedraw.llm.request_options import RequestOptions, make_chat_generation
from onedraw.settings import Settings
from onedraw.speculation.draft_length import RowCost
from onedraw.speculation.proposers import NO_PROPOSAL, NgramProposer, Proposal, chain
from onedraw.speculation.speculator import Speculator
from onedraw.types import Draft, History, Request, SamplingParams

PROMPTS = Path(__file__).parent / "prompts"
TRACES = Path(__file__).parent / "acceptance_traces.json"
LENGTH = 7  # drafts per position in a trace


@dataclass(frozen=True, slots=True)
class Trace:
    """One reply: by position, how many drafts of each source would have been kept, -1 where the source had none, and the match
    of the n-gram drafts."""

    kind: str
    name: str
    temperature: float
    kept: dict[str, list[int]]
    match: list[int]


class Recorder(Speculator):
    """Notes the drafts for every position and lets none be verified."""

    def __init__(self) -> None:
        super().__init__(draft_tokens=LENGTH)  # so that the drafter runs in every step
        self._ngrams = NgramProposer()
        self.seen: dict[str, dict[int, tuple[int, ...]]] = {}
        self.match: dict[int, int] = {}

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
        copied = self._ngrams.propose(request, history, LENGTH)
        self.match[at] = copied.match
        for source, drafts in (("device", own), ("ngram", copied.drafts)):
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
                recorder.match.clear()
                options = RequestOptions(temperature=temperature, max_tokens=new_tokens, seed=7, ignore_eos=True)
                [reply] = llm.run(make_chat_generation(options, llm=llm, messages=messages))
                ids = tuple(token.token for token in reply.tokens)
                kept = {
                    source: [_kept(drafts.get(at), ids[at:]) for at in range(len(ids))]
                    for source, drafts in recorder.seen.items()
                }
                traces.append(Trace(kind, name, temperature, kept, [recorder.match.get(at, 0) for at in range(len(ids))]))
                means = {source: sum(max(k, 0) for k in found) / len(found) for source, found in kept.items()}
                print(kind, name, temperature, {s: round(m, 2) for s, m in means.items()}, file=sys.stderr, flush=True)
    return traces


def _kept(drafts: tuple[int, ...] | None, tokens: tuple[int, ...]) -> int:
    if not drafts:
        return -1
    return next((i for i, (a, b) in enumerate(zip(drafts, tokens, strict=False)) if a != b), min(len(drafts), len(tokens)))


# ---------------------------------------------------------------------- simulation


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of a step by rows and tokens, and of the drafter by rows and drafted positions."""

    name: str
    step: RowCost
    drafter: RowCost
    catch_up: float  # seconds per position that the drafter reads late, because it did not run in that step

    def step_seconds(self, *, tokens: int, rows: int) -> float:
        return self.step.base_seconds + self.step.row_seconds * rows + self.step.token_seconds * tokens

    def drafter_seconds(self, *, drafted: int, rows: int, behind: int) -> float:
        call = self.drafter.base_seconds + self.drafter.row_seconds * rows + self.drafter.token_seconds * drafted
        return call + self.catch_up * behind


MACHINES = (
    Machine("2 CPU cores, packed", RowCost(4.6e-3, 0.42e-3, 0.25e-3), RowCost(0.9e-3, 0.22e-3, 0.2e-3), 0.04e-3),
    Machine("laptop CPU, float32", RowCost(16e-3, 0.9e-3, 0.4e-3), RowCost(3.5e-3, 0.9e-3, 0.3e-3), 0.1e-3),
    Machine("H200, 8B bf16", RowCost(4.2e-3, 0.013e-3, 0.01e-3), RowCost(0.9e-3, 0.02e-3, 0.02e-3), 0.002e-3),
)


class TracedProposer:
    """N-gram drafts as they were recorded: as many as the trace says exist, the first `kept` of them right."""

    name = "ngram"

    def __init__(self, traces: dict[str, Trace]) -> None:
        self._traces = traces

    def propose(self, request: Request, history: History, room: int) -> Proposal:
        trace, at = self._traces[request.id], len(history.output)
        if at >= len(trace.match) or not trace.match[at]:
            return NO_PROPOSAL
        return Proposal(chain((0,) * min(room, LENGTH)), self.name, trace.match[at])

    def forget(self, request_id: str) -> None:
        pass


def simulate(
    machine: Machine, traces: Sequence[Trace], *, batch: int, draft_tokens: int | None = None, sources: Sequence[str] = ()
) -> tuple[float, int]:
    """Return seconds and tokens of these replies, `batch` at a time, under the real policy or a fixed number of drafts."""
    by_id = {str(number): trace for number, trace in enumerate(traces)}
    speculator = Speculator([TracedProposer(by_id)] if "ngram" in sources else [], draft_tokens=draft_tokens)
    waiting = list(by_id)
    running: list[str] = []
    seconds, tokens = 0.0, 0
    histories: dict[str, History] = {}
    own: dict[str, tuple[Draft, ...]] = {}
    behind = dict.fromkeys(by_id, 0)
    requests = {
        name: Request(name, (1,), SamplingParams(temperature=t.temperature, max_tokens=10**6)) for name, t in by_id.items()
    }
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop(0))
            histories[running[-1]], own[running[-1]] = History((1,)), ()
        count = 0
        proposals = {}
        for name in running:
            room = LENGTH + 1
            proposals[name] = speculator.propose(requests[name], histories[name], own[name], room=room, running=len(running))
            count += 1 + len(proposals[name].drafts)
        limits = [0] * len(running)
        if "device" in sources:
            limits = speculator.plan_drafter([requests[name] for name in running], limit=LENGTH)
        spent = machine.step_seconds(tokens=count, rows=len(running))
        drafting = 0.0
        if any(limits):
            late = sum(behind[name] for name, limit in zip(running, limits, strict=True) if limit)
            drafting = machine.drafter_seconds(drafted=sum(limits), rows=sum(map(bool, limits)), behind=late)
        for name, limit in zip(list(running), limits, strict=True):
            trace, history, proposal = by_id[name], histories[name], proposals[name]
            at = len(history.output)
            kept = 0
            if proposal.drafts:
                kept = max(min(trace.kept[proposal.source][at], len(proposal.drafts)), 0)
                counts = {"drafted": len(proposal.drafts), "kept": kept, "match": proposal.match}
                speculator.record_outcome(name, proposal.source, **counts)
            history.output.extend([0] * (kept + 1))
            tokens += kept + 1
            behind[name] = 0 if limit else behind[name] + kept + 1
            own[name] = chain((0,) * limit)
            if len(history.output) >= len(trace.kept["device"]):
                running.remove(name)
                speculator.forget(name)
        speculator.record_step(
            tokens=count,
            rows=len(limits),
            seconds=spent,
            drafting_rows=sum(map(bool, limits)),
            drafted=sum(limits),
            drafter_seconds=drafting,
        )
        seconds += spent + drafting
    return seconds, tokens


def read_traces() -> list[Trace]:
    rows = json.loads(TRACES.read_text(encoding="utf-8"))
    return [
        Trace(
            kind,
            name,
            temperature,
            {s: [-1 if c == "-" else int(c) for c in text] for s, text in kept.items()},
            list(map(int, match)),
        )
        for kind, name, temperature, kept, match in rows
    ]


@dataclass(frozen=True, slots=True)
class Cell:
    machine: str
    kind: str
    temperature: float
    batch: int
    order: str  # of the replies: as recorded, or reversed
    to_none: float  # speed of the policy relative to no drafts
    best: str  # the fastest fixed choice
    regret: float  # time beyond it, as a share


def cells(batches: Sequence[int] = (1, 4, 8)) -> list[Cell]:
    """Every machine, kind of text, temperature and batch: each with a server that has seen nothing before."""
    found = []
    traces = read_traces()
    for machine in MACHINES:
        for kind in sorted({trace.kind for trace in traces}):
            for temperature in sorted({trace.temperature for trace in traces}):
                picked = [t for t in traces if (t.kind, t.temperature) == (kind, temperature)]
                for batch, order in product(batches, ("recorded", "reversed")):
                    replies = picked[:: 1 if order == "recorded" else -1] * max(1, 2 * batch // len(picked))
                    fixed = {"none": _speed(machine, replies, batch, 0, ())}
                    fixed |= {f"device {k}": _speed(machine, replies, batch, k, ("device",)) for k in (1, 2, 3, 5, 7)}
                    fixed |= {f"ngram {k}": _speed(machine, replies, batch, k, ("ngram",)) for k in (2, 4, 7)}
                    policy = _speed(machine, replies, batch, None, ("device", "ngram"))
                    best = max(fixed, key=fixed.__getitem__)
                    shares = policy / fixed["none"], best, fixed[best] / policy - 1
                    found.append(Cell(machine.name, kind, temperature, batch, order, *shares))
    return found


def _speed(machine: Machine, traces: Sequence[Trace], batch: int, draft_tokens: int | None, sources: Sequence[str]) -> float:
    seconds, tokens = simulate(machine, traces, batch=batch, draft_tokens=draft_tokens, sources=sources)
    return tokens / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs="?", const="smollm2", metavar="MODEL")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.record:
        traces = record(options.record, (0.0, 0.7, 1.0), 200)
        rows = [
            [
                t.kind,
                t.name,
                t.temperature,
                {s: "".join("-" if k < 0 else str(k) for k in v) for s, v in t.kept.items()},
                "".join(map(str, t.match)),
            ]
            for t in traces
        ]
        TRACES.write_text(json.dumps(rows, indent=0) + "\n", encoding="utf-8")
        return 0
    found = cells()
    if options.json:
        print(json.dumps([asdict(cell) for cell in found], indent=2))
        return 0
    heads = ("machine", "text", "T", "batch", "order", "x none", "best fixed", "regret %")
    lines = [
        [c.machine, c.kind, f"{c.temperature:g}", str(c.batch), c.order, f"{c.to_none:.2f}", c.best, f"{100 * c.regret:.1f}"]
        for c in found
    ]
    table("", heads, lines)
    print(f"worst to none {min(c.to_none for c in found):.3f}, worst regret {100 * max(c.regret for c in found):.1f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
