"""The commands shown to users exist: in the README, docs/ and deploy/, `onedraw …` goes through the real parsers, `make …` and
`python -m …` name targets and modules, and options in the text belong to some command. Files shown on a page parse."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from onedraw.cli.main import COMMANDS, Parser, UsageError, command_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL_FILES = [ROOT / "Dockerfile", *sorted(file for file in (ROOT / "deploy").rglob("*") if file.is_file())]
FOREIGN = (
    "pip",
    "curl",
    "pytest",
    "mypy",
    "make",
    "docker",
    "ray",
    "python -m bench",
    "python -m tools",
)  # have options of their own
ENDS = ("&&", "||", "|", ";", "&", ">", ">>", "<<", "`")


@cache
def parser(command: str) -> Parser:
    return command_parser(command)


@cache
def options() -> frozenset[str]:
    """The options of all commands, and of the programs in bench/ and tools/."""
    programs = "".join(file.read_text(encoding="utf-8") for name in ("bench", "tools") for file in (ROOT / name).rglob("*.py"))
    ours = (option for command in COMMANDS for option in parser(command)._option_string_actions)
    return frozenset([*ours, *re.findall(r'"(--[a-z-]+)"', programs)])


def shell_lines(page: Path) -> Iterator[str]:
    """The lines of a page's shell blocks, with continued lines joined and comments removed."""
    for block in re.findall(r"```(?:sh|bash|shell)\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            yield re.sub(r"(^|\s)#.*", "", line)


def calls(line: str) -> Iterator[list[str]]:
    """The arguments of each call of onedraw in a shell line."""
    words = shlex.split(line) if re.search(r"\bonedraw\s", line) else []
    for start, word in enumerate(words):
        before = words[start - 1] if start else "&&"
        if word == "onedraw" and (before in ("-m", "&&") or "=" in before or before.isdigit()):
            rest = words[start + 1 :]
            stop = next((at for at, one in enumerate(rest) if one in ENDS), len(rest))
            yield rest[:stop]


LINES = [
    pytest.param(call, id=f"{page.name}: {' '.join(call)}")
    for page in PAGES
    for line in shell_lines(page)
    for call in calls(line)
]


def test_there_are_commands_to_check() -> None:
    assert len(LINES) > 25


@pytest.mark.parametrize("call", LINES)
def test_a_command_in_a_shell_block_is_accepted(call: list[str]) -> None:
    parse(call)


def parse(call: list[str]) -> None:
    command, *arguments = call
    assert command in COMMANDS, f"there is no `onedraw {command}`"
    if "--help" not in arguments:  # it prints and exits
        parser(command).parse_args(arguments)


@pytest.mark.parametrize("wrong", [["serve", "--no-such-flag"], ["serve", "--max-batch", "many"], ["prove"]])
def test_a_wrong_command_is_found(wrong: list[str]) -> None:
    with pytest.raises((UsageError, SystemExit)):
        parse(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_in_the_text_exist(page: Path) -> None:
    """In `onedraw COMMAND … --option` the option is one of that command, elsewhere one of any of our programs."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    missing = []
    for span in re.findall(r"`([^`]+)`", text):
        named = re.match(r"onedraw ([a-z-]+)", span)
        known = options()
        if named and named[1] in COMMANDS:
            known = frozenset(parser(named[1])._option_string_actions)
        elif span.startswith(FOREIGN):
            continue
        flags = re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w-])", span)
        missing += [f"{flag} in `{span}`" for flag in flags if flag not in known]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_and_modules_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    code = "\n".join([*re.findall(r"`([^`\n]+)`", text), *shell_lines(page)])
    assert set(re.findall(r"(?:^|[ =])make ([a-z][a-z-]*)", code, re.M)) <= targets
    modules = set(re.findall(r"python -m ((?:bench|tools|onedraw)(?:\.\w+)*)", code))
    files = {name: ROOT.joinpath(*name.split(".")) for name in modules}
    assert [
        name for name, file in files.items() if not (file.with_suffix(".py").exists() or (file / "__main__.py").exists())
    ] == []


def test_commands_in_deployment_files_are_accepted() -> None:
    found = 0
    for file in SHELL_FILES:
        for line in file.read_text(encoding="utf-8").splitlines():
            served = re.search(r"\b(serve .*?)(?:`|$)", line.replace('", "', " ").replace("$OPTIONS", "").rstrip('"] '))
            if served and ("onedraw serve" in line or '"serve"' in line):
                call = shlex.split(re.sub(r"\$\{?\w+(:-[\w.]+)?\}?", "smollm2", served[1]))
                parse(
                    [word for word in call if word != "…"] if call[-1] != "…" else call[: -2 if call[-2].startswith("--") else -1]
                )
                found += 1
    assert found >= 4


BLOCKS = [
    pytest.param(language, block, id=f"{page.name}-{number}-{language}")
    for page in PAGES
    for number, (language, block) in enumerate(
        re.findall(r"```(json|yaml|toml)\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    )
]


@pytest.mark.parametrize(("language", "block"), BLOCKS)
def test_a_file_shown_on_a_page_parses(language: str, block: str) -> None:
    match language:
        case "json":
            parts = [json.loads(block)]
        case "toml":
            parts = [tomllib.loads(block)]
        case _:
            parts = list(yaml.safe_load_all(block))
    assert parts
    assert all(isinstance(part, dict) for part in parts)
