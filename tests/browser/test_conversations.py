"""Conversations on the page: kept in the browser, found again, renamed, deleted, exported, imported, branched and repaired."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Pace
from tests.browser.visit import Visit
from tests.server.running import Served, fake_llm, serving, slowed

DOWN = "Failed to load resource|ERR_CONNECTION|ERR_INCOMPLETE|ERR_EMPTY"  # what the browser notes of a server that is down


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with fake_llm() as llm, serving(llm) as served:
        yield served


@pytest.fixture
def visit(browser: Any, server: Served) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    visitor = Visit(context.new_page(), server.url)
    visitor.set("max_tokens", "12")
    yield visitor
    context.close()
    assert visitor.mistakes == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def reloaded(visit: Visit) -> None:
    visit.page.reload()
    visit.page.locator("body[data-connection=up]").wait_for()


def test_a_conversation_survives_a_reload_and_a_restart_of_the_server(browser: Any) -> None:
    """Twenty messages. The server dies in between: the page says so, keeps the unsent message, and connects again by itself."""
    port = free_port()
    context = browser.new_context()
    with fake_llm() as llm:
        with serving(llm, port=port) as served:
            visit = Visit(context.new_page(), served.url, expected=DOWN)
            visit.set("max_tokens", "8")
            for number in range(10):
                visit.converse(f"message {number}")
            assert visit.messages.count() == 20
            said = visit.texts()
            reloaded(visit)
            assert visit.texts() == said
            facts = visit.facts()
            assert "seed" in facts
        visit.ask("are you there?")
        visit.page.locator("#down").wait_for(state="visible")
        assert "does not answer" in visit.page.locator("#down").inner_text()
        if visit.messages.count() == 22:  # sent before the page knew: the failed message can be taken out again
            assert "does not answer" in visit.page.locator(".assistant [role=alert]").last.inner_text()
            visit.page.locator(".user").last.get_by_role("button", name="Remove from here on").click()
        visit.ask("are you there?")
        visit.page.get_by_text("Not sent").wait_for()
        assert visit.page.locator("#ask").input_value() == "are you there?"
        with serving(llm, port=port):
            visit.page.locator("body[data-connection=up]").wait_for()
            visit.page.locator("#down").wait_for(state="hidden")
            assert visit.texts() == said
            reloaded(visit)
            assert visit.texts() == said
            assert visit.facts() == facts
            visit.press("Replay without drafts")
            assert "Same tokens" in visit.verdict()
            visit.converse("and now?")
            assert visit.messages.count() == 22
            assert visit.mistakes == []
    context.close()


def test_a_reply_that_a_dead_server_cut_is_continued_exactly(
    browser: Any, model: Served, pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = browser.new_context()
    port = free_port()
    fields = {"max_tokens": "60", "temperature": "0.8", "seed": "11"}
    with serving(model.llm, port=port) as served:
        visit = Visit(context.new_page(), served.url, expected=DOWN)
        for name, value in fields.items():
            visit.set(name, value)
        visit.converse("def add(a, b):")
        whole = visit.reply()
        visit.press("New chat")
        monkeypatch.setattr(pace, "seconds", 0.1)
        visit.ask("def add(a, b):")
        visit.page.locator(".facts", has_text="drafted").wait_for()
        visit.page.wait_for_timeout(1500)  # the page saves a growing reply each second
        visit.page.reload()  # closes the stream in its middle, as a dead tab would
    monkeypatch.setattr(pace, "seconds", Pace.usual)
    with serving(model.llm, port=port):
        visit.page.reload()
        visit.page.locator("body[data-connection=up]").wait_for()
        assert "closed before the reply ended" in visit.page.locator(".assistant [role=alert]").inner_text()
        assert visit.reply() != whole
        visit.press("Continue")
        visit.wait_for_end()
        assert visit.reply() == whole
        assert "60 tokens" in visit.facts()
        reloaded(visit)
        assert visit.reply() == whole
        assert visit.mistakes == []
    context.close()


def test_conversations_are_found_renamed_deleted_and_brought_back(visit: Visit) -> None:
    for text in ("first about apples", "second about pears"):
        visit.press("New chat")
        visit.converse(text)
    assert visit.rows() == ["second about pears", "first about apples"]
    visit.page.locator("#conversations .open", has_text="first").click()
    visit.page.locator(".user", has_text="apples").wait_for()
    visit.converse("tell me of cherries")

    search = visit.page.locator("#search")
    search.fill("CHERR")
    visit.page.locator("#search-count", has_text="1 found").wait_for()
    assert visit.rows() == ["first about apples"]
    search.fill("nowhere")
    visit.page.get_by_text("Nothing found").wait_for()
    search.press("Escape")
    visit.page.locator("#conversations .row").nth(1).wait_for()

    row = visit.page.locator("#conversations .row", has_text="first")
    row.hover()
    row.get_by_role("button", name="Rename").click()
    visit.page.get_by_label("Title").fill("fruit")
    visit.page.keyboard.press("Enter")
    visit.page.locator("#conversations .open", has_text="fruit").wait_for()
    reloaded(visit)
    assert set(visit.rows()) == {"fruit", "second about pears"}
    assert visit.messages.count() == 4

    row = visit.page.locator("#conversations .row", has_text="fruit")
    row.hover()
    row.get_by_role("button", name="Delete").click()
    visit.page.locator("#notice button").wait_for()
    assert visit.rows() == ["second about pears"]
    assert visit.messages.count() == 0
    visit.press("Undo")
    visit.page.locator("#conversations .open", has_text="fruit").click()
    visit.messages.nth(3).wait_for()
    visit.page.locator(".user", has_text="cherries").wait_for()


def exported(visit: Visit, tmp_path: Path, name: str) -> Path:
    with visit.page.expect_download() as download:
        visit.press("Export all")
    download.value.save_as(tmp_path / name)
    return tmp_path / name


def plain(path: Path) -> list[Any]:
    """The conversations of an export with ids replaced by positions, since an import gives new ones."""
    conversations = json.loads(path.read_text())["conversations"]
    for conversation in conversations:
        number = {entry["id"]: position for position, entry in enumerate(conversation["entries"])}
        conversation["leaf"] = number[conversation["leaf"]]
        conversation.pop("id")
        for entry in conversation["entries"]:
            entry["parent"] = number.get(entry["parent"])
            entry["id"] = number[entry["id"]]
    return sorted(conversations, key=lambda one: str(one["title"]))


def test_an_export_is_imported_as_it_was(visit: Visit, tmp_path: Path) -> None:
    visit.converse("one")
    visit.press("New reply")
    visit.wait_for_end()
    visit.converse("two")
    visit.press("New chat")
    visit.converse("three")
    first = exported(visit, tmp_path, "first.json")
    assert [len(one["entries"]) for one in plain(first)] == [5, 2]

    for _ in range(2):
        row = visit.page.locator("#conversations .row").first
        row.hover()
        row.get_by_role("button", name="Delete").click()
        visit.page.locator("#notice button").wait_for()
    visit.page.get_by_text("Conversations are kept in this browser").wait_for()
    visit.page.locator("#import-file").set_input_files(first)
    visit.page.get_by_text("2 conversations imported").wait_for()
    assert plain(exported(visit, tmp_path, "second.json")) == plain(first)
    visit.page.locator("#conversations .open", has_text="one").click()
    visit.messages.nth(3).wait_for()
    assert visit.page.locator(".versions").first.inner_text() == "2/2"
    visit.press("Replay without drafts")
    assert "Same tokens" in visit.verdict()


def entry(**fields: Any) -> dict[str, Any]:
    return {"id": "a", "parent": None, "role": "user", "created": 1, "text": "x", "files": [], **fields}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", '"format" is not'),
        ('{"format": "onedraw-conversations", "version": 9}', "has version 9"),
        ([entry(role="<b>")], "has the role"),
        ([entry(), entry()], "two entries have one id"),
        ([entry(parent="b"), entry(id="b", parent="a")], "a parent that does not exist"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(visit: Visit, tmp_path: Path, content: Any, reason: str) -> None:
    path = tmp_path / "import.json"
    if not isinstance(content, str):
        told = {"id": "c", "title": "t", "created": 1, "updated": 1, "leaf": "a", "entries": content}
        content = json.dumps({"format": "onedraw-conversations", "version": 1, "conversations": [told]})
    path.write_text(content)
    visit.page.locator("#import-file").set_input_files(path)
    visit.page.locator("#notice.wrong", has_text=reason).wait_for()
    assert visit.rows() == []


def test_a_file_of_somebody_else_cannot_harm(visit: Visit, tmp_path: Path) -> None:
    """Wrong types everywhere, markup in every text: what is no text is dropped, and what is stays text."""
    markup = "<img src=x onerror=ran=1>"
    reply = {
        "fields": {"messages": [], "__proto__": {"x": 1}},
        "runs": [[0, markup, 0], 7, [0, {}, 99]],
        "tokens": [[1, markup, 1, "x", None, [["a"], 5]], "no"],
        "calls": [{"name": markup, "arguments": markup}, None],
        "turns": [["a"], {}],
        "error": {"message": markup},
        "seed": markup,
        "fingerprint": markup,
        "done": True,
    }
    entries = [
        entry(text=markup, files=[{"name": markup, "text": markup}, 3]),
        entry(id="b", parent="a", role="assistant", reply=reply),
    ]
    told = {"id": markup, "title": markup, "created": "x", "updated": None, "leaf": "b", "entries": entries}
    path = tmp_path / "import.json"
    path.write_text(json.dumps({"format": "onedraw-conversations", "version": 1, "conversations": [told]}))
    visit.page.locator("#import-file").set_input_files(path)
    visit.messages.nth(1).wait_for()
    visit.show_tokens()
    visit.page.locator(".assistant .said .kept").hover()
    assert visit.page.locator("#log img").count() == 1  # the page's own, of the empty conversation
    assert visit.page.evaluate("window.ran ?? null") is None
    assert visit.rows() == [markup]


def test_a_message_that_is_too_long_is_edited_or_taken_out(browser: Any, model: Served) -> None:
    context = browser.new_context()
    visit = Visit(context.new_page(), model.url, expected="400")
    visit.set("max_tokens", "8")
    visit.converse("one")
    visit.ask("word " * 2000)
    visit.messages.nth(3).wait_for()
    visit.wait_for_end()
    assert "context" in visit.page.locator(".assistant [role=alert]").last.inner_text()
    visit.press("Edit message")
    area = visit.page.locator(".user textarea")
    assert area.input_value().startswith("word word")
    area.fill("short")
    visit.press("Send again")
    visit.wait_for_end()
    assert visit.page.locator(".assistant [role=alert]").last.inner_text() == ""
    assert visit.messages.count() == 4
    visit.page.locator(".user").last.get_by_role("button", name="Previous version").click()
    visit.page.locator(".user").last.get_by_role("button", name="Remove from here on").click()
    visit.page.locator("#notice button").wait_for()
    assert "short" in visit.page.locator(".user").last.inner_text()  # the other version is left
    visit.press("Undo")
    assert "word word" in visit.page.locator(".user").last.inner_text()
    assert visit.mistakes == []
    context.close()


def test_text_files_are_attached_within_bounds(visit: Visit, tmp_path: Path) -> None:
    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    notes = file("notes.md", "naïve ```code```\n".encode())
    pick, notice = visit.page.locator("#attach-file"), visit.page.locator("#notice.wrong")
    pick.set_input_files([notes, file("b.txt", b"b")])
    visit.page.locator("#files .file").nth(1).wait_for()
    visit.page.get_by_role("button", name="Remove b.txt").click()
    for name, content, reason in (
        ("image.png", b"\x89PNG\x00\xff", "not a text file"),
        ("zero.txt", b"a\0b", "not a text file"),
        ("large.txt", b"x" * (256 * 1024 + 1), "may have 256 KiB"),
    ):
        pick.set_input_files(file(name, content))
        notice.filter(has_text=reason).wait_for()
    assert visit.page.locator("#files .file").count() == 1
    assert visit.findings() == []
    with visit.page.expect_request("**/v1/chat/completions") as asked:
        visit.ask("what is it?")
    sent = asked.value.post_data_json["messages"][-1]["content"]
    assert sent == 'File "notes.md":\n````\nnaïve ```code```\n````\n\nwhat is it?'
    visit.wait_for_end()
    reloaded(visit)
    visit.page.locator(".sent-file summary").click()
    assert "naïve" in visit.page.locator(".sent-file pre").inner_text()
    for number in range(9):
        pick.set_input_files(file(f"{number}.txt", b"x" * 1000))
    notice.filter(has_text="may have 8 files").wait_for()
    assert visit.page.locator("#files .file").count() == 8


def test_a_reply_goes_on_while_another_conversation_is_open(browser: Any) -> None:
    context = browser.new_context()
    with fake_llm() as llm:
        pace = Pace()
        pace.seconds = 0.1
        with serving(slowed(llm, 0, pace)) as served:
            visit = Visit(context.new_page(), served.url)
            visit.set("max_tokens", "30")
            visit.ask("slow one")
            visit.page.locator(".facts", has_text="tokens").wait_for()
            visit.press("New chat")
            assert visit.messages.count() == 0
            assert visit.page.locator("#stop").is_visible()
            visit.page.locator("#conversations .open").click()
            visit.messages.nth(1).wait_for()
            visit.wait_for_end()
            assert "30 tokens" in visit.facts()
            assert visit.mistakes == []
    context.close()


def test_a_conversation_by_keyboard_alone(visit: Visit) -> None:
    """Send, read tokens, copy nothing with a mouse: edit the message, make another reply, open the list, start a new chat."""
    keys = visit.page.keyboard

    def focused() -> str:
        return str(
            visit.page.evaluate(
                "document.activeElement.ariaLabel || document.activeElement.innerText || document.activeElement.id"
            )
        )

    def tab_to(name: str, *, back: bool = False) -> None:
        for _ in range(60):
            if name in focused():
                return
            keys.press("Shift+Tab" if back else "Tab")
        raise AssertionError(f"{name} is not reached by Tab")

    visit.page.locator("#panel").click()  # closes the parameters that the fixture opened
    visit.page.locator("#ask").focus()
    keys.type("hello")
    keys.press("Enter")
    visit.messages.nth(1).wait_for()
    visit.wait_for_end()
    keys.press("ArrowUp")  # edits the last message
    keys.type(" world")
    keys.press("Enter")
    visit.page.locator(".user", has_text="hello world").wait_for()
    visit.wait_for_end()
    visit.page.locator("#ask").focus()
    tab_to("New reply", back=True)
    keys.press("Enter")
    visit.page.locator(".assistant .versions", has_text="2/2").wait_for()
    tab_to("Previous version", back=True)
    keys.press("Enter")
    visit.page.locator(".assistant .versions", has_text="1/2").wait_for()
    tab_to("Tokens", back=True)
    keys.press("Space")
    tab_to("arrow keys go from token to token")
    keys.press("ArrowRight")
    visit.page.locator("#inspector").wait_for(state="visible")
    keys.press("Escape")
    visit.page.locator("#inspector").wait_for(state="hidden")
    tab_to("New chat", back=True)
    keys.press("Enter")
    assert visit.messages.count() == 0
    assert focused() == "ask"
    tab_to("hello", back=True)
    keys.press("Enter")
    visit.messages.nth(1).wait_for()
