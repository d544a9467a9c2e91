"""Drafts against none: what each drafter is worth on one machine, with the tokens compared.

    python -m bench.speculation [MODEL] [--drafts ngram,prediction,dflash,auto] [--temperatures 0,0.7,1]
                                [--new-tokens 160] [--draft-tokens auto] [--repeats 1] [--json]

The prompts stand in bench/prompts: edit-… (change a little in this code), quote-… (quote and summarise), chat-… (open).
One request at a time, each side in a process of its own, the sides in turn, so that a noisy machine is noisy for all.
Decoding alone is timed: from the first tokens of a reply to its last. Every reply must have the tokens of `none`; one that
has not ends the run with status 1.

    ngram       the sequence's own tokens          prediction  what the caller expects, where the prompt has it
    dflash      the model's own drafter alone      auto        what `--draft auto` gives a caller who predicts nothing
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from onedraw.build.llm import build_llm
from onedraw.cli.terminal import table
from onedraw.llm.llm import LLM, idle_stats
from onedraw.llm.request_options import RequestOptions, make_chat_generation
from onedraw.settings import Settings
from onedraw.speculation.speculator import Speculator

PROMPTS = Path(__file__).parent / "prompts"
SIDES = ("none", "ngram", "prediction", "dflash", "auto")
KINDS = {"edit": "edit this code", "quote": "quote and summarise", "chat": "open chat"}
SEED = 7


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: str
    name: str
    messages: list[dict[str, str]]
    prediction: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply of one side: its tokens, how long they took after the first ones, and what the engine counted."""

    kind: str
    name: str
    temperature: float
    tokens: list[int]
    later_tokens: int
    later_seconds: float
    rows: int  # rows that carried drafts
    drafted: int
    kept: int
    kept_per_position: list[int]
    propose_seconds: float

    @property
    def turns(self) -> int:
        """A turn gives its kept drafts and one token more."""
        return len(self.tokens) - self.kept


@dataclass(frozen=True, slots=True)
class Line:
    """One side on one kind of prompt at one temperature."""

    kind: str
    temperature: float
    drafts: str
    tokens_per_second: float
    ratio: float  # to none
    tokens_per_turn: float
    drafted: int
    kept: int
    kept_per_position: list[float]  # of the rows that carried drafts: how often the first was kept, the second …
    propose_ms_per_turn: float


def read_prompts() -> list[Prompt]:
    found = []
    for file in sorted(PROMPTS.glob("*.json")):
        said = json.loads(file.read_text(encoding="utf-8"))
        kind, _, name = file.stem.partition("-")
        found.append(Prompt(kind, name, said["messages"], said.get("prediction")))
    return found


# ---------------------------------------------------------------------- in the measured process


def open_side(options: argparse.Namespace) -> LLM:
    """dflash is `auto` with nobody guessing on the host."""
    side: str = options.side
    settings = Settings.of(
        model=options.model,
        max_context=options.max_context,
        max_batch=1,
        threads=options.threads,
        draft=("auto",) if side == "dflash" else (side,),
        draft_tokens=options.draft_tokens,
        tree_budget=options.tree_budget,
    )
    alone = Speculator(draft_tokens=options.draft_tokens) if side == "dflash" else None
    return build_llm(settings, speculator=alone)


def measure_side(options: argparse.Namespace) -> list[Answer] | None:
    """Every prompt at every temperature; None where this side has nobody to guess."""
    with open_side(options) as llm:
        if options.side == "dflash" and not llm.service.capacity.drafter:
            return None
        prompts = [p for p in read_prompts() if p.kind in options.kinds and (options.side != "prediction" or p.prediction)]
        answer(llm, prompts[0], temperature=0.0, new_tokens=8)
        return [
            answer(llm, prompt, temperature=t, new_tokens=options.new_tokens, predict=options.side == "prediction")
            for prompt in prompts
            for t in options.temperatures
        ]


def answer(llm: LLM, prompt: Prompt, *, temperature: float, new_tokens: int, predict: bool = False) -> Answer:
    request_options = RequestOptions(
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        max_tokens=new_tokens,
        seed=SEED,
        prediction=prompt.prediction if predict else None,
    )
    generation = make_chat_generation(request_options, llm=llm, messages=prompt.messages)
    before = idle_stats(llm)
    tokens: list[int] = []
    stamps: list[tuple[float, int]] = []
    for piece in llm.pieces(llm.prepare(generation)):
        if piece.tokens:
            stamps.append((time.perf_counter(), len(piece.tokens)))
            tokens += [choice.token for choice in piece.tokens]
    counted = idle_stats(llm).since(before)
    return Answer(
        kind=prompt.kind,
        name=prompt.name,
        temperature=temperature,
        tokens=tokens,
        later_tokens=sum(count for _, count in stamps[1:]),
        later_seconds=stamps[-1][0] - stamps[0][0],
        rows=counted.drafts,
        drafted=counted.draft_tokens,
        kept=counted.accepted_tokens,
        kept_per_position=list(counted.accepted_per_position),
        propose_seconds=counted.propose_seconds,
    )


# ---------------------------------------------------------------------- in the measuring one


def in_a_process(side: str, options: argparse.Namespace) -> list[Answer] | None:
    command = [sys.executable, "-m", "bench.speculation", *options.given, "--side", side]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    return None if said is None else [Answer(**one) for one in said]


def differing(plain: Sequence[Answer], answers: Sequence[Answer]) -> list[str]:
    """Where a side's tokens are not those of none."""
    expected = {(a.kind, a.name, a.temperature): a.tokens for a in plain}
    return [
        f"{a.kind}-{a.name} at temperature {a.temperature:g}"
        for a in answers
        if a.tokens != expected[a.kind, a.name, a.temperature]
    ]


def summarise(side: str, runs: Sequence[Sequence[Answer]], plain: Sequence[Sequence[Answer]]) -> list[Line]:
    lines = []
    for kind in KINDS:
        for temperature in sorted({a.temperature for a in runs[0]}):
            picked = [[a for a in run if (a.kind, a.temperature) == (kind, temperature)] for run in runs]
            if not picked[0]:
                continue
            names = {a.name for a in picked[0]}
            base = [[a for a in run if (a.kind, a.temperature) == (kind, temperature) and a.name in names] for run in plain]
            speed = statistics.median(_rate(group) for group in picked)
            everything = [a for group in picked for a in group]
            rows, turns = sum(a.rows for a in everything), sum(a.turns for a in everything)
            places = [sum(place) for place in zip_longest(*(a.kept_per_position for a in everything), fillvalue=0)]
            lines.append(
                Line(
                    kind=kind,
                    temperature=temperature,
                    drafts=side,
                    tokens_per_second=speed,
                    ratio=speed / statistics.median(_rate(group) for group in base),
                    tokens_per_turn=sum(len(a.tokens) for a in everything) / max(turns, 1),
                    drafted=sum(a.drafted for a in everything),
                    kept=sum(a.kept for a in everything),
                    kept_per_position=[place / rows for place in places if place],
                    propose_ms_per_turn=1e3 * sum(a.propose_seconds for a in everything) / max(turns, 1),
                )
            )
    return lines


def _rate(answers: Sequence[Answer]) -> float:
    return sum(a.later_tokens for a in answers) / max(sum(a.later_seconds for a in answers), 1e-9)


def show(lines: Sequence[Line]) -> None:
    heads = (
        "prompts",
        "temperature",
        "drafts",
        "tokens/s",
        "ratio",
        "tokens/turn",
        "kept/drafted",
        "kept by position",
        "ms/turn",
    )
    rows = []
    for line in sorted(lines, key=lambda line: (list(KINDS).index(line.kind), line.temperature)):
        places = " ".join(f"{share:.2f}".removeprefix("0") for share in line.kept_per_position[:8]) or "-"
        rows.append(
            [
                *(KINDS[line.kind], f"{line.temperature:g}", line.drafts, f"{line.tokens_per_second:.1f}", f"{line.ratio:.2f}"),
                *(f"{line.tokens_per_turn:.2f}", f"{line.kept}/{line.drafted}", places, f"{line.propose_ms_per_turn:.3f}"),
            ]
        )
    table("", heads, rows)


def main() -> int:
    options = parse()
    if options.side:
        answers = measure_side(options)
        print(json.dumps(None if answers is None else [asdict(a) for a in answers]))
        return 0
    sides = ["none", *(side for side in options.drafts if side != "none")]
    runs: dict[str, list[list[Answer]]] = {}
    for _ in range(options.repeats):
        for side in sides:
            found = in_a_process(side, options)
            if found is not None:
                runs.setdefault(side, []).append(found)
    plain = runs["none"]
    wrong = {side: differing(plain[0], run) for side, made in runs.items() for run in made if differing(plain[0], run)}
    lines = [line for side, made in runs.items() for line in summarise(side, made, plain)]
    if options.json:
        print(json.dumps(report(options, runs, lines, wrong), indent=2))
    else:
        show(lines)
        for side in (side for side in sides if side not in runs):
            print(f"{side}: nobody guesses under this name here")
        for side, places in wrong.items():
            print(f"{side}: OTHER TOKENS than none: {', '.join(places)}")
    return 1 if wrong else 0


def report(
    options: argparse.Namespace, runs: dict[str, list[list[Answer]]], lines: Sequence[Line], wrong: dict[str, list[str]]
) -> dict[str, Any]:
    return {
        "model": options.model,
        "threads": options.threads or os.cpu_count(),
        "new_tokens": options.new_tokens,
        "draft_tokens": options.draft_tokens or "auto",
        "tree_budget": options.tree_budget,
        "repeats": options.repeats,
        "sides": list(runs),
        "same_tokens": not wrong,
        "differing": wrong,
        "lines": [asdict(line) for line in lines],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--drafts", type=lambda text: text.split(","), default=list(SIDES[1:]), help="sides beside none")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), help="edit, quote, chat")
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 0.7, 1.0])
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--draft-tokens", type=lambda text: None if text == "auto" else int(text), default=None)
    parser.add_argument("--tree-budget", type=int, default=0)
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.given = sys.argv[1:]
    unknown = set(options.drafts) - set(SIDES) | set(options.kinds) - set(KINDS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; drafts are {', '.join(SIDES)}, kinds {', '.join(KINDS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
