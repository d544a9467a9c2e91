"""`onedraw list`: the catalogue of short names, and the models on disk with their sizes."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from onedraw.backends.memory_plan import human_bytes
from onedraw.cli import terminal
from onedraw.cli.flags import add_cache_dir
from onedraw.settings import Settings

HELP = "list the short names of models, and the models on disk"
EXAMPLES = """examples:
  onedraw list
  onedraw list --json
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_cache_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    from onedraw.checkpoints.catalogue import CATALOGUE
    from onedraw.checkpoints.installed import installed_models

    installed = installed_models(Settings.of(cache_dir=arguments.cache_dir).cache_folder)
    sizes = {model.name: model.size for model in installed}
    if arguments.json:
        names = [
            {
                "name": name,
                "hub": model.hub,
                "source": model.source,
                "parameters": model.parameters,
                "drafter": model.drafter,
                "sampling": dict(model.sampling),
                "size": sizes.get(name),
            }
            for name, model in CATALOGUE.items()
        ]
        terminal.print_json({"catalogue": names, "installed": [asdict(model) for model in installed]})
        return 0
    rows = [
        (name, model.parameters, human_bytes(sizes[name]) if name in sizes else "-", model.source, model.drafter or "")
        for name, model in CATALOGUE.items()
    ]
    terminal.table("catalogue", ("name", "parameters", "on disk", "source", "drafter"), rows)
    others = [(model.name, human_bytes(model.size), model.path) for model in installed if model.name not in CATALOGUE]
    if others:
        terminal.table("other models on disk", ("name", "on disk", "path"), others)
    return 0
