"""`onedraw run`: download a model if needed, then chat with it. The options are those of `onedraw chat`."""

from __future__ import annotations

import argparse

from onedraw.cli import chat, pull, terminal
from onedraw.cli.flags import read_settings

HELP = "download a model if needed, then chat with it"
EXAMPLES = """examples:
  onedraw run smollm2
  onedraw run qwen3-0.6b --system "Answer in one sentence."
"""


def add(parser: argparse.ArgumentParser) -> None:
    chat.add(parser)


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments)
    if settings.backend != "fake" and not settings.model.startswith("random:"):
        with terminal.progress() as notify:
            pull.download(settings, notify)
    return chat.run(arguments)
