"""`onedraw export`: write a model as StableHLO graphs, and print the path of the manifest, which lists them."""

from __future__ import annotations

import argparse
from pathlib import Path

from onedraw.cli import terminal
from onedraw.cli.flags import add_cache_dir
from onedraw.settings import Settings

HELP = "write a model as StableHLO graphs, for IREE and other runtimes"
EXAMPLES = """examples:
  onedraw export smollm2 --out smollm2-stablehlo
  onedraw export ./my-model --out graphs --dtype bf16 --max-batch 8 --max-context 2048
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name, a folder, a .gguf file or a hub id")
    parser.add_argument("--format", choices=["stablehlo"], default="stablehlo", help="what to write (default: stablehlo)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="output folder; created if missing")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="dtype of weights and products (default: f32)")
    parser.add_argument("--max-batch", type=int, default=4, metavar="N", help="sequences per step (default: 4)")
    parser.add_argument("--max-context", type=int, default=1024, metavar="N", help="tokens of one sequence (default: 1024)")
    parser.add_argument("--turn-tokens", type=int, default=64, metavar="N", help="tokens of a prefill step (default: 64)")
    parser.add_argument("--page-size", type=int, default=16, metavar="N", help="positions per page (default: 16)")
    add_cache_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    from onedraw.build.xla import export_graphs

    given = {
        name: getattr(arguments, name) for name in ("dtype", "max_batch", "max_context", "turn_tokens", "page_size", "cache_dir")
    }
    settings = Settings.of(model=arguments.model, backend="xla", draft="none", **given)
    with terminal.progress() as notify:
        path = export_graphs(settings, arguments.out, notify)
    print(path)
    return 0
