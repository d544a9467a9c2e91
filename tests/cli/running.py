"""Running the command line in a test: inside this process, on the fake backend."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onedraw.cli.main import main

FAKE = ("fake", "--backend", "fake")


class Terminal:
    """Runs commands and keeps their output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def run(self, *given: str) -> int:
        status = main(given)
        self.out, self.err = self._capsys.readouterr()
        return status

    def json(self, *given: str) -> dict[str, Any]:
        assert self.run(*given, "--json") == 0, self.err
        (line,) = self.out.removesuffix("\n").split("\n")  # a text may hold any other line break
        value: dict[str, Any] = json.loads(line)
        return value
