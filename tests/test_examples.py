"""The programs in `examples/` run as they are, against a small trained model: they end well and print what they promise."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onedraw.build.llm import build_llm
from onedraw.settings import Settings
from tests.server.running import PATIENCE, Served, serving

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
MODEL = str(ROOT / "tests" / "fixtures" / "trained" / "trained_qwen3")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with build_llm(Settings(model=MODEL, max_context=2048, threads=1, self_check=False)) as llm, serving(llm) as server:
        yield server


class Program:
    """Runs one example inside this process, where its imports are fast, and returns what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def run(self, name: str, *arguments: str, server: Served | None = None) -> list[str]:
        if server is not None:
            self._monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        self._monkeypatch.setattr(sys, "argv", [name, *arguments])
        status = None
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as end:
            status = end.code
        assert not status, self._capsys.readouterr().out
        return self._capsys.readouterr().out.splitlines()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(monkeypatch, capsys)


def test_a_chat_is_answered_whole_and_streamed(program: Program, served: Served) -> None:
    assert "".join(program.run("chat.py", server=served)).strip()


def test_a_seed_replays_its_answer_without_drafts(program: Program, served: Served) -> None:
    assert program.run("replay_seed.py", server=served)[-1].endswith(": the same answer without drafts")


def test_a_batch_gives_the_answers_of_single_requests(program: Program, served: Served) -> None:
    assert program.run("same_in_a_batch.py", server=served)[-1] == "8 of 8 answers are the same alone and in a batch"


def test_structured_output_is_of_its_form(program: Program, served: Served) -> None:
    (line,) = program.run("structured_output.py", server=served)
    assert line.startswith(("a cat of ", "a dog of "))


def test_a_tool_is_called_and_its_result_is_sent_back(program: Program, served: Served) -> None:
    assert "it is sunny, 21 degrees." in "\n".join(program.run("tools.py", server=served))


def test_a_model_runs_inside_a_program(program: Program) -> None:
    printed = "\n".join(program.run("in_python.py", MODEL))
    assert "] seed " in printed
    assert all(f"{number} is a number that" in printed for number in ("One", "Two", "Three", "Four"))


def test_a_script_can_prove_the_contract(program: Program) -> None:
    assert program.run("prove.py", MODEL)[-1].endswith(": the contract holds")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_requests_of_the_shell_file_are_answered(served: Served) -> None:
    done = subprocess.run(
        ["sh", str(EXAMPLES / "requests.sh"), served.url], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data: [DONE]" in done.stdout


def test_every_example_has_a_test_and_is_short() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    files = [file for file in EXAMPLES.iterdir() if file.suffix in (".py", ".sh")]
    assert files
    for file in files:
        assert f'"{file.name}"' in tests
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 40, file.name
