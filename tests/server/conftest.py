"""The servers that tests share: over the fake backend, and over torch with the default model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onedraw.build.llm import build_llm
from onedraw.settings import Settings
from tests.server.running import Served, fake_llm, serving


@pytest.fixture(scope="session")
def fake() -> Iterator[Served]:
    with fake_llm() as llm, serving(llm) as served:
        yield served


@pytest.fixture(scope="session", params=["fake", pytest.param("smollm2", marks=pytest.mark.weights)])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server; every test that uses this fixture runs on both backends."""
    if request.param == "fake":
        yield request.getfixturevalue("fake")
        return
    with build_llm(Settings(model="smollm2", max_context=1024)) as llm, serving(llm) as running:
        yield running
