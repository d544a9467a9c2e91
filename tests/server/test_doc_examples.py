"""The Python examples in docs/ run unchanged against the fake model under the documented name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import onedraw
from onedraw.server.config import ServerOptions
from tests.server.running import Served, fake_llm, serving

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = [
    pytest.param(example, id=f"{page}-{number}")
    for page in ("structured", "tools", "clients")
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.S))
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with fake_llm() as llm, serving(llm, ServerOptions(aliases=("smollm2",))) as running:
        yield running


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the examples do not close their clients
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(
    served: Served, example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "import ollama" in example:
        pytest.importorskip("ollama")  # tests/clients has it
    seeds = itertools.count(7)  # some examples set no seed; with this one they get the same reply every time
    monkeypatch.setattr("onedraw.llm.request_options.secrets.randbelow", lambda limit: next(seeds))
    load = onedraw.load
    monkeypatch.setattr(onedraw, "load", lambda model: load(model, backend="fake"))
    exec(compile(example.replace("http://127.0.0.1:8000", served.url), "example", "exec"), {})
    assert capsys.readouterr().out.strip()
