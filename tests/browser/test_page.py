"""The web page in a real browser: a typical session, its contents, authentication and accessibility."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from onedraw.server.config import ServerOptions
from onedraw.server.page import POLICY
from tests.browser.conftest import Pace
from tests.browser.visit import Visit
from tests.server.running import Served, fake_llm, serving

SEED = "7"


@pytest.fixture
def visit(browser: Any, model: Served) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    visitor = Visit(context.new_page(), model.url)
    visitor.set("max_tokens", "48")
    visitor.set("temperature", "0.7")
    visitor.set("seed", SEED)
    visitor.show_tokens()
    yield visitor
    context.close()
    assert visitor.mistakes == []


def test_a_typical_session(visit: Visit, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a message, stop the reply and continue it, edit the message, generate another reply, replay without drafts."""
    visit.set("max_tokens", "100")
    visit.converse("def add(a, b):")
    whole = visit.reply()
    visit.press("New chat")
    with monkeypatch.context() as patched:
        patched.setattr(pace, "seconds", 0.25)  # slow enough to be stopped, however slow the browser is
        visit.ask("def add(a, b):")
        visit.tokens.nth(5).wait_for()
        visit.press("Stop")
        visit.wait_for_end()
    assert visit.reply() != whole
    assert "stopped by you" in visit.facts()
    visit.press("Replay without drafts")
    assert "Same tokens without drafts" in visit.verdict()
    visit.press("Continue")
    visit.wait_for_end()
    assert visit.reply() == whole
    assert "100 tokens" in visit.facts()

    visit.set("max_tokens", "48")
    visit.press("Edit")
    visit.page.locator(".user textarea").fill("one two three one two three")
    visit.press("Send again")
    visit.wait_for_end()
    assert visit.page.locator(".assistant").count() == 1
    assert "one two three" in visit.page.locator(".user").inner_text()
    first, seed = visit.reply(), visit.seed()
    assert "48 tokens" in visit.facts()

    visit.press("New reply")
    visit.wait_for_end()
    assert visit.seed() != seed
    assert visit.reply() != first
    visit.press("Previous version")
    assert (visit.reply(), visit.seed()) == (first, seed)
    visit.page.locator(".user").get_by_role("button", name="Previous version").click()
    assert visit.reply() == whole

    visit.press("Replay without drafts")
    assert "Same tokens without drafts: 100 of 100" in visit.verdict()
    visit.converse("and now?")
    assert visit.messages.count() == 4


def test_kept_drafts_are_marked(visit: Visit) -> None:
    visit.set("temperature", "0")
    visit.set("max_tokens", "80")
    with visit.page.expect_request("**/v1/chat/completions") as asked:
        visit.ask("1 2 3 4 1 2 3 4 1 2 3 4")
    assert asked.value.post_data_json["return_token_details"] is True
    visit.wait_for_end()
    kept, sampled = (visit.page.locator(f".assistant > .text .t.{kind}") for kind in ("kept", "sampled"))
    assert kept.count() > 0
    assert sampled.count() > 0
    numbers = re.search(r"(\d+) tokens: (\d+) drafted (\d+) sampled", visit.facts())
    assert numbers is not None
    assert int(numbers[1]) == int(numbers[2]) + int(numbers[3])
    assert kept.first.evaluate("e => getComputedStyle(e).backgroundColor") != sampled.first.evaluate(
        "e => getComputedStyle(e).backgroundColor"
    )
    kept.first.hover()
    card = visit.page.locator("#inspector")
    assert "a draft that was right" in card.inner_text()
    assert card.locator("tbody tr").count() >= 5
    assert "%" in card.locator("tr.said").inner_text()
    for name in ("tokens/s", "tokens per step", "drafts kept"):
        plot = visit.page.locator(".plot", has_text=name)
        assert re.search(r"\d", plot.inner_text())
        assert plot.locator("path").get_attribute("d").startswith("M")
    visit.page.keyboard.press("Escape")
    assert card.is_hidden()


def test_tokens_are_reached_by_keyboard_and_announced_to_screen_readers(visit: Visit) -> None:
    visit.ask("hello")
    visit.wait_for_end()
    visit.page.locator(".assistant > .text > .said").focus()
    visit.page.keyboard.press("ArrowRight")
    visit.page.keyboard.press("ArrowRight")
    told = visit.page.locator("#status").inner_text()
    assert re.search(r"token 2 of 48, (kept|sampled), [\d.<> ]+%", told), told
    visit.page.keyboard.press("End")
    assert re.search(r"token 4\d of 48", visit.page.locator("#status").inner_text())
    visit.page.locator("#inspector").wait_for(state="visible")


def test_a_difference_is_shown_where_it_begins(visit: Visit) -> None:
    """Planted: the replay is run with another seed."""

    def change_the_seed(route: Any) -> None:
        body = route.request.post_data_json
        if body.get("speculation") is False:
            body["seed"] += 1
        route.continue_(post_data=json.dumps(body))

    visit.page.route("**/v1/chat/completions", change_the_seed)
    visit.set("temperature", "1")
    visit.ask("hello")
    visit.wait_for_end()
    visit.press("Replay without drafts")
    assert re.search(r"Different without drafts, first at token \d+: “.+” before, “.+” now", visit.verdict())


BREAKS = """() => {
  const real = window.fetch;
  window.fetch = async (...given) => {
    const answer = await real(...given);
    if (!String(given[0]).includes("chat")) return answer;
    window.fetch = real;
    const reader = answer.body.getReader();
    let left = 7;
    const body = new ReadableStream({
      async pull(to) {
        if (left-- === 0) { to.error(new TypeError("the line is dead")); return reader.cancel(); }
        const { value, done } = await reader.read();
        if (done) to.close(); else to.enqueue(value);
      },
    });
    return new Response(body, { status: 200, headers: answer.headers });
  };
}"""  # the first reply's connection breaks off in the middle


def test_an_incomplete_reply_is_compared_up_to_its_end(visit: Visit, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "seconds", 0.05)  # so that the stream arrives in several reads
    visit.page.evaluate(BREAKS)
    visit.ask("def add(a, b):")
    visit.wait_for_end()
    visit.page.locator(".assistant [role=alert]").wait_for()
    monkeypatch.setattr(pace, "seconds", Pace.usual)
    visit.press("Replay without drafts")
    assert "Same tokens without drafts" in visit.verdict()
    visit.press("Continue")
    visit.wait_for_end()
    assert "48 tokens" in visit.facts()
    assert "interrupted" not in visit.facts()
    visit.press("Replay without drafts")
    assert "Same tokens without drafts: 48 of 48" in visit.verdict()


def test_an_invalid_setting_does_not_lose_the_conversation(visit: Visit) -> None:
    messages = visit.page.locator(".message")
    for text in ("one", "two"):
        visit.ask(text)
        visit.wait_for_end()
    assert messages.count() == 4
    visit.page.locator("summary", has_text="More fields").click()
    for wrong in ("{nonsense", '{"n": 2}'):
        visit.set("more", wrong)
        visit.page.get_by_role("button", name="Edit").first.click()
        visit.page.keyboard.press("Enter")
        visit.page.keyboard.press("Escape")
        visit.ask("three")
        assert visit.page.locator("#ask").input_value() == "three"
        assert messages.count() == 4
    visit.set("more", "")
    with visit.page.expect_request("**/v1/chat/completions") as asked:
        visit.ask("three")
    assert [said["role"] for said in asked.value.post_data_json["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    visit.wait_for_end()


def test_an_edit_waits_for_the_reply_and_its_escape_does_not_stop_it(
    visit: Visit, pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit.ask("one")
    visit.wait_for_end()
    visit.press("Edit")
    monkeypatch.setattr(pace, "seconds", 0.1)
    visit.set("max_tokens", "300")
    visit.ask("two")
    area, stop = visit.page.locator(".user textarea"), visit.page.locator("#stop")
    stop.wait_for()
    area.press("Enter")
    assert visit.page.locator(".message").count() == 4
    area.press("Escape")
    area.wait_for(state="detached")
    assert stop.is_visible()
    visit.page.keyboard.press("Escape")
    visit.wait_for_end()
    assert "stopped" in visit.facts()


def test_a_pinned_seed_gives_the_same_reply_in_a_new_chat(visit: Visit) -> None:
    visit.set("seed", "")
    visit.ask("hello")
    visit.wait_for_end()
    first = visit.reply()
    visit.press("Keep seed")
    visit.press("New chat")
    visit.ask("hello")
    visit.wait_for_end()
    assert visit.reply() == first


def test_reasoning_is_folded_and_the_arguments_of_a_call_are_shown(visit: Visit) -> None:
    def chunk(delta: dict[str, Any], **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "seed": 1, "finish_reason": None, "logprobs": None, "token_details": [], **more}
        return f"data: {json.dumps({'choices': [choice]})}\n\n"

    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Oslo"}'}}
    token = {"id": 5, "text": "hm", "kept": True, "rejected": 0}
    told = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "hm"}, token_details=[token]),
        chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [rest]}, finish_reason="tool_calls"),
        "data: [DONE]\n\n",
    ]
    stream = {"status": 200, "content_type": "text/event-stream", "body": "".join(told)}
    visit.page.route("**/v1/chat/completions", lambda route: route.fulfill(**stream))
    visit.ask("weather in Oslo?")
    visit.wait_for_end()
    thought, called = visit.page.locator("details.fold"), visit.page.locator(".call")
    assert not thought.locator(".said").is_visible()
    thought.locator("summary").click()
    assert thought.locator(".said .kept").inner_text() == "hm"
    assert called.locator(".call-name").inner_text() == "Tool call: weather"
    assert called.locator("pre").inner_text() == '{\n  "city": "Oslo"\n}'
    assert "ended by tool_calls" in visit.facts()


TOOL = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_calls_are_answered_with_results(visit: Visit) -> None:
    """A required call, its result typed in, the model's reply to it, and an edit of the result."""
    visit.page.locator("summary", has_text="Tools and reasoning").click()
    visit.set("tools", json.dumps([{"type": "function", "function": {"name": "weather", "strict": True, "parameters": TOOL}}]))
    visit.page.locator("#p-tool_choice").select_option("required")
    visit.page.locator("#p-effort").select_option("none")
    visit.page.locator("summary", has_text="More fields").click()
    visit.set("more", '{"parallel_tool_calls": false}')
    visit.set("max_tokens", "200")
    visit.ask("weather?")
    visit.wait_for_end()
    assert "ended by tool_calls" in visit.facts()
    visit.press("Replay without drafts")
    assert "Same tokens" in visit.verdict()
    assert visit.findings() == []

    visit.page.locator("#p-tool_choice").select_option("none")
    visit.set("max_tokens", "16")
    visit.page.get_by_label("Result of weather").fill("sunny")
    with visit.page.expect_request("**/v1/chat/completions") as asked:
        visit.press("Send result")
    *_, called, result = asked.value.post_data_json["messages"]
    (call,) = called["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Paris")
    assert result == {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    visit.wait_for_end()
    assert visit.page.locator(".message").count() == 4
    assert "sunny" in visit.page.locator(".results").inner_text()
    assert visit.findings() == []

    visit.page.get_by_label("Results of tools").get_by_role("button", name="Edit").click()
    assert visit.page.locator(".message").count() == 2
    again = visit.page.get_by_label("Result of weather")
    assert again.input_value() == "sunny"
    again.fill("rain")
    visit.press("Send result")
    visit.wait_for_end()
    assert "rain" in visit.page.locator(".results").inner_text()


def test_an_error_is_shown_with_the_servers_message(visit: Visit) -> None:
    visit.page.locator("summary", has_text="More fields").click()
    visit.set("more", '{"frobnicate": 1}')
    visit.ask("hello")
    visit.wait_for_end()
    assert "frobnicate: unknown field" in visit.page.locator(".assistant [role=alert]").inner_text()
    visit.mistakes[:] = [mistake for mistake in visit.mistakes if "400" not in mistake]  # the browser notes the status
    visit.set("more", "{nonsense")
    assert "not JSON" in visit.page.locator("#more-wrong").inner_text()
    visit.ask("hello again")
    assert visit.page.locator(".assistant").count() == 1


# ---------------------------------------------------------------------------------------------- accessibility


@pytest.mark.parametrize(
    ("scheme", "width", "height"),
    [("light", 1280, 800), ("dark", 1280, 800), ("light", 390, 780), ("dark", 390, 780)],
    ids=["light", "dark", "phone", "dark phone"],
)
def test_axe_finds_nothing_serious(
    browser: Any, model: Served, scheme: Any, width: int, height: int, request: pytest.FixtureRequest
) -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    visit = Visit(context.new_page(), model.url)
    visit.page.locator("#model strong").wait_for()
    assert visit.findings() == []
    visit.page.evaluate(
        f"for (const [name, value] of [['max_tokens', '40'], ['seed', '{SEED}']]) "
        "document.getElementById(`p-${name}`).value = value"
    )
    visit.converse("1 2 3 1 2 3 1 2 3")
    visit.press("Replay without drafts")
    assert "Same tokens" in visit.verdict()
    assert visit.findings() == []
    visit.show_tokens()
    visit.tokens.filter(has_text=re.compile(r"\w")).first.hover()  # a line break has no place to point at
    assert visit.findings() == []
    visit.page.keyboard.press("Escape")
    visit.page.locator("#panel").click()
    assert visit.page.locator("#params").is_visible()
    assert visit.findings() == []
    if width < 600:
        visit.page.locator("#menu").click()
        assert visit.page.locator("#conversations .open").is_visible()
        assert visit.findings() == []
        assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a phone scrolls in one direction"
    assert visit.mistakes == []
    context.close()


def test_axe_would_find_something(visit: Visit) -> None:
    """Planted: a button without a name, and grey on grey."""
    visit.page.evaluate(
        """() => {
            document.querySelector("main").append(document.createElement("button"));
            document.querySelector("#empty .lead").style.color = "#eeeeee";
        }"""
    )
    assert {finding.partition(":")[0] for finding in visit.findings()} == {"button-name", "color-contrast"}


def test_the_colours_can_be_switched(visit: Visit) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = visit.page.evaluate(ground)
    for _ in range(2):
        visit.page.locator("#theme").click()
    assert visit.page.locator("#theme").get_attribute("aria-label") == "Colours: dark"
    assert visit.page.evaluate(ground) != light
    visit.page.reload()
    assert visit.page.evaluate(ground) != light


# ---------------------------------------------------------------------------------------------- authentication and network


def test_a_key_locks_the_interface_and_not_the_page(browser: Any) -> None:
    with fake_llm() as llm, serving(llm, ServerOptions(api_key="sesame")) as served:
        context = browser.new_context()
        visit = Visit(context.new_page(), served.url)
        visit.page.locator("#locked").wait_for()
        assert visit.page.locator("#model-said").inner_text() == "locked"
        assert visit.page.evaluate("document.activeElement.id") == "p-key"
        visit.set("key", "sesame")
        visit.page.locator("#model strong").wait_for()
        visit.set("max_tokens", "8")
        visit.set("seed", SEED)
        visit.ask("hello")
        visit.wait_for_end()
        assert "8 tokens" in visit.facts()
        assert all("401" in mistake for mistake in visit.mistakes)
        context.close()


def test_the_page_sends_requests_to_its_own_server_only(browser: Any, model: Served) -> None:
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answer = page.goto(model.url)
    page.locator("#model strong").wait_for()
    assert asked
    assert all(url.startswith(model.url) for url in asked)
    assert answer.headers["content-security-policy"] == POLICY
    context.close()


def test_tokens_are_given_the_text_that_the_stream_shows(browser: Any, model: Served) -> None:
    """Incomplete characters, markers that are removed, a first space that is dropped, a stop string that cuts a token."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(model.url)
    cases = [
        (["a", "b"], ["ab"], [["a", 0], ["b", 1]]),
        ([" Hello", " you"], ["Hello", " you"], [["Hello", 0], [" you", 1]]),
        (["", "é"], ["é"], [["é", 1]]),
        (["<think>", "hm", "</think>", "yes"], ["hm", "yes"], [["hm", 1], ["yes", 3]]),
        (["one END", " two"], ["one "], [["one ", 0]]),
        ([], ["text"], [["text", None]]),
        (["long"], ["lo", "ng"], [["lo", 0], ["ng", 0]]),
    ]
    for tokens, texts, expected in cases:
        found = page.evaluate(
            """async ([tokens, texts]) => {
                const { Aligner } = await import("/page/reply.js");
                const aligner = new Aligner();
                aligner.add(tokens.map((text, index) => ({ text, index })));
                return texts.flatMap((text) => aligner.take(text)).map(({ text, token }) => [text, token && token.index]);
            }""",
            [tokens, texts],
        )
        assert found == expected
    context.close()
