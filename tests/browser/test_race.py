"""The race of a reply with and without drafts, and the picture of a reply."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Pace
from tests.browser.visit import Visit
from tests.server.running import Served


@pytest.fixture
def visit(browser: Any, model: Served) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    visitor = Visit(context.new_page(), model.url)
    visitor.set("max_tokens", "60")
    visitor.set("seed", "7")
    yield visitor
    context.close()
    assert visitor.mistakes == []


def race(visit: Visit) -> list[dict[str, Any]]:
    """Run a race to its end; returns the requests."""
    asked: list[dict[str, Any]] = []
    visit.page.on("request", lambda request: "chat/completions" in request.url and asked.append(request.post_data_json))
    visit.press("Race")
    visit.page.locator("#race-verdict.same, #race-verdict.different").wait_for()
    return asked


def test_a_race_shows_equal_tokens(visit: Visit, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "seconds", 0.02)  # so that a step costs the same with drafts and without, as in a large model
    visit.set("temperature", "0")
    visit.converse("1 2 3 4 1 2 3 4 1 2 3 4")
    first, second = race(visit)
    assert (first.pop("speculation"), second.pop("speculation")) == (True, False)
    assert first == second
    assert re.search(r"Same tokens, \d\.\d × faster", visit.page.locator("#race-verdict").inner_text())
    note = visit.page.locator("#race-note").inner_text()
    assert re.search(r"60 tokens, [1-9]\d* of them drafted. Seed 7, onedraw-", note), note
    lanes = visit.page.locator(".lane")
    drafted, plain = (lanes.nth(lane).locator(".lane-text").inner_text() for lane in (0, 1))
    assert drafted == plain != ""
    assert lanes.nth(0).locator(".kept").count() > 0
    assert lanes.nth(1).locator(".kept").count() == 0
    assert visit.findings() == []
    assert visit.page.evaluate("document.activeElement.id") == "race-picture"
    visit.page.keyboard.press("Escape")
    visit.page.locator("#race").wait_for(state="hidden")
    assert visit.page.locator("#send").is_visible()


def test_a_race_that_finds_a_difference_says_where(visit: Visit) -> None:
    """Planted: the run without drafts has another seed."""

    def change_the_seed(route: Any) -> None:
        body = route.request.post_data_json
        if body.get("speculation") is False:
            body["seed"] += 1
        route.continue_(post_data=json.dumps(body))

    visit.page.route("**/v1/chat/completions", change_the_seed)
    visit.set("temperature", "1")
    visit.converse("hello")
    race(visit)
    assert re.search(r"Different without drafts, first at token \d+", visit.page.locator("#race-verdict").inner_text())
    assert not visit.page.locator("#race-picture").is_visible()
    visit.page.locator("#race-close").click()


def test_a_race_is_stopped_by_closing_it(visit: Visit, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    visit.converse("hello")
    monkeypatch.setattr(pace, "seconds", 0.3)
    visit.press("Race")
    visit.page.locator(".lane-state", has_text="tokens").first.wait_for()
    visit.page.keyboard.press("Escape")
    visit.wait_for_end()
    monkeypatch.setattr(pace, "seconds", Pace.usual)
    visit.converse("next")
    assert visit.messages.count() == 4


RECORD = """() => {
    const said = [];
    const write = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
        said.push(text);
        write.call(this, text, ...place);
    };
    return said;
}"""  # notes what is written into a canvas


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_shows_drafted_tokens_seed_and_fingerprint(browser: Any, model: Served, scheme: Any, tmp_path: Path) -> None:
    context = browser.new_context(color_scheme=scheme, accept_downloads=True)
    visit = Visit(context.new_page(), model.url)
    for name, value in (("max_tokens", "60"), ("temperature", "0"), ("seed", "7")):
        visit.set(name, value)
    visit.converse("1 2 3 4 1 2 3 4 1 2 3 4")
    drawn = visit.page.evaluate_handle(RECORD)
    visit.press("Picture")
    canvas = visit.page.locator("#picture canvas")
    canvas.wait_for()
    words = " ".join(drawn.json_value())
    assert "seed 7" in words
    assert "onedraw-" in words
    kept = re.search(r"(\d+) of 60 tokens drafted", words)
    assert kept is not None
    assert int(kept[1]) > 0
    assert f"{kept[1]} of 60 tokens marked as drafted" in canvas.get_attribute("aria-label")
    green = visit.page.evaluate(
        """() => {
            const canvas = document.querySelector("#picture canvas");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const probe = document.createElement("span");
            probe.style.color = "var(--kept)";
            document.body.append(probe);
            const [r, g, b] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
            let count = 0;
            for (let i = 0; i < data.length; i += 4) if (data[i] === r && data[i + 1] === g && data[i + 2] === b) count += 1;
            return count;
        }"""
    )
    assert green > 2000  # pixels in the colour of drafted tokens
    assert visit.findings() == []
    with visit.page.expect_download() as download:
        visit.press("Save PNG")
    assert download.value.suggested_filename == "onedraw-seed-7.png"
    download.value.save_as(tmp_path / "picture.png")
    content = (tmp_path / "picture.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 1_000_000
    assert visit.mistakes == []
    context.close()
