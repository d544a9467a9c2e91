"""Replies as Markdown: what it shows, and that no text can run code, load anything, or stall the page."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from onedraw.server.page import POLICY
from tests.browser.visit import Visit
from tests.server.running import Served, fake_llm, serving

RENDER = """async ([source, parts]) => {
    const { MarkdownView } = await import("/page/render.js");
    const view = new MarkdownView();
    document.querySelector("#log").replaceChildren(view.element);
    for (let i = 1; i <= parts; i += 1) view.update(source.slice(0, Math.ceil((source.length * i) / parts)));
    return view.element.innerHTML;
}"""

# Names of everything the renderer may make.
ALLOWED = {"DIV", "P", "BR", "HR", "STRONG", "EM", "DEL", "CODE", "PRE", "SPAN", "A", "UL", "OL", "LI", "BLOCKQUOTE", "TABLE"}
ALLOWED |= {"THEAD", "TBODY", "TR", "TH", "TD", "BUTTON", "svg", "path"}
INSPECT = """() => {
    const view = document.querySelector("#log .prose");
    const all = [...view.querySelectorAll("*")];
    return {
        names: [...new Set(all.map((element) => element.tagName))],
        handlers: all.flatMap((one) => one.getAttributeNames()).filter((name) => name.startsWith("on") || name === "style"),
        links: [...view.querySelectorAll("[href], [src], [action]")].map((one) => one.href ?? one.src),
        text: view.textContent,
        ran: window.ran ?? null,
    };
}"""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with fake_llm() as llm, serving(llm) as served:
        yield served


@pytest.fixture(scope="module")
def opened(browser: Any, server: Served) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    yield Visit(context.new_page(), server.url)
    context.close()


@pytest.fixture
def visit(opened: Visit) -> Iterator[Visit]:
    yield opened
    assert opened.mistakes == []


def shown(visit: Visit, source: str, *, parts: int = 1) -> str:
    """The HTML of a text that arrives in this many parts."""
    return str(visit.page.evaluate(RENDER, [source, parts]))


@pytest.mark.parametrize(
    ("source", "html"),
    [
        ("a **b** *c* ~~d~~ `e`", "<p>a <strong>b</strong> <em>c</em> <del>d</del> <code>e</code></p>"),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("2 * 3 * 4 snake_case_name", "<p>2 * 3 * 4 snake_case_name</p>"),
        ("***both***", "<p><em><strong>both</strong></em></p>"),
        ("\\*not\\* &amp; &#65; &lt;b&gt;", "<p>*not* &amp; A &lt;b&gt;</p>"),
        ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("1. a\n\n   more\n2. b", '<ol start="1"><li>a<p>more</p></li><li>b</li></ol>'),
        ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
        ("## Title ##\ntext", '<p class="h2" role="heading" aria-level="4">Title</p><p>text</p>'),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        ("<b>x</b> <script>ran=1</script>", "<p>&lt;b&gt;x&lt;/b&gt; &lt;script&gt;ran=1&lt;/script&gt;</p>"),
        ("[x](javascript:ran=1) ![y](data:text/html,z)", "<p>[x](javascript:ran=1) ![y](data:text/html,z)</p>"),
    ],
)
def test_markdown_becomes_elements(visit: Visit, source: str, html: str) -> None:
    for parts in (1, len(source)):  # at once and character by character
        assert shown(visit, source, parts=parts) == html


def test_tables_tasks_and_links(visit: Visit) -> None:
    source = "| a | b |\n|:--|--:|\n| 1 | `x|y` |\n| 2 |\n\n- [x] done\n- [ ] open\n\nsee https://example.com/a_b. or [it](http://a.b/c)"
    shown(visit, source)
    log = visit.page.locator("#log")
    assert log.locator("th").all_inner_texts() == ["a", "b"]
    assert log.locator("td").all_inner_texts() == ["1", "x|y", "2", ""]
    assert log.locator(".task").evaluate_all("all => all.map((one) => one.ariaLabel)") == ["done", "not done"]
    links = log.locator("a").evaluate_all("all => all.map((a) => [a.href, a.rel, a.target])")
    safe = ["noopener noreferrer nofollow", "_blank"]
    assert links == [["https://example.com/a_b", *safe], ["http://a.b/c", *safe]]


def test_code_is_coloured_and_copied(visit: Visit) -> None:
    source = '# comment\ndef add(a, b=1):\n    return "text" + a'
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    shown(visit, f"before\n\n```python\n{source}\n```\n\nafter", parts=20)
    found = visit.page.evaluate(
        "[...document.querySelectorAll('#log pre span')].map((part) => [part.className, part.textContent])"
    )
    assert ["hl-comment", "# comment"] in found
    assert ["hl-keyword", "def"] in found
    assert ["hl-name", "add"] in found
    assert ["hl-string", '"text"'] in found
    visit.press("Copy")
    visit.page.get_by_text("Copied").wait_for()
    assert visit.page.evaluate("navigator.clipboard.readText()") == source


def test_blocks_that_did_not_change_keep_their_elements(visit: Visit) -> None:
    kept = visit.page.evaluate(
        """async () => {
            const { MarkdownView } = await import("/page/render.js");
            const view = new MarkdownView();
            view.update("# one\\n\\ntwo\\n\\nthr");
            const before = [...view.element.children];
            view.update("# one\\n\\ntwo\\n\\nthree\\n\\n- four");
            return [...view.element.children].map((element, i) => element === before[i]);
        }"""
    )
    assert kept == [True, True, False, False]


PIECES = [
    "<script>ran=1</script>",
    "<img src=x onerror=ran=1>",
    "<svg onload=ran=1>",
    '"><b onclick=ran=1>',
    "[a](javascript:ran=1)",
    "[a](JaVaScRiPt:ran=1)",
    "[a](&#106;avascript:ran=1)",
    "[a](data:text/html,<script>ran=1</script>)",
    "[a](http://x.y/ onmouseover=ran=1)",
    '[a](http://x.y/ "t onmouseover=ran=1")',
    "![a](http://x.y/z.png)",
    "<http://x.y/><javascript:ran=1>",
    "&lt;script&gt;ran=1&lt;/script&gt;",
    "&#60;script&#62;",
    "```html\n<script>ran=1</script>\n```",
    "```",
    "~~~",
    "``",
    "`",
    "**",
    "*",
    "_",
    "~~",
    "[",
    "](",
    "](http://a.b)",
    ")",
    "- ",
    "1. ",
    "> ",
    "    ",
    "| a | b |\n|--|--|\n| c |",
    "|",
    "\n",
    "\n\n",
    "# ",
    "---",
    "\\",
    "\u202e",
    "\0",
    "😀",
    "x",
]


def test_random_markdown_is_only_ever_text_and_known_elements(visit: Visit) -> None:
    loaded: list[str] = []
    visit.page.on("request", lambda request: loaded.append(request.url))
    visit.page.route("**", lambda route: route.abort())
    dice = random.Random(7)
    texts = ["".join(dice.choices(PIECES, k=dice.randrange(1, 60))) for _ in range(200)]
    for source in texts:
        shown(visit, source, parts=3)
        found = visit.page.evaluate(INSPECT)
        assert set(found["names"]) <= ALLOWED, source
        assert found["handlers"] == [], source
        assert all(link.startswith(("http:", "https:", "mailto:")) for link in found["links"]), source
        assert found["ran"] is None, source
    visit.page.unroute("**")
    assert loaded == []


@pytest.mark.parametrize(
    "source",
    [
        "- " * 10_000 + "x",
        "\n".join(" " * depth + "- x" for depth in range(3_000)),
        ">" * 10_000 + "x",
        "*a " * 15_000,
        "**a_b" * 8_000,
        "[" * 40_000,
        "](" * 20_000,
        "[a](" * 10_000,
        "`" * 30_000 + "x",
        " ".join("`" * length for length in range(300)),
        "~~~\n" + "x" * 100_000,
        "```js\n" + '"' * 50_000,
        "# a" + " " * 50_000 + "x",
        "|a" * 60 + "|\n" + "|-" * 60 + "|\n" + ("|x" * 60 + "|\n") * 2_000,
        "a|\n" + "- " * 20_000,
        "x\n" * 20_000,
        "http://" * 8_000,
    ],
    ids=lambda source: source[:5].replace("\n", "/"),
)
def test_hostile_markdown_is_shown(visit: Visit, source: str) -> None:
    """Deep nesting, huge tables, unclosed marks: nothing overflows the stack, and no element is nested deeply."""
    shown(visit, source)
    deepest = visit.page.evaluate(
        """() => {
            let most = 0;
            const walk = (element, depth) => {
                most = Math.max(most, depth);
                for (const child of element.children) walk(child, depth + 1);
            };
            walk(document.querySelector("#log .prose"), 0);
            return most;
        }"""
    )
    assert deepest < 80


def test_a_reply_with_hostile_markdown_is_harmless(browser: Any, server: Served) -> None:
    """The whole way, from the stream to the page: the text is shown, nothing runs and nothing is loaded."""
    context = browser.new_context()
    visit = Visit(context.new_page(), server.url)
    text = "".join(piece + "\n\n" for piece in PIECES)
    choice = {"index": 0, "delta": {"content": text}, "seed": 1, "finish_reason": "stop", "logprobs": None, "token_details": []}
    body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    stream = {"status": 200, "content_type": "text/event-stream", "body": body}
    visit.page.route("**/v1/chat/completions", lambda route: route.fulfill(**stream))
    loaded: list[str] = []
    visit.page.on("request", lambda request: loaded.append(request.url))
    visit.converse("<img src=x onerror=ran=1>")
    assert "<img src=x onerror=ran=1>" in visit.page.locator(".user .said").inner_text()
    assert "<script>ran=1</script>" in visit.reply()
    assert visit.page.evaluate("window.ran ?? null") is None
    assert {url.removeprefix(server.url) for url in loaded} <= {"/v1/chat/completions", "/page/icon.svg"}
    assert visit.mistakes == []
    context.close()


@pytest.mark.parametrize(
    "attempt", ["div.innerHTML = text", "document.write(text)", "new DOMParser().parseFromString(text, 'text/html')"]
)
def test_the_browser_refuses_to_turn_text_into_html(visit: Visit, attempt: str) -> None:
    """Planted: what the page never does is forbidden by its policy even so."""
    source = f"() => {{ const text = '<b>x</b>'; const div = document.createElement('div'); {attempt}; }}"
    with pytest.raises(Exception, match="TrustedHTML"):
        visit.page.evaluate(source)
    assert "require-trusted-types-for 'script'" in POLICY
    visit.mistakes[:] = [mistake for mistake in visit.mistakes if "TrustedHTML" not in mistake]
