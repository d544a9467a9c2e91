"""The servers that tests share: over the fake backend, and over torch with the default model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onedraw.build.llm import open_door
from onedraw.settings import Settings
from tests.serve.running import Served, fake_door, serving


@pytest.fixture(scope="session")
def fake() -> Iterator[Served]:
    with fake_door() as door, serving(door) as served:
        yield served


@pytest.fixture(scope="session", params=["fake", pytest.param("smollm2", marks=pytest.mark.weights)])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Every test that asks for this runs on both backends."""
    if request.param == "fake":
        yield request.getfixturevalue("fake")
        return
    with open_door(Settings(model="smollm2", max_context=1024)) as door, serving(door) as running:
        yield running
