"""A user's session on the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8")
PATIENCE = 120_000  # milliseconds


class Visit:
    """Any error in the browser console fails the test, unless it is in `expected`."""

    def __init__(self, page: Any, url: str, *, expected: str = "") -> None:
        self.page = page
        self.mistakes: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: self.mistakes.append(str(error)))
        page.on("console", lambda message: message.type == "error" and self._note(message.text, expected))
        page.goto(url)
        page.locator("body[data-connection]").wait_for()

    def _note(self, text: str, expected: str) -> None:
        if not expected or not re.search(expected, text):
            self.mistakes.append(text)

    def set(self, name: str, value: str) -> None:
        """Write a value into the parameters."""
        if not self.page.locator("#side").is_visible():
            self.page.locator("#panel").click()
        self.page.locator(f"#p-{name}").fill(value)

    def ask(self, text: str) -> None:
        self.page.locator("#ask").fill(text)
        self.page.locator("#ask").press("Enter")

    def converse(self, text: str) -> None:
        """Send a message and wait for the reply."""
        before = self.messages.count()
        self.ask(text)
        self.messages.nth(before + 1).wait_for()
        self.wait_for_end()

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).last.click()

    def wait_for_end(self) -> None:
        self.page.locator("#send").wait_for(state="visible")

    def show_tokens(self) -> None:
        if self.page.locator("#tokens").get_attribute("aria-checked") != "true":
            self.page.locator("#tokens").click()

    @property
    def messages(self) -> Any:
        return self.page.locator(".message")

    @property
    def tokens(self) -> Any:
        """The tokens of the last reply, which shows them."""
        return self.page.locator(".assistant").last.locator("> .text > .said > .t")

    def texts(self) -> list[str]:
        """What the messages on the page say."""
        said = self.messages.all()
        return [str(one.locator(".said, .prose").locator("visible=true").first.inner_text()) for one in said]

    def reply(self) -> str:
        return str(self.page.locator(".assistant > .text").last.inner_text())

    def facts(self) -> str:
        return str(self.page.locator(".facts").last.inner_text())

    def seed(self) -> int:
        found = re.search(r"seed (\d+)", self.facts())
        assert found is not None
        return int(found[1])

    def verdict(self) -> str:
        last = self.page.locator(".assistant .verdict").last
        last.locator(
            "xpath=self::*[contains(@class,'same') or contains(@class,'different') or contains(@class,'unknown')]"
        ).wait_for()
        return str(last.inner_text())

    def rows(self) -> list[str]:
        """The titles in the list of conversations."""
        return [str(title) for title in self.page.locator("#conversations .open").all_inner_texts()]

    def findings(self) -> list[str]:
        """Serious accessibility violations that axe reports."""
        self.page.evaluate(AXE)
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        grave = [finding for finding in found["violations"] if finding["impact"] in ("serious", "critical")]
        return [f"{finding['id']}: {[node['target'] for node in finding['nodes']][:3]}" for finding in grave]
