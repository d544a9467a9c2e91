"""Debian's Chromium, driven by playwright. Where either is missing the tests are skipped with the reason, unless
ONEDRAW_REQUIRE_BROWSER is set, as `.ci/run` does: then they fail."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onedraw.build.llm import build_llm
from onedraw.settings import Settings
from tests.server.running import Served, serving, slowed

TRAINED = Path(__file__).parents[1] / "fixtures" / "trained"
NAMES = ("chromium", "chromium-browser", "google-chrome")


def missing(reason: str) -> None:
    if os.environ.get("ONEDRAW_REQUIRE_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed: pip install 'onedraw[browser]'")
    program = next((path for path in map(shutil.which, NAMES) if path), None)
    if program is None:
        missing("no browser is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        # Tests run as root in containers, where Chromium's own sandbox cannot start.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Pace:
    """The duration of an engine step, which tests change while the server runs."""

    usual = 0.004
    seconds = usual

    def wait(self, _: float) -> None:
        time.sleep(self.seconds)


@pytest.fixture(scope="module")
def pace() -> Pace:
    return Pace()


@pytest.fixture(scope="module")
def model(browser: Any, pace: Pace) -> Iterator[Served]:
    """A small real model with its drafter, so that drafts are kept and rejected. Steps are slowed as in a larger model."""
    settings = Settings(
        model=str(TRAINED / "trained_qwen3"),
        draft=("ngram", str(TRAINED / "trained_dflash_qwen3")),
        draft_tokens=4,
        max_context=512,
        threads=1,
        self_check=False,
    )
    with build_llm(settings) as llm, serving(slowed(llm, pace.usual, pace)) as served:
        yield served
