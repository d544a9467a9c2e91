"""`onedraw rm`: remove a downloaded model from disk."""

from __future__ import annotations

import argparse
from pathlib import Path

from onedraw.backends.memory_plan import human_bytes
from onedraw.cli import terminal
from onedraw.cli.flags import SETTINGS_HELP
from onedraw.settings import Settings, default_cache_dir

HELP = "remove a downloaded model from disk"
EXAMPLES = """examples:
  onedraw rm smollm2
  onedraw rm Qwen/Qwen3-0.6B
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME", help="a short name or a hub id, as `onedraw list` shows it")
    parser.add_argument("--cache-dir", type=Path, metavar="FOLDER", help=SETTINGS_HELP["cache_dir"])


def run(arguments: argparse.Namespace) -> int:
    from onedraw.checkpoints.installed import remove_model

    removed = remove_model(arguments.model, Settings.of(cache_dir=arguments.cache_dir).cache_dir or default_cache_dir())
    terminal.dim(f"removed {removed.name}: {human_bytes(removed.size)}")
    return 0
