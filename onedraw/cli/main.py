"""The command `onedraw`: parse, run one command, turn what went wrong into one line.

In: the arguments. Out: an exit status (0 done, 1 failed, 2 used wrongly, 130 interrupted). Commands are modules with
`HELP`, `EXAMPLES`, `add(parser)` and `run(arguments) -> int`; what is heavy they import only when they run.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from onedraw import __version__
from onedraw.errors import BadRequest, BadSetting, OnedrawError

COMMANDS = ("serve", "generate", "chat", "bench", "inspect", "pull", "prove", "replay", "export")
DESCRIPTION = "Onedraw runs language models so that speed never changes the answer."


class UsageError(Exception):
    """The arguments make no sense."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises where argparse would print and leave."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def command_module(name: str) -> ModuleType:
    return importlib.import_module(f"onedraw.cli.{name}")


def command_parser(name: str) -> Parser:
    """The parser of one command."""
    module = command_module(name)
    parser = Parser(
        prog=f"onedraw {name}",
        description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=module.run)
    arguments = (f"[{a.metavar}]" if a.nargs == "?" else str(a.metavar) for a in parser._actions if not a.option_strings)
    parser.usage = " ".join((parser.prog, "[OPTIONS]", *arguments))
    return parser


def overview() -> str:
    """What `onedraw` alone and `onedraw --help` say."""
    lines = [f"  {name:10}{command_module(name).HELP}" for name in COMMANDS]
    return "\n".join(
        [
            "usage: onedraw COMMAND …",
            "",
            DESCRIPTION,
            "",
            "commands:",
            *lines,
            "",
            "`onedraw COMMAND --help` lists a command's options; `onedraw --version` prints the version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; never a traceback for a user's mistake."""
    given = list(sys.argv[1:] if argv is None else argv)
    _mend_streams()
    try:
        status = _run(given)
        sys.stdout.flush()  # what cannot be written is found here, not at the very end
        return status
    except UsageError as error:
        return complain(str(error), status=2)
    except OnedrawError as error:
        if "--debug" in given:
            raise
        return complain(str(error), status=2 if isinstance(error, BadRequest | BadSetting) else 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe left early (`| head`): nobody is interested in the rest, nor in our complaint.
        _silence_output()
        return 1
    except OSError as error:  # a file or the output that cannot be used
        if "--debug" in given:
            raise
        written = _flushed() and error.errno not in (errno.ENOSPC, errno.EIO)
        place = error.filename or ("the system" if written else "the output")
        return complain(f"{place}: {error.strerror or error}", status=1)


def _flushed() -> bool:
    """Whether what was printed is written; where it cannot be, the rest goes nowhere."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _silence_output()
        return False
    return True


def _run(given: list[str]) -> int:
    match given:
        case []:
            print(overview(), file=sys.stderr)
            return 2
        case ["--help" | "-h", *_]:
            print(overview())
            return 0
        case ["--version", *_]:
            print(f"onedraw {__version__}")
            return 0
    arguments = parse(given)
    status: int = arguments.run(arguments)
    return status


def _mend_streams() -> None:
    """Streams that were closed before the start take everything in and give nothing; a character that a stream has no code for
    is spelled."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  open to the end
        elif mode == "w" and hasattr(stream, "reconfigure") and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def _silence_output() -> None:
    """What is still to be written to stdout goes nowhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # not a file of the system's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Arguments of the command that stands first, with a suggestion where it is misspelled."""
    name, rest = given[0], list(given[1:])
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `onedraw {near[0]}`?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise UsageError(f"no command {name!r}: {hint}")
    parser = command_parser(name)
    try:
        return parser.parse_intermixed_args(rest)  # options may stand before, between and after the arguments
    except UsageError as error:
        raise UsageError(f"{error}; see `onedraw {name} --help`") from None


def complain(message: str, *, status: int) -> int:
    print(f"onedraw: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
