"""The command itself: usage errors and exit statuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from onedraw import __version__
from onedraw.cli import generate
from onedraw.cli.main import COMMANDS, command_module, main
from onedraw.errors import ModelNotFound
from tests.cli.running import FAKE, Terminal

WEB_AND_TERMINAL = (
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
    "prometheus_client",
    "rich",
    "prompt_toolkit",
    "typer",
    "torch",
)


def test_the_version_is_that_of_the_package(terminal: Terminal) -> None:
    assert terminal.run("--version") == 0
    assert terminal.out == f"onedraw {__version__}\n"


def test_without_a_command_the_overview_is_shown_with_status_2(terminal: Terminal) -> None:
    assert terminal.run() == 2
    assert all(f"  {name} " in terminal.err for name in COMMANDS)


def test_help_has_status_0(terminal: Terminal) -> None:
    assert terminal.run("--help") == 0
    assert "commands:" in terminal.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([name, "--help"])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: onedraw {name} [OPTIONS]" in out
    assert f"  onedraw {name}" in out.partition("examples:")[2]


def test_a_misspelled_command_gets_a_suggestion(terminal: Terminal) -> None:
    assert terminal.run("genrate") == 2
    assert terminal.err == "onedraw: no command 'genrate': did you mean `onedraw generate`?\n"


def test_a_misspelled_option_gets_a_suggestion(terminal: Terminal) -> None:
    assert terminal.run("serve", "fake", "--max-contxt", "64") == 2
    assert terminal.err == "onedraw: unknown option --max-contxt: did you mean --max-context?; see `onedraw serve --help`\n"
    assert terminal.run("serve", "fake", "--prot=80") == 2
    assert "did you mean --port?" in terminal.err
    assert terminal.run("serve", "fake", "--xyzzy") == 2
    assert terminal.err == "onedraw: unknown option --xyzzy; see `onedraw serve --help`\n"


def test_help_of_a_command_shows_common_options_and_help_all_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    for given, rare in ((["serve", "--help"], False), (["help", "serve"], False), (["serve", "--help-all"], True)):
        with pytest.raises(SystemExit) as leaving:
            main(given)
        out = capsys.readouterr().out
        assert leaving.value.code == 0
        assert "--max-context" in out
        assert ("--turn-tokens" in out) is rare
        assert out.count("\n  --") < 18 or rare


def test_help_alone_is_the_overview(terminal: Terminal) -> None:
    assert terminal.run("help") == 0
    assert "commands:" in terminal.out


def test_an_unknown_command_lists_the_known_ones(terminal: Terminal) -> None:
    assert terminal.run("xyzzy") == 2
    assert terminal.err.startswith("onedraw: no command 'xyzzy': the commands are serve, run")


def test_a_usage_error_is_one_line_and_status_2(terminal: Terminal) -> None:
    assert terminal.run("generate") == 2
    assert terminal.err == "onedraw: the following arguments are required: MODEL; see `onedraw generate --help`\n"


def test_a_bad_setting_is_one_line_and_status_2(terminal: Terminal) -> None:
    assert terminal.run("generate", *FAKE, "x", "--page-size", "5") == 2
    assert terminal.err == "onedraw: --page-size: must divide 64 (1, 2, 4, 8, 16, 32 or 64), not 5\n"


def test_a_missing_model_is_one_line_and_status_1(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(arguments: object) -> int:
        raise ModelNotFound("no such model; pull it first")

    monkeypatch.setattr(generate, "run", missing)
    assert terminal.run("generate", *FAKE, "x") == 1
    assert terminal.err == "onedraw: no such model; pull it first\n"


def test_debug_shows_where_an_error_came_from(terminal: Terminal) -> None:
    with pytest.raises(Exception, match="page-size"):
        terminal.run("generate", *FAKE, "x", "--page-size", "5", "--debug")


def test_control_c_ends_quietly_with_130(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run", interrupted)
    assert terminal.run("generate", *FAKE, "x") == 130
    assert (terminal.out, terminal.err) == ("", "")


def test_options_may_come_before_or_after_arguments(terminal: Terminal) -> None:
    assert terminal.run("generate", "--max-tokens", "3", "fake", "--backend", "fake", "hello", "--temperature", "0") == 0
    first = terminal.out
    assert terminal.run("generate", "fake", "hello", "--backend", "fake", "--max-tokens", "3", "--temperature", "0") == 0
    assert terminal.out == first


def test_a_closed_pipe_is_not_an_error() -> None:
    script = f"{sys.executable} -m onedraw.cli.main generate fake hello --backend fake --max-tokens 1500 --ignore-eos | head -c 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, errors="replace", timeout=300, check=False)
    assert len(done.stdout.encode()) <= 3
    assert "Error" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("generate fake hi --backend fake --max-tokens 2 --seed 7 >&-", 0, "seed 7 "),
        ("generate fake hi --backend fake --max-tokens 2 > /dev/full", 1, "onedraw: the output: No space left on device"),
        ("--version > /dev/full", 1, "onedraw: the output: No space left on device"),
        ("generate fake - --backend fake --max-tokens 2 <&-", 2, "onedraw: the prompt is empty"),
        (f"inspect {'a' * 300}", 1, "File name too long"),
        ("generate fake hi --backend fake --max-tokens 2 --seed 9", 0, "seed 9 "),
    ],
)
def test_unusable_streams_and_invalid_names_are_reported_in_one_line(line: str, status: int, message: str) -> None:
    script = f"{sys.executable} -m onedraw.cli.main {line}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, errors="replace", timeout=300, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert message in done.stderr


def test_output_printed_before_a_file_error_is_flushed() -> None:
    code = "import sys; from onedraw.cli import main as cli; "
    code += "cli._run = lambda given: (print('a result'), open('/no/such/file'))[1]; sys.exit(cli.main([]))"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code], env=buffered, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "a result\n", "onedraw: /no/such/file: No such file or directory\n")


def test_a_character_that_the_terminal_cannot_encode_is_escaped() -> None:
    script = f"PYTHONIOENCODING=latin-1 {sys.executable} -m onedraw.cli.main --help"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "\\u2026" in done.stdout


@pytest.mark.parametrize(
    "given", [("generate", *FAKE, "hello", "--max-tokens", "2"), ("bench", *FAKE, "--batch", "1"), ("prove", *FAKE, "--quick")]
)
def test_commands_run_where_neither_web_nor_terminal_packages_are_installed(given: tuple[str, ...]) -> None:
    """The fake backend needs no torch either; the list blocks it to show that no command line file imports it."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({WEB_AND_TERMINAL!r})); from onedraw.cli.main import main; "
    done = subprocess.run(
        [sys.executable, "-c", blocked + f"sys.exit(main({list(given)!r}))"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_serve_without_the_web_packages_names_the_extra_to_install() -> None:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({WEB_AND_TERMINAL!r})); from onedraw.cli.main import main; "
    done = subprocess.run(
        [sys.executable, "-c", blocked + "sys.exit(main(['serve', '--backend', 'fake']))"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'onedraw[serve]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_command_module_has_the_required_functions() -> None:
    for name in COMMANDS:
        module = command_module(name)
        assert {"HELP", "EXAMPLES", "add", "run"} <= set(vars(module))
