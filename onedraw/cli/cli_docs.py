"""docs/cli.md, made from the parser itself: what `--help` says is what the page says.

In: the parsers of `main`. Out: Markdown on stdout (`make docs`); a test holds the file equal to it.
"""

from __future__ import annotations

import argparse
import sys

from onedraw.cli.main import COMMANDS, DESCRIPTION, command_parser

OPENING = f"""# The command line

<!-- Written by `make docs` from the parser; edit the help texts in onedraw/cli/ instead. -->

{DESCRIPTION} Results go to stdout, progress and remarks to stderr, so a pipe receives results alone; tables and colours
appear only in a terminal. Exit status: 0 done, 1 failed (for `prove` and `replay`: a difference), 2 used wrongly, 130
interrupted. A mistake is one line that begins with `onedraw:`; `--debug` shows where it came from.
"""


def reference() -> str:
    return OPENING + "".join(_command(name, command_parser(name)) for name in COMMANDS)


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    parts = [f"\n## onedraw {name}\n\n{parser.description}\n"]
    if parser.epilog:
        parts.append(f"\n```text\n{parser.epilog.strip()}\n```\n")
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help is not argparse.SUPPRESS and not isinstance(a, argparse._HelpAction)]
        if actions:
            parts.append(f"\n| {group.title} | |\n|---|---|\n")
            parts.extend(_line(action) for action in actions)
    return "".join(parts)


def _line(action: argparse.Action) -> str:
    value = _value(action)
    if not action.option_strings:
        shown = f"`{value}`" if action.nargs != "?" else f"`[{value}]`"
    else:
        shown = f"`{' '.join((action.option_strings[-1], value)).strip()}`"
    return f"| {_cell(shown)} | {_cell(action.help or '')} |\n"


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "{" + ",".join(str(c) for c in action.choices) + "}"
    return str(action.metavar or action.dest.upper())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%")


if __name__ == "__main__":
    sys.stdout.write(reference())
