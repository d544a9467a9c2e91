"""`onedraw rm`: remove a downloaded model from disk."""

from __future__ import annotations

import argparse

from onedraw.backends.memory_plan import human_bytes
from onedraw.cli import terminal
from onedraw.cli.flags import add_cache_dir
from onedraw.settings import Settings

HELP = "remove a downloaded model from disk"
EXAMPLES = """examples:
  onedraw rm smollm2
  onedraw rm Qwen/Qwen3-0.6B
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME", help="a short name or a hub id, as `onedraw list` shows it")
    add_cache_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    from onedraw.checkpoints.installed import remove_model

    removed = remove_model(arguments.model, Settings.of(cache_dir=arguments.cache_dir).cache_folder)
    terminal.dim(f"removed {removed.name}: {human_bytes(removed.size)}")
    return 0
