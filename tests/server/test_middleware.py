"""Keys, hosts, origins, time and size limits, and --lenient."""

from __future__ import annotations

import json
import time

import openai
import pytest

from onedraw.errors import BadSetting
from onedraw.server.config import ServerOptions
from onedraw.server.prompts import prepare
from tests.server.running import Served, fake_llm, serving, slowed, wait_until

KEY = "sesame-Ω-key"  # a key may hold any characters


@pytest.fixture(scope="module")
def locked():
    with fake_llm() as llm, serving(llm, ServerOptions(api_key=KEY, cors_origins=("https://page.example",))) as served:
        yield served


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer wrong", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY, f"Basic {KEY}", "Bearer \xff"],
    ids=ascii,
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/nowhere", "/v1/completions"])
def test_a_request_without_the_right_key_is_refused(locked, given, path):
    headers = {} if given is None else {"authorization": given.encode()}
    answer = locked.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_request_with_the_key_is_answered(locked):
    for scheme in ("Bearer", "bearer"):
        assert locked.get("/v1/models", headers={"authorization": f"{scheme} {KEY}".encode()}).status_code == 200


def test_the_key_may_come_as_x_api_key(locked):
    assert locked.get("/v1/models", headers={"x-api-key": KEY.encode()}).status_code == 200
    assert locked.get("/v1/models", headers={"x-api-key": "wrong"}).status_code == 401
    both = {"x-api-key": KEY.encode(), "authorization": b"Bearer wrong"}
    assert locked.get("/v1/models", headers=both).status_code == 401


def test_health_needs_no_key(locked):
    assert locked.get("/health").status_code == 200


def test_the_openai_client_gets_an_authentication_error(locked):
    with pytest.raises(openai.AuthenticationError):
        locked.client().models.list()


def test_cors_allows_a_named_origin(locked):
    asked = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    for path, method in (("/v1/chat/completions", "POST"), ("/v1/responses/resp_1", "DELETE"), ("/v1/models", "GET")):
        answer = locked.http.options(path, headers={**asked, "access-control-request-method": method})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
    refused = locked.get("/v1/models", headers={"origin": "https://page.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"


def test_cors_refuses_other_origins(locked):
    answer = locked.get("/health", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.fixture(scope="module")
def home():
    options = ServerOptions(allow_hosts=("Chat.Example:8443",), cors_origins=("https://page.example",))
    with fake_llm() as llm, serving(llm, options) as served:
        yield served


NEAR = ("localhost", "LOCALHOST:8000", "api.localhost:1", "127.0.0.1:8000", "192.168.1.7", "[::1]:8000", "[fe80::1]")
NAMED = ("onedraw:8000", "nas.local", "onedraw.default.svc:80", "chat.example", "chat.example.:8000", "CHAT.EXAMPLE:443")


@pytest.mark.parametrize("host", [*NEAR, *NAMED])
def test_without_a_key_local_and_allowed_hosts_are_accepted(home, host):
    assert home.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example.", "a.chat.example"]
)
@pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics"])
def test_without_a_key_public_host_names_are_refused(home, host, path):
    answer = home.get(path, headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "unknown_host")
    assert f"--allow-host {host.partition(':')[0].rstrip('.')}" in answer.json()["error"]["message"]


def test_health_accepts_any_host(home):
    assert home.get("/health", headers={"host": "evil.example"}).status_code == 200


def test_with_a_key_any_host_is_accepted(locked):
    headers = {"host": "evil.example", "authorization": f"Bearer {KEY}".encode()}
    assert locked.get("/v1/models", headers=headers).status_code == 200


def test_without_a_key_cross_site_requests_are_refused(home):
    body = {"model": home.model, "prompt": "a", "max_tokens": 1}

    def ask(origin: str, site: str | None = "cross-site") -> int:
        headers = {"origin": origin, "content-type": "text/plain"} | ({} if site is None else {"sec-fetch-site": site})
        return home.http.post("/v1/completions", content=json.dumps(body), headers=headers).status_code

    assert ask("https://evil.example") == 403
    assert ask("https://page.example") == 200, "named by --cors-origin"
    assert ask("http://localhost:3000", "same-site") == 200
    assert ask("https://behind.a.proxy", "same-origin") == 200
    assert ask("app://x") == ask("file://") == 200, "a program's own page"
    assert ask("null") == 403, "any page can have it"
    assert ask("https://evil.example", None) == 403, "a browser that says no more"
    assert ask("http://192.168.1.4:3000", None) == ask("https://chat.example", None) == 200
    assert ask("http://8.8.8.8", None) == ask("null", None) == 403
    assert home.get("/", headers={"origin": "https://evil.example", "sec-fetch-site": "cross-site"}).status_code == 200, "a link"


def test_without_a_key_a_cross_site_request_that_names_no_origin_is_refused(home):
    """Some browsers omit Origin if a page of another site submits a form."""
    body = json.dumps({"model": home.model, "prompt": "a", "max_tokens": 1})

    def ask(site: str | None) -> int:
        headers = {"content-type": "text/plain"} | ({} if site is None else {"sec-fetch-site": site})
        return home.http.post("/v1/completions", content=body, headers=headers).status_code

    assert ask("cross-site") == 403
    assert ask(None) == 200, "a program that is not a browser"
    assert ask("same-origin") == ask("same-site") == ask("none") == 200
    for site in ("none", "cross-site"):
        page = home.get("/", headers={"sec-fetch-site": site, "sec-fetch-mode": "navigate"})
        assert page.status_code == 200, "an address that was typed, a link that was followed"


def test_no_origin_is_allowed_unless_one_is_named(fake):
    assert "access-control-allow-origin" not in fake.get("/health", headers={"origin": "https://page.example"}).headers


def test_the_key_is_not_shown():
    assert KEY not in repr(ServerOptions(api_key=KEY))


def test_a_lenient_server_ignores_unknown_fields_and_lists_them():
    with fake_llm() as llm, serving(llm, ServerOptions(lenient=True)) as served:
        asked = {"messages": [{"role": "user", "content": "Hi", "mood": "good"}], "max_tokens": 2, "frobnicate": 1, "größe\n": 2}
        for stream in (False, True):
            answer = served.post("/v1/chat/completions", stream=stream, **asked)
            assert answer.status_code == 200
            assert answer.headers["x-onedraw-ignored"] == "frobnicate, gr\\xf6\\xdfe, messages[0].mood"
        refused = served.post("/v1/chat/completions", audio={}, **asked)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "audio")
        assert "x-onedraw-ignored" not in served.post("/v1/completions", prompt="a", max_tokens=1).headers
        # Also inside items, blocks and tools.
        items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi", "a": 1}], "b": 2}]
        tool = {"type": "function", "name": "f", "c": 3}
        answer = served.post("/v1/responses", input=items, tools=[tool], max_output_tokens=2)
        assert answer.headers["x-onedraw-ignored"] == "tools[0].c, input[0].b, input[0].content[0].a", answer.text
        said = [{"role": "user", "content": [{"type": "text", "text": "Hi", "a": 1}]}]
        answer = served.post("/v1/messages", messages=said, tools=[{"name": "f", "input_schema": {}, "b": 2}], max_tokens=2)
        assert answer.headers["x-onedraw-ignored"] == "messages[0].content[0].a, tools[0].b", answer.text


def test_aliases_name_the_model():
    with fake_llm() as llm, serving(llm, ServerOptions(aliases=("org/other-name",))) as served:
        assert served.client().models.retrieve("org/other-name").id == served.model
        reply = served.client().completions.create(model="org/other-name", prompt="a", max_tokens=1)
        assert reply.model == served.model


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1},
        {"port": 70000},
        {"max_body": 0},
        {"drain_seconds": -1},
        {"api_key": " "},
        {"log_level": "loud"},
        {"log_format": "xml"},
        {"request_seconds": 0},
        {"allow_hosts": ("https://chat.example/",)},
    ],
    ids=str,
)
def test_invalid_options_are_refused_by_their_flag(wrong):
    with pytest.raises(BadSetting, match="--" + next(iter(wrong)).replace("_", "-").removesuffix("s")):
        ServerOptions(**wrong)


@pytest.mark.parametrize("key", ["citt\u00e0", "\u00c5"], ids=ascii)
def test_a_key_may_end_in_bytes_that_look_like_spaces(key):
    """The last byte of these characters is a space of another alphabet."""
    with fake_llm() as llm, serving(llm, ServerOptions(api_key=key)) as served:
        assert served.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()}).status_code == 200
        assert served.get("/v1/models", headers={"authorization": f"Bearer {key[:-1]}x".encode()}).status_code == 401


ENDLESS = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}


def test_a_request_over_its_time_limit_is_cancelled_and_its_pages_are_freed():
    with fake_llm() as llm:
        with serving(slowed(llm, 0.02), ServerOptions(request_seconds=0.3)) as served:
            answer = served.post("/v1/completions", **ENDLESS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
        wait_until(lambda: llm.service.stats().running == 0)
        with serving(llm) as served:
            assert served.post("/v1/completions", prompt="a", max_tokens=3).status_code == 200


def test_the_time_limit_starts_when_the_request_arrives(monkeypatch):
    def slowly(*args, **kwargs):
        time.sleep(0.6)
        return prepare(*args, **kwargs)

    monkeypatch.setattr("onedraw.server.app.prepare", slowly)
    with fake_llm() as llm, serving(llm, ServerOptions(request_seconds=0.5)) as served:
        assert served.post("/v1/completions", prompt="a", max_tokens=1).status_code == 504


def test_a_stream_over_its_time_limit_ends_with_an_error_event():
    def streamed(seconds: float) -> tuple[int, list[str]]:
        with serving(llm, ServerOptions(request_seconds=seconds)) as served:
            answer = served.post("/v1/completions", stream=True, **ENDLESS)
        return answer.status_code, answer.text.split("\n\n")

    with slowed(fake_llm(), 0.05) as llm:
        # The limit must allow for the first token, so that the stream has begun when it expires. A busy machine needs more.
        status, events = next(found for found in map(streamed, (0.3, 3, 30)) if found[0] == 200)
        assert status == 200
        assert json.loads(events[0].removeprefix("data: "))["choices"]
        assert '"request_timeout"' in events[-2]
        assert "[DONE]" not in events[-1]
        wait_until(lambda: llm.service.stats().running == 0)


def test_a_body_that_does_not_arrive_in_time_is_refused(monkeypatch, fake: Served):
    monkeypatch.setattr("onedraw.server.body.read_body.__kwdefaults__", {"seconds": 0.2})
    with fake.unread("/v1/completions", b'{"prompt": ', length=15) as connection:
        answer = b""
        while b"body_too_slow" not in answer and (more := connection.recv(65536)):  # the rest is never sent
            answer += more
    assert b" 408 " in answer.partition(b"\r\n")[0]
    assert b"body_too_slow" in answer
