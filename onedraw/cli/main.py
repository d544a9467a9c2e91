"""The command `onedraw`: parse arguments, run one command, and print errors as one line.

Exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted. A command is a module with `HELP`, `EXAMPLES`, `add(parser)`
and `run(arguments) -> int`. It imports heavy packages only in `run`, so that help texts appear at once.
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

COMMANDS = (
    *("serve", "run", "chat", "generate", "batch", "list", "pull", "rm", "ps"),
    *("inspect", "bench", "eval", "prove", "replay", "train-draft", "export", "completion"),
)
MANY_OPTIONS = 20  # If a command has more options than this, `--help` shows only those in COMMON.
COMMON = frozenset(
    (
        *("--help", "--help-all", "--host", "--port", "--api-key", "--device", "--devices", "--dtype", "--max-context"),
        *("--max-batch", "--kv-memory", "--kv-dtype", "--draft", "--threads", "--record", "--json", "--batch"),
        *("--prompt-tokens", "--new-tokens", "--temperature", "--top-p", "--max-tokens", "--seed", "--system", "--chat"),
        *("--against", "--quick", "--data", "--out", "--minutes", "--init", "--temperatures"),
    )
)
DESCRIPTION = "Onedraw runs language models so that speed never changes the answer."


class UsageError(Exception):
    """The arguments are not valid; the message says why."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError, where argparse itself would print and exit. An unknown option gets the nearest
    known one as a suggestion."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
        if message.startswith("unrecognized arguments: -"):
            begun = [option for option in self._option_string_actions if option.startswith(unknown)]
            near = begun or difflib.get_close_matches(unknown, self._option_string_actions, n=1)
            message = f"unknown option {unknown}" + (f": did you mean {near[0]}?" if near else "")
        raise UsageError(message)

    def common_help(self) -> str:
        """Return the help text with only the options of COMMON, if the command has many; the rest are under --help-all."""
        options = [action for action in self._actions if action.option_strings and action.help is not argparse.SUPPRESS]
        if len(options) <= MANY_OPTIONS:
            return self.format_help()
        hidden = {action: action.help for action in options if COMMON.isdisjoint(action.option_strings)}
        for action in hidden:
            action.help = argparse.SUPPRESS
        try:
            text = self.format_help()
        finally:
            for action, full_help in hidden.items():
                action.help = full_help
        return f"{text}\n{len(hidden)} more options: `{self.prog} --help-all`\n"


class Help(argparse.Action):
    """`--help` and `--help-all`: print the help text and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str, full: bool = False) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self._full = full

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.format_help() if self._full else parser.common_help())
        parser.exit()


def command_module(name: str) -> ModuleType:
    return importlib.import_module(f"onedraw.cli.{name.replace('-', '_')}")


def command_parser(name: str) -> Parser:
    """Build the parser of one command."""
    module = command_module(name)
    parser = Parser(
        prog=f"onedraw {name}",
        description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=Help, help="show the options that most people use")
    parser.add_argument("--help-all", action=Help, full=True, help="show all options")
    module.add(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=module.run)
    arguments = (f"[{a.metavar}]" if a.nargs == "?" else str(a.metavar) for a in parser._actions if not a.option_strings)
    parser.usage = " ".join((parser.prog, "[OPTIONS]", *arguments))
    return parser


def overview() -> str:
    """Return the text that `onedraw` without arguments and `onedraw --help` print."""
    lines = [f"  {name:13}{command_module(name).HELP}" for name in COMMANDS]
    return "\n".join(
        [
            "usage: onedraw COMMAND …",
            "",
            DESCRIPTION,
            "",
            "commands:",
            *lines,
            "",
            "`onedraw help COMMAND` explains a command; `onedraw --version` prints the version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. An OnedrawError or OSError prints one line, or a
    traceback with --debug."""
    given = list(sys.argv[1:] if argv is None else argv)
    _repair_streams()
    try:
        status = _run(given)
        sys.stdout.flush()  # Flush now, so that a write error is reported here and not when the interpreter exits.
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
        # The reader of a pipe, such as `| head`, closed it early. That is not an error to report.
        _silence_output()
        return 1
    except OSError as error:  # A file that the command reads or writes, or an output stream, cannot be used.
        if "--debug" in given:
            raise
        written = _flushed() and error.errno not in (errno.ENOSPC, errno.EIO)
        place = error.filename or ("the system" if written else "the output")
        return complain(f"{place}: {error.strerror or error}", status=1)


def _flushed() -> bool:
    """Flush stdout and return whether that worked. If it did not, further output is discarded."""
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
        case ["--help" | "--help-all" | "-h" | "help"]:
            print(overview())
            return 0
        case ["help", name, *_]:
            given = [name, "--help"]
        case ["--help" | "--help-all" | "-h", *_]:
            print(overview())
            return 0
        case ["--version", *_]:
            print(f"onedraw {__version__}")
            return 0
    arguments = parse(given)
    status: int = arguments.run(arguments)
    return status


def _repair_streams() -> None:
    """Open /dev/null in place of closed standard streams, and escape characters that an output stream cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  it stays open until the process ends
        elif mode == "w" and hasattr(stream, "reconfigure") and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def _silence_output() -> None:
    """Discard everything that is still to be written to stdout."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # These mean that stdout is already closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. The first one is the name of the command; a misspelled name gets a suggestion."""
    name, rest = given[0], list(given[1:])
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `onedraw {near[0]}`?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise UsageError(f"no command {name!r}: {hint}")
    parser = command_parser(name)
    try:
        return parser.parse_intermixed_args(rest)  # options may come between and after the arguments
    except UsageError as error:
        raise UsageError(f"{error}; see `onedraw {name} --help`") from None


def complain(message: str, *, status: int) -> int:
    print(f"onedraw: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
