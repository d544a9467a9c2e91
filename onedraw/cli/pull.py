"""`onedraw pull`: download a model into the cache folder and print its path."""

from __future__ import annotations

import argparse
from pathlib import Path

from onedraw.cli import terminal
from onedraw.cli.flags import add_cache_dir
from onedraw.settings import Settings

HELP = "download a model, and the drafter that the catalogue names for it"
EXAMPLES = """examples:
  onedraw pull smollm2
  onedraw pull qwen3-0.6b
  onedraw pull HuggingFaceTB/SmolLM2-360M-Instruct
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="NAME", help="a short name (`onedraw list` shows them), or a hub id like Qwen/Qwen3-0.6B"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_cache_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    settings = Settings.of(model=arguments.model, cache_dir=arguments.cache_dir)
    with terminal.progress() as notify:
        path = download(settings, notify)
    if arguments.json:
        terminal.print_json({"name": arguments.model, "path": str(path)})
    else:
        print(path)
    return 0


def download(settings: Settings, notify: terminal.Progress) -> Path:
    """Return the path of the model of these settings, downloaded first if needed, with the drafter that the catalogue names for
    it if --draft contains `auto`. A model runs without its drafter, so a drafter that cannot be downloaded is only reported."""
    from onedraw.checkpoints.catalogue import find_in_catalogue
    from onedraw.checkpoints.download import resolve_model
    from onedraw.errors import ModelError

    cache = settings.cache_folder
    path = resolve_model(settings.model, cache, progress=notify)
    known = find_in_catalogue(settings.model, path)
    if known is not None and known.drafter is not None and "auto" in settings.draft:
        try:
            resolve_model(known.drafter, cache, progress=notify)
        except ModelError as error:
            terminal.dim(f"no drafter for {settings.model}: {error}")
    return path
