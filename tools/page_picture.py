"""Make docs/page.webp, the animated picture in the README: a reply on the chat page, its drafted tokens in green, and its replay.

It drives the page of a running server in Chromium and takes screenshots as the reply comes, so the picture shows what a visitor
sees, waits of over LONGEST shortened. `onedraw serve smollm2` in one terminal, `python -m tools.page_picture` in another.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

OUT = Path(__file__).parents[1] / "docs" / "page.webp"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUESTION = "Write a Python class for a stack with push, pop and is_empty."
SEED = 2
STOP = "\n\nExample"  # The reply goes on with an example, which would not fit into the picture.
WIDTH, HEIGHT = 860, 800
PATIENCE = 300_000  # milliseconds
LONGEST = 170  # milliseconds that a frame of a running reply is shown at most
REPLY_EVERY, REPLAY_EVERY = 0.17, 1.0  # seconds between frames: of a reply, and of its replay, where only a number changes


class Film:
    """Frames and how long each is shown, in milliseconds. Equal frames in a row become one."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self.frames: list[Image.Image] = []
        self.durations: list[int] = []

    def take(self, duration: int) -> None:
        frame = Image.open(io.BytesIO(self._page.screenshot())).convert("RGB")
        if self.frames and frame.tobytes() == self.frames[-1].tobytes():
            self.durations[-1] += duration
        else:
            self.frames.append(frame)
            self.durations.append(duration)

    def follow(self, going: Callable[[], bool], *, every: float) -> None:
        """Take a frame every so many seconds until the reply has ended."""
        while going():
            begun = time.monotonic()
            self.take(0)
            self._page.wait_for_timeout(1000 * max(every - (time.monotonic() - begun), 0))
            self.durations[-1] = min(self.durations[-1] + int(1000 * (time.monotonic() - begun)), LONGEST)

    def save(self, file: Path, quality: int) -> None:
        first, *others = self.frames
        first.save(file, save_all=True, append_images=others, duration=self.durations, loop=0, quality=quality, method=6)


def film(page: Any, url: str) -> Film:
    """Ask the question on the page, wait for the reply, and replay it without drafts."""
    page.set_default_timeout(PATIENCE)
    page.goto(url)
    page.locator("body[data-connection=up]").wait_for()
    page.locator("#panel").click()
    page.locator("#p-seed").fill(str(SEED))
    page.locator("#side summary", has_text="More fields").click()
    page.locator("#p-more").fill(json.dumps({"stop": [STOP]}))
    page.locator("#panel").click()
    page.locator("#tokens").click()
    page.locator("#ask").focus()
    page.mouse.move(0, HEIGHT - 1)
    taken = Film(page)
    taken.take(600)
    for end in range(0, len(QUESTION) + 1, 6):
        page.locator("#ask").fill(QUESTION[:end])
        taken.take(90)
    page.locator("#ask").fill(QUESTION)
    taken.take(500)
    page.locator("#ask").press("Enter")
    taken.follow(lambda: not page.locator("#send").is_visible(), every=REPLY_EVERY)
    page.wait_for_timeout(300)
    taken.take(2200)
    page.get_by_role("button", name="Replay without drafts").last.click()
    verdict = page.locator(".assistant .verdict").last
    taken.follow(lambda: "same" not in (verdict.get_attribute("class") or ""), every=REPLAY_EVERY)
    taken.take(5000)
    return taken


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(prog="python -m tools.page_picture", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/", help="the page of a running server (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    parser.add_argument("--quality", type=int, default=60, metavar="N", help="of the WebP, 0 to 100 (default: %(default)s)")
    arguments = parser.parse_args()
    program = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if program is None:
        raise SystemExit("no browser is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        taken = film(page, arguments.url)
        browser.close()
    taken.save(arguments.out, arguments.quality)
    size = arguments.out.stat().st_size / 1024
    print(f"{arguments.out}: {len(taken.frames)} frames, {sum(taken.durations) / 1000:.1f} s, {size:.0f} KiB")


if __name__ == "__main__":
    main()
