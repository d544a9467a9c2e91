"""Measure the speedup of each way of drafting over plain decoding, and check that the tokens are equal.

    python -m bench.speculation [MODEL] [--drafts ngram,prediction,dflash,auto] [--temperatures 0,0.7,1]
                                [--new-tokens 160] [--draft-tokens auto] [--repeats 1] [--json]

The prompts are in bench/prompts: edit-… (small changes to code), quote-… (quote and summarise), chat-… (open questions). One
request runs at a time. Each --draft setting runs in its own process, and the settings alternate, so that other load on the
machine affects all of them. Only decoding is timed: from the first tokens of a reply to the last. Every reply must have the
tokens of `none`; otherwise the exit status is 1.

    ngram       drafts from the tokens of the sequence itself
    prediction  drafts from the `prediction` of the request, for prompts that have one
    dflash      drafts from the DFlash drafter of the model alone
    auto        `--draft auto` for a request without a prediction
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
SETTINGS = ("none", "ngram", "prediction", "dflash", "auto")
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
    """One reply with one setting: its tokens, the time of all but the first ones, and the counters of the engine."""

    kind: str
    name: str
    temperature: float
    tokens: list[int]
    later_tokens: int
    later_seconds: float
    rows: int  # rows with drafts
    drafted: int
    kept: int
    kept_per_position: list[int]
    propose_seconds: float

    @property
    def steps(self) -> int:
        """The number of steps, since a step yields its kept drafts and one more token."""
        return len(self.tokens) - self.kept


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one setting for one kind of prompt at one temperature."""

    kind: str
    temperature: float
    drafts: str
    tokens_per_second: float
    ratio: float  # speed relative to `none`
    tokens_per_step: float
    drafted: int
    kept: int
    kept_per_position: list[float]  # share of the rows with drafts in which the first draft was kept, the second, and so on
    propose_ms_per_step: float


def read_prompts() -> list[Prompt]:
    found = []
    for file in sorted(PROMPTS.glob("*.json")):
        stored = json.loads(file.read_text(encoding="utf-8"))
        kind, _, name = file.stem.partition("-")
        found.append(Prompt(kind, name, stored["messages"], stored.get("prediction")))
    return found


# ---------------------------------------------------------------------- in the measured process


def open_llm(options: argparse.Namespace) -> LLM:
    """Open the model with a setting. `dflash` is `auto` without the proposers on the host."""
    setting: str = options.setting
    settings = Settings.of(
        model=options.model,
        max_context=options.max_context,
        max_batch=1,
        threads=options.threads,
        draft=("auto",) if setting == "dflash" else (setting,),
        draft_tokens=options.draft_tokens,
        tree_budget=options.tree_budget,
    )
    speculator = Speculator(draft_tokens=options.draft_tokens) if setting == "dflash" else None
    return build_llm(settings, speculator=speculator)


def measure(options: argparse.Namespace) -> list[Answer] | None:
    """Run every prompt at every temperature. Return None if the model has no drafter for this setting."""
    with open_llm(options) as llm:
        if options.setting == "dflash" and not llm.service.capacity.drafter:
            return None
        prompts = [p for p in read_prompts() if p.kind in options.kinds and (options.setting != "prediction" or p.prediction)]
        answer(llm, prompts[0], temperature=0.0, new_tokens=8)
        return [
            answer(llm, prompt, temperature=t, new_tokens=options.new_tokens, predict=options.setting == "prediction")
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


# ---------------------------------------------------------------------- in the measuring process


def measure_in_subprocess(setting: str, options: argparse.Namespace) -> list[Answer] | None:
    command = [sys.executable, "-m", "bench.speculation", *options.arguments, "--setting", setting]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return None if found is None else [Answer(**one) for one in found]


def differing(plain: Sequence[Answer], answers: Sequence[Answer]) -> list[str]:
    """Name the replies whose tokens differ from plain decoding."""
    expected = {(a.kind, a.name, a.temperature): a.tokens for a in plain}
    return [
        f"{a.kind}-{a.name} at temperature {a.temperature:g}"
        for a in answers
        if a.tokens != expected[a.kind, a.name, a.temperature]
    ]


def summarise(setting: str, runs: Sequence[Sequence[Answer]], plain: Sequence[Sequence[Answer]]) -> list[Summary]:
    summaries = []
    for kind in KINDS:
        for temperature in sorted({a.temperature for a in runs[0]}):
            picked = [[a for a in run if (a.kind, a.temperature) == (kind, temperature)] for run in runs]
            if not picked[0]:
                continue
            names = {a.name for a in picked[0]}
            base = [[a for a in run if (a.kind, a.temperature) == (kind, temperature) and a.name in names] for run in plain]
            speed = statistics.median(_rate(group) for group in picked)
            everything = [a for group in picked for a in group]
            rows, steps = sum(a.rows for a in everything), sum(a.steps for a in everything)
            kept_at = [sum(counts) for counts in zip_longest(*(a.kept_per_position for a in everything), fillvalue=0)]
            summaries.append(
                Summary(
                    kind=kind,
                    temperature=temperature,
                    drafts=setting,
                    tokens_per_second=speed,
                    ratio=speed / statistics.median(_rate(group) for group in base),
                    tokens_per_step=sum(len(a.tokens) for a in everything) / max(steps, 1),
                    drafted=sum(a.drafted for a in everything),
                    kept=sum(a.kept for a in everything),
                    kept_per_position=[count / rows for count in kept_at if count],
                    propose_ms_per_step=1e3 * sum(a.propose_seconds for a in everything) / max(steps, 1),
                )
            )
    return summaries


def _rate(answers: Sequence[Answer]) -> float:
    return sum(a.later_tokens for a in answers) / max(sum(a.later_seconds for a in answers), 1e-9)


def show(summaries: Sequence[Summary]) -> None:
    heads = (
        "prompts",
        "temperature",
        "drafts",
        "tokens/s",
        "ratio",
        "tokens/step",
        "kept/drafted",
        "kept by position",
        "ms/step",
    )
    rows = []
    for line in sorted(summaries, key=lambda line: (list(KINDS).index(line.kind), line.temperature)):
        shares = " ".join(f"{share:.2f}".removeprefix("0") for share in line.kept_per_position[:8]) or "-"
        rows.append(
            [
                *(KINDS[line.kind], f"{line.temperature:g}", line.drafts, f"{line.tokens_per_second:.1f}", f"{line.ratio:.2f}"),
                *(f"{line.tokens_per_step:.2f}", f"{line.kept}/{line.drafted}", shares, f"{line.propose_ms_per_step:.3f}"),
            ]
        )
    table("", heads, rows)


def main() -> int:
    options = parse()
    if options.setting:
        answers = measure(options)
        print(json.dumps(None if answers is None else [asdict(a) for a in answers]))
        return 0
    settings = ["none", *(setting for setting in options.drafts if setting != "none")]
    runs: dict[str, list[list[Answer]]] = {}
    for _ in range(options.repeats):
        for setting in settings:
            found = measure_in_subprocess(setting, options)
            if found is not None:
                runs.setdefault(setting, []).append(found)
    plain = runs["none"]
    wrong = {
        setting: differing(plain[0], run) for setting, repeats in runs.items() for run in repeats if differing(plain[0], run)
    }
    summaries = [one for setting, repeats in runs.items() for one in summarise(setting, repeats, plain)]
    if options.json:
        print(json.dumps(report(options, runs, summaries, wrong), indent=2))
    else:
        show(summaries)
        for setting in (setting for setting in settings if setting not in runs):
            print(f"{setting}: this model has no such drafter")
        for setting, replies in wrong.items():
            print(f"{setting}: tokens DIFFER from none: {', '.join(replies)}")
    return 1 if wrong else 0


def report(
    options: argparse.Namespace, runs: dict[str, list[list[Answer]]], summaries: Sequence[Summary], wrong: dict[str, list[str]]
) -> dict[str, Any]:
    return {
        "model": options.model,
        "threads": options.threads or os.cpu_count(),
        "new_tokens": options.new_tokens,
        "draft_tokens": options.draft_tokens or "auto",
        "tree_budget": options.tree_budget,
        "repeats": options.repeats,
        "settings": list(runs),
        "same_tokens": not wrong,
        "differing": wrong,
        "summaries": [asdict(one) for one in summaries],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument(
        "--drafts", type=lambda text: text.split(","), default=list(SETTINGS[1:]), help="settings to compare with none"
    )
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=list(KINDS), help="kinds of prompts: edit, quote, chat"
    )
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 0.7, 1.0])
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--draft-tokens", type=lambda text: None if text == "auto" else int(text), default=None)
    parser.add_argument("--tree-budget", type=int, default=0)
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.arguments = sys.argv[1:]
    unknown = set(options.drafts) - set(SETTINGS) | set(options.kinds) - set(KINDS)
    if unknown:
        parser.error(
            f"unknown value: {', '.join(sorted(unknown))}; --drafts takes {', '.join(SETTINGS)}, --kinds takes {', '.join(KINDS)}"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
