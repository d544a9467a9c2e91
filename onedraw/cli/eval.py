"""`onedraw eval`: a quick local evaluation, with confidence intervals and all that someone else needs to get the same table.

The table goes to stdout, or with --json one object; --samples writes every answer.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from onedraw.cli import terminal
from onedraw.cli.flags import add_record, add_request_options, add_settings, read_settings, recorded
from onedraw.errors import BadSetting

if TYPE_CHECKING:
    from onedraw.contract.evaluate import Evaluation, Match

HELP = "score a model on a file of questions"
EXAMPLES = """examples:
  onedraw eval questions.jsonl --model smollm2 --chat --match contains
  onedraw eval questions.jsonl --temperature 0.7 --seed 3 --samples answers.jsonl --json

A line is a question with its answer, {"prompt": "2 + 2 =", "answer": "4"}, or with choices, of which the likeliest counts:
{"prompt": "The sky is", "choices": [" green", " blue"], "answer": 1}. With "messages" instead of "prompt" it is a chat.
See docs/evals.md.
"""
MOST_TOKENS = 64
NOT_OFFERED = (
    *("seed", "n", "continue_ids", "reply_ids"),
    *("logprobs", "logprobs_mode", "logprob_token_ids", "prompt_logprobs", "checksums"),
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", metavar="TASK", type=Path, help="a file with one question per line")
    parser.add_argument("--model", metavar="MODEL", default="smollm2", help="the model to run (default: smollm2)")
    parser.add_argument(
        "--chat", action="store_true", help="send each prompt as a user message through the model's chat template"
    )
    parser.add_argument(
        "--match",
        choices=("exact", "ignore-case", "contains"),
        default="exact",
        help="when a reply without choices is right: equal but for white space at its ends, also in another case, or anywhere in "
        "it (default: exact)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the run; each question has its own (default: 0)"
    )
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write every answer there, as JSON lines")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_record(parser)
    add_request_options(parser, leave_out=NOT_OFFERED)
    add_settings(parser, leave_out=("served_name",))


def run(arguments: argparse.Namespace) -> int:
    from onedraw.build.llm import build_llm
    from onedraw.cli.flags import option_flags
    from onedraw.contract.evaluate import evaluate, read_task
    from onedraw.llm.request_options import settle_seed

    task, seed = read_task(arguments.task), settle_seed(arguments.seed)
    given = {flag.field: getattr(arguments, flag.field, None) for flag in option_flags() if flag.field not in NOT_OFFERED}
    options = {name: value for name, value in given.items() if value is not None}
    if "logit_bias" in options:
        options["logit_bias"] = dict(options["logit_bias"])
    options = {"temperature": 0.0, "max_tokens": MOST_TOKENS, **options}
    with terminal.progress() as notify:
        llm = build_llm(read_settings(arguments), notify)
        with llm, recorded(llm, arguments) as llm:

            def show(done: int, total: int) -> None:
                notify(terminal.bar(done, total))

            match = cast("Match", arguments.match)
            found = evaluate(llm, task, options, seed=seed, match=match, chat=arguments.chat, notify=show)
            model = llm.card.name
    if arguments.samples is not None:
        _write_samples(arguments.samples, found)
    if arguments.json:
        terminal.print_json(report(found, model=model, match=match, options=options))
        return 0
    rows = [
        [metric.name, f"{metric.value:.4f}", f"{metric.interval[0]:.4f} … {metric.interval[1]:.4f}", str(metric.count)]
        for metric in found.metrics
    ]
    terminal.table(f"{task.name} · {model}", ("metric", "value", "95 % interval", "questions"), rows)
    print(f"fingerprint {found.fingerprint} · seed {seed} · task sha256 {task.digest[:16]}")
    print(f"options {json.dumps({**options, 'match': match, 'chat': arguments.chat}, ensure_ascii=False, default=list)}")
    return 0


def report(found: Evaluation, *, model: str, match: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": found.task.name,
        "task_sha256": found.task.digest,
        "model": model,
        "fingerprint": found.fingerprint,
        "seed": found.seed,
        "match": match,
        "options": json.loads(json.dumps(options, default=list)),
        "metrics": [
            {"name": one.name, "value": one.value, "low": one.interval[0], "high": one.interval[1], "questions": one.count}
            for one in found.metrics
        ],
    }


def _write_samples(path: Path, found: Evaluation) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            for answer in found.answers:
                file.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
    except OSError as error:
        raise BadSetting(f"--samples: cannot write to {path} ({error.strerror})") from None
