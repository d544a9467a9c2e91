"""docs/cli.md agrees with the parsers."""

from __future__ import annotations

import argparse
from pathlib import Path

from onedraw.cli.cli_docs import reference
from onedraw.cli.main import COMMANDS, Help, command_parser

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "docs/cli.md is stale: run `make docs`"


def test_every_option_is_on_the_page() -> None:
    page = reference()
    for name in COMMANDS:
        section = page.partition(f"## onedraw {name}\n")[2].partition("\n## ")[0]
        for action in command_parser(name)._actions:
            if action.help is argparse.SUPPRESS:  # defined only to be refused with a reason
                continue
            assert not action.option_strings or isinstance(action, Help) or action.option_strings[-1] in section
