"""`onedraw batch`: answer a file of requests, without a server. A run that was interrupted continues where it stopped.

The summary goes to stderr, or with --json as one JSON object to stdout. The exit status is 1 if a line failed.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict
from pathlib import Path

from onedraw.cli import terminal
from onedraw.cli.flags import add_record, add_settings, read_settings, recorded
from onedraw.errors import BadSetting

HELP = "answer a file of requests, without a server"
EXAMPLES = """examples:
  onedraw batch requests.jsonl replies.jsonl
  onedraw batch requests.jsonl replies.jsonl --model ./my-model --max-batch 32 --seed 7 --json

Lines are those of OpenAI's batch API: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}.
The same input, seed and model give the same bytes of output, also after an interruption. See docs/batches.md.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", type=Path, help="a file with one request per line")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="the file for the replies, in the order of the input")
    parser.add_argument("--model", metavar="MODEL", default="smollm2", help="the model to run (default: smollm2)")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed of the lines that have none (default: it follows from the input file)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with the numbers of lines and tokens")
    add_record(parser)
    add_settings(parser, leave_out=("served_name", "queue_limit"))


def run(arguments: argparse.Namespace) -> int:
    try:
        from onedraw.server.batch.offline import run_file
    except ImportError as error:
        raise BadSetting(f"batch needs the web packages, and {error.name} is missing: pip install 'onedraw[serve]'") from None
    from onedraw.build.llm import build_llm
    from onedraw.llm.request_options import settle_seed

    seed = None if arguments.seed is None else settle_seed(arguments.seed)
    with terminal.progress() as notify:
        llm = build_llm(read_settings(arguments), notify)
        with llm, recorded(llm, arguments) as llm:

            def show(done: int, total: int) -> None:
                notify(terminal.bar(done, total))

            summary = asyncio.run(run_file(llm, arguments.input, arguments.output, seed=seed, notify=show))
    if arguments.json:
        errors = None if summary.errors is None else str(summary.errors)
        terminal.print_json(asdict(summary) | {"output": str(summary.output), "errors": errors})
        return 1 if summary.failed else 0
    rate = summary.completion_tokens / max(summary.seconds, 1e-9)
    resumed = f", {summary.resumed} of them before this run" if summary.resumed else ""
    terminal.dim(
        f"{summary.lines} lines: {summary.completed} completed, {summary.failed} failed{resumed} · "
        f"{summary.completion_tokens} tokens · {rate:.1f} tokens/s · seed {summary.seed} · {summary.fingerprint}"
    )
    if summary.errors is not None:
        terminal.dim(f"the failed lines are in {summary.errors}")
    return 1 if summary.failed else 0
