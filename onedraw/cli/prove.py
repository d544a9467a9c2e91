"""`onedraw prove`: check for your model on your machine that speed never changes the answer. Any difference gives exit status
1."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onedraw.cli import terminal
from onedraw.cli.flags import add_settings, read_settings

if TYPE_CHECKING:
    from onedraw.contract.prove import ProofTable

HELP = "check on this machine that batching, drafts, splits and caches do not change answers"
EXAMPLES = """examples:
  onedraw prove smollm2
  onedraw prove ./my-model --quick --json

Each variation is compared with the plain run (requests alone, one after the other, cold) by tokens and by a checksum of the
scores behind every token. "not exercised" means that the condition of the row did not occur, so nothing was shown.
"""
# Settings that are not flags of this command, because the variations decide them.
LEFT_OUT = (
    *("served_name", "queue_limit", "max_batch", "kv_memory", "prefix_cache", "trace_verify"),
    *("overlap", "ahead", "cache_budget", "snapshot_dir"),
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name, a folder, a .gguf file or a hub id")
    parser.add_argument("--quick", action="store_true", help="shorter replies")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser, leave_out=LEFT_OUT)


def run(arguments: argparse.Namespace) -> int:
    from onedraw.contract.prove import prove

    settings = read_settings(arguments)
    with terminal.progress() as notify:
        table = prove(settings, quick=arguments.quick, notify=notify)
    if arguments.json:
        terminal.print_json(table_json(table))
    else:
        title = f"{table.model}: {table.requests} requests, {table.tokens} tokens, compared with the plain run"
        terminal.table(title, ("variation", "result"), [[f.name, str(f)] for f in table.findings])
    return 0 if table.holds else 1


def table_json(table: ProofTable) -> dict[str, Any]:
    return {**asdict(table), "findings": [asdict(f) for f in table.findings], "holds": table.holds}
