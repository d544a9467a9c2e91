"""`onedraw pull`: download a model into the cache folder and print its path."""

from __future__ import annotations

import argparse
from pathlib import Path

from onedraw.cli import terminal
from onedraw.cli.flags import SETTINGS_HELP
from onedraw.settings import Settings, default_cache_dir

HELP = "download a model into the cache folder"
EXAMPLES = """examples:
  onedraw pull smollm2
  onedraw pull HuggingFaceTB/SmolLM2-360M-Instruct
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME", help="smollm2, or a hub id like Qwen/Qwen3-0.6B")
    parser.add_argument("--cache-dir", type=Path, metavar="FOLDER", help=SETTINGS_HELP["cache_dir"])


def run(arguments: argparse.Namespace) -> int:
    from onedraw.checkpoints.download import resolve_model

    settings = Settings.of(model=arguments.model, cache_dir=arguments.cache_dir)
    with terminal.progress() as notify:
        path = resolve_model(settings.model, settings.cache_dir or default_cache_dir(), progress=notify)
    print(path)
    return 0
