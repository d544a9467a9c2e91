"""`onedraw replay`: run recorded requests again under any settings, and report which tokens differ.

The exit status is 1 if a token differs or a request could not be run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onedraw.cli import terminal
from onedraw.cli.flags import add_settings, read_settings
from onedraw.errors import BadSetting

if TYPE_CHECKING:
    from onedraw.contract.record import Record
    from onedraw.contract.replay import ReplayReport, Verdict
    from onedraw.llm.llm import LLM

HELP = "run recorded requests again and report which tokens differ"
EXAMPLES = """examples:
  onedraw serve smollm2 --record ./requests
  onedraw replay ./requests
  onedraw replay ./requests/requests-000001.jsonl --draft none --max-batch 1
  onedraw replay ./requests --max-batch 32 --draft ngram --json

Every request runs with its own seed, parameters and prompt ids under the settings given here. None of them may change a token:
that is the contract. It holds for one version, kind of device and dtype, which the fingerprint names.
"""
SHOWN = 50  # the most rows of the printed table of differences; --json prints all of them


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", metavar="FILE|DIR", type=Path, help="a file or folder written by --record")
    parser.add_argument("--model", metavar="MODEL", help="the model to run (default: the one that was recorded)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with a verdict for every request")
    add_settings(parser, leave_out=("served_name", "queue_limit"))


def run(arguments: argparse.Namespace) -> int:
    from onedraw.build.llm import build_llm
    from onedraw.contract.record import read_records
    from onedraw.contract.replay import replay

    damaged: list[str] = []
    records = read_records(arguments.records, damaged=damaged.append)
    arguments.model = arguments.model or source_of(records)
    settings = read_settings(arguments)
    with terminal.progress() as notify, build_llm(settings, notify) as llm:
        report = replay(records, llm, notify=notify)
        rows = [row_of(verdict, llm) for verdict in report.verdicts if verdict.result != "same"]
    if arguments.json:
        terminal.print_json(report_json(report, damaged))
        return 0 if report.holds else 1
    if rows:
        terminal.table("", ("record", "seed", "token", "recorded", "now", "difference"), rows[:SHOWN])
    for line in summary(report, left_out=max(len(rows) - SHOWN, 0), damaged=damaged):
        print(line)
    return 0 if report.holds else 1


def source_of(records: Sequence[Record]) -> str:
    sources = sorted({record.source for record in records})
    if len(sources) > 1:
        raise BadSetting(
            f"these records are from several models ({', '.join(sources)}); replay one model's files, or give --model"
        )
    return sources[0]


def summary(report: ReplayReport, *, left_out: int = 0, damaged: Sequence[str] = ()) -> list[str]:
    same, different, missing = report.of("same"), report.of("different"), report.of("not run")
    counted = report.counted
    tokens = sum(verdict.tokens for verdict in report.verdicts)
    lines = [f"… and {left_out} more; --json has them all"] if left_out else []
    lines += [f"skipped {fault}" for fault in damaged[:SHOWN]]
    lines += [f"skipped {len(damaged) - SHOWN} more damaged lines; --json has them all"] if len(damaged) > SHOWN else []
    lines.append(
        f"{len(report.verdicts)} requests, {tokens} tokens: {len(same)} the same, {len(different)} different, "
        f"{len(missing)} not run"
    )
    lines.append(
        f"{counted.accepted_tokens} of {counted.draft_tokens} drafts were kept, {counted.mixed_steps} of {counted.steps} steps "
        f"had several rows, {counted.preemptions} times a request was preempted and resumed"
    )
    others = [fingerprint for fingerprint in report.recorded_by if fingerprint != report.fingerprint]
    if others:
        lines.append(
            f"recorded by {', '.join(others)}, run by {report.fingerprint}: equal tokens are promised only if these are equal"
        )
    return lines


def row_of(verdict: Verdict, llm: LLM) -> list[str]:
    def named(token: int | None) -> str:
        if token is None:
            return "-"
        text = llm.tokenizer.token_bytes(token).decode("utf-8", "replace") if token < llm.card.vocab else "?"
        return f"{token} {json.dumps(text, ensure_ascii=False)}"

    place = "-" if verdict.index is None else str(verdict.index)
    seed = "-" if verdict.seed is None else str(verdict.seed)
    note = verdict.note if verdict.result == "different" else f"not run: {verdict.note}"
    return [verdict.where, seed, place, named(verdict.recorded), named(verdict.found), note]


def report_json(report: ReplayReport, damaged: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "model": report.model,
        "fingerprint": report.fingerprint,
        "recorded_by": list(report.recorded_by),
        "holds": report.holds,
        "requests": len(report.verdicts),
        "tokens": sum(verdict.tokens for verdict in report.verdicts),
        "same": len(report.of("same")),
        "different": len(report.of("different")),
        "not_run": len(report.of("not run")),
        "drafts": report.counted.draft_tokens,
        "drafts_kept": report.counted.accepted_tokens,
        "preemptions": report.counted.preemptions,
        "damaged": list(damaged),
        "verdicts": [asdict(verdict) for verdict in report.verdicts],
    }
