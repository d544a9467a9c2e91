"""/v1/files and /v1/batches: the replies are those of live requests, their bytes depend on the batch alone, and what is uploaded
is bounded and belongs to its key."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from onedraw import limits
from onedraw.build.engine_process import EngineProcess
from onedraw.build.llm import build_llm
from onedraw.errors import BadSetting
from onedraw.server.auth import ApiKey
from onedraw.server.batch import batches, lines
from onedraw.server.batch.endpoints import BatchEndpoints
from onedraw.server.batch.lines import BatchLine, LineResult
from onedraw.server.batch.offline import run_file
from onedraw.server.batch.results import ForeignResults, ResultLog
from onedraw.server.batch.run import run_lines
from onedraw.server.config import ServerOptions
from onedraw.settings import Settings
from tests.server.running import Served, fake_llm, serving, slowed, wait_until

CHAT = "/v1/chat/completions"
CALL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    if url == CHAT:
        body = {"messages": [{"role": "user", "content": f"Hello {custom_id}"}], "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


MIXED = [
    line("plain"),
    line("seeded", seed=3, temperature=1.1),
    line("wrong", temperature=-1),
    line("many", n=3, logprobs=True, top_logprobs=2),
    line("json", guided_json={"type": "object", "properties": {"a": {"type": "integer"}}}, max_tokens=40),
    line("calls", tools=[CALL], tool_choice="required", max_tokens=60),
    line("details", return_token_details=True),
    line("stream", stream=True),
    *(line(f"more-{i}", max_tokens=4 + i) for i in range(24)),
]


def encoded(*found: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in found)


def submitted(client: openai.OpenAI, content: bytes, endpoint: Any = CHAT, **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", extra_body=more)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    wait_until(lambda: client.batches.retrieve(batch_id).status in ("completed", "failed", "expired", "cancelled"))
    return client.batches.retrieve(batch_id)


def results(client: openai.OpenAI, batch: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    ids = (batch.output_file_id, batch.error_file_id)
    texts = ["" if one is None else client.files.content(one).text for one in ids]
    output, errors = ([json.loads(row) for row in text.splitlines()] for text in texts)
    return output, errors


@pytest.fixture
def batching(tmp_path: Path) -> Iterator[Served]:
    with fake_llm() as llm, serving(llm, ServerOptions(batch_dir=tmp_path / "batches")) as served:
        yield served


def test_a_batch_has_the_replies_of_live_requests(batching: Served) -> None:
    client = batching.client()
    batch = ended(client, submitted(client, encoded(*MIXED), metadata={"for": "a test"}).id)
    assert batch.status == "completed"
    assert batch.metadata == {"for": "a test"}
    assert batch.request_counts.total == len(MIXED) == batch.request_counts.completed + 3
    output, errors = results(client, batch)
    assert [one["custom_id"] for one in output] == [
        one["custom_id"] for one in MIXED if one["custom_id"] in {o["custom_id"] for o in output}
    ]
    assert {one["custom_id"]: one["response"]["body"]["error"]["param"] for one in errors} == {
        "wrong": "temperature",
        "details": "return_token_details",
        "stream": "stream",
    }
    asked = {one["custom_id"]: one["body"] for one in MIXED}
    for one in output:
        reply, body = one["response"]["body"], asked[one["custom_id"]]
        live = batching.post(CHAT, **body, **({} if "seed" in body else {"seed": reply["choices"][0]["seed"]})).json()
        for found in (live, reply):
            for choice in found["choices"]:
                for call in choice["message"].get("tool_calls", ()):
                    del call["id"]
        assert reply["choices"] == live["choices"]
        assert reply["created"] == batch.created_at
        assert reply["usage"] == {
            **{name: live["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
    assert len({one["response"]["body"]["choices"][0]["seed"] for one in output}) == len(output)


def test_a_batch_with_the_same_seed_has_the_same_replies(batching: Served) -> None:
    client = batching.client()
    first = ended(client, submitted(client, encoded(*MIXED)).id)
    again, other = (
        ended(client, submitted(client, encoded(*MIXED), seed=first.seed).id),
        ended(client, submitted(client, encoded(*MIXED)).id),
    )

    def texts(batch: Any) -> list[str]:
        return [one["response"]["body"]["choices"][0]["message"]["content"] for one in results(client, batch)[0]]

    assert texts(first) == texts(again) != texts(other)


def test_completions_and_scores_are_endpoints_too(batching: Served) -> None:
    client = batching.client()
    asked = [line(str(i), "/v1/completions", prompt=["The sea", "A hill"], echo=True, logprobs=1, max_tokens=3) for i in range(3)]
    output, _ = results(client, ended(client, submitted(client, encoded(*asked), "/v1/completions").id))
    assert [len(one["response"]["body"]["choices"]) for one in output] == [2, 2, 2]
    output, _ = results(
        client, ended(client, submitted(client, encoded(line("a", "/v1/score", prompt="a", reply="b")), "/v1/score").id)
    )
    assert output[0]["response"]["body"]["object"] == "score"


def test_lines_of_batches_are_background_requests(batching: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, prepare = [], batching.llm.prepare

    def watched(*generations: Any, **turn: Any) -> Any:
        prepared.append(turn)
        return prepare(*generations, **turn)

    monkeypatch.setattr(batching.llm, "prepare", watched)
    client = batching.client()
    ended(client, submitted(client, encoded(line("a"), line("b"))).id)
    batching.post(CHAT, **line("c")["body"])
    assert [turn["background"] for turn in prepared] == [True, True, False]
    assert prepared[0]["caller"] == prepared[1]["caller"] != prepared[2]["caller"]


@pytest.mark.parametrize(
    ("content", "code", "at"),
    [
        (b"\n\n", "empty_file", None),
        (encoded(line("a")) + b"{", "invalid_json_line", 2),
        (encoded(line("a"), {**line("b"), "more": 1}), "invalid_line", 2),
        (encoded({**line("a"), "custom_id": ""}), "invalid_custom_id", 1),
        (encoded({**line("a"), "method": "GET"}), "invalid_method", 1),
        (encoded(line("a", "/v1/completions", prompt="x")), "mismatched_endpoint", 1),
        (encoded({**line("a"), "body": [1]}), "invalid_body", 1),
        (encoded(line("a"), line("b"), line("a")), "duplicate_custom_id", 3),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": ' + b"[" * 5000, "invalid_json_line", 1),
    ],
)
def test_a_file_that_is_no_batch_fails_with_its_line(batching: Served, content: bytes, code: str, at: int | None) -> None:
    client = batching.client()
    batch = ended(client, submitted(client, content).id)
    assert batch.status == "failed"
    assert [(one.code, one.line) for one in batch.errors.data] == [(code, at)]
    assert batch.output_file_id is None


def test_the_lines_of_a_file_are_bounded(batching: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_BATCH_LINES", 3)
    monkeypatch.setattr(lines, "MAX_BATCH_FAULTS", 2)
    client = batching.client()
    batch = ended(client, submitted(client, encoded(*(line(str(i)) for i in range(4)))).id)
    assert [one.code for one in batch.errors.data] == ["too_many_lines"]
    batch = ended(client, submitted(client, b"x\n" * 9).id)
    assert [one.code for one in batch.errors.data] == ["invalid_json_line"] * 2
    batch = ended(client, submitted(client, b"\n" * 4 + encoded(line("a"))).id)  # 20 MB of them kept the event loop for 3 s
    assert [one.code for one in batch.errors.data] == ["too_many_lines"]
    assert ended(client, submitted(client, b"\n" * 3 + encoded(line("a"))).id).status == "completed"


def test_a_fault_does_not_repeat_a_long_line(batching: Served) -> None:
    """The name of an unknown field was repeated whole: megabytes, kept with the batch and sent with each of its answers."""
    client = batching.client()
    batch = ended(client, submitted(client, encoded({**line("a"), "x" * 100_000: 1})).id)
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == ("invalid_line", 1)
    assert len(batch.errors.data[0].message) < 500


def test_lines_are_read_beside_the_event_loop(tmp_path: Path) -> None:
    """Otherwise streams are silent while the lines with a result are skipped, as after a restart."""
    readers = set()

    def found() -> Iterator[BatchLine]:
        for number in range(4):
            readers.add(threading.get_ident())
            yield BatchLine(number, str(number), CHAT, b"{}")

    async def answer(line: BatchLine) -> LineResult:
        return LineResult(True, b"{}")

    with ResultLog(tmp_path / "log", title="t") as log:
        log.add(0, LineResult(True, b"{}"))
        assert asyncio.run(run_lines(found(), log, answer, most=2))
        assert len(log) == 4
    assert readers
    assert threading.get_ident() not in readers


def test_what_is_uploaded_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onedraw.server.batch.endpoints.MAX_BATCH_FILE", 10_000)
    monkeypatch.setattr("onedraw.server.batch.store.MAX_BATCH_FILES", 3)
    with fake_llm() as llm, serving(llm, ServerOptions(batch_dir=tmp_path, batch_disk=16_000)) as served:

        def upload(size: int, **fields: Any) -> httpx.Response:
            return served.http.post("/v1/files", files={"file": ("a.jsonl", b"x" * size)}, data={"purpose": "batch", **fields})

        assert upload(10_000).status_code == 200
        with monkeypatch.context() as patched:
            patched.setattr("onedraw.server.batch.endpoints.MAX_UPLOADS", 0)
            assert upload(10).status_code == 429
        assert upload(20_000).json()["error"]["code"] == "body_too_large"
        assert upload(7_000).json()["error"]["code"] == "batch_storage_full"
        assert [upload(10).status_code for _ in range(3)] == [200, 200, 413]
        assert served.get("/v1/files").json()["data"][0]["bytes"] == 10
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"data": {"purpose": "vision"}, "files": {"file": b"x"}}, "purpose"),
            ({"data": {"purpose": "batch"}, "files": {"more": b"x"}}, "more"),
            ({"data": {"purpose": "batch", "expires_after[seconds]": "7"}, "files": {"file": b"x"}}, "expires_after[anchor]"),
            ({"files": {"file": b"x"}}, "purpose"),
        ]
        served.http.delete(f"/v1/files/{served.get('/v1/files').json()['data'][0]['id']}")
        for body, param in wrong:
            assert served.http.post("/v1/files", **body).json()["error"]["param"] == param
        assert served.http.post("/v1/files", json={}).json()["error"]["code"] == "invalid_form"
        assert not list((tmp_path / "files").glob("*.part"))


def test_one_key_cannot_use_up_the_space_of_all(tmp_path: Path) -> None:
    """A batch fails when its results do not fit, so files of one key could end the batches of all others."""
    keys = ApiKey("ann", "a"), ApiKey("bob", "b")
    with fake_llm() as llm, serving(llm, ServerOptions(batch_dir=tmp_path, batch_disk=40_000, api_keys=keys)) as served:

        def upload(key: str, size: int) -> int:
            files = {"file": ("a.jsonl", b"x" * size)}
            head = {"authorization": f"Bearer {key}"}
            return served.http.post("/v1/files", files=files, data={"purpose": "batch"}, headers=head).status_code

        assert [upload("a", 15_000), upload("a", 15_000), upload("a", 4_000), upload("b", 15_000)] == [200, 413, 200, 200]


def test_slow_uploads_of_one_caller_leave_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onedraw.server.batch.endpoints.MAX_CALLER_UPLOADS", 1)
    keys = ApiKey("ann", "a"), ApiKey("bob", "b")
    with fake_llm() as llm, serving(llm, ServerOptions(batch_dir=tmp_path, api_keys=keys)) as served:

        def upload(key: str) -> int:
            head = {"authorization": f"Bearer {key}"}
            files = {"file": ("a.jsonl", b"x")}
            return served.http.post("/v1/files", files=files, data={"purpose": "batch"}, headers=head).status_code

        address = httpx.URL(served.url)
        head = "authorization: Bearer a\r\ncontent-type: multipart/form-data; boundary=x\r\ncontent-length: 1000\r\n"
        with socket.create_connection((address.host, address.port)) as slow:
            slow.sendall(f"POST /v1/files HTTP/1.1\r\nhost: test\r\n{head}\r\n--x".encode())
            wait_until(lambda: upload("a") == 429)
            assert upload("b") == 200
        wait_until(lambda: upload("a") == 200)


def test_files_of_results_count_as_files(batching: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches could be created without end, each of which adds files that are kept for 30 days."""
    monkeypatch.setattr("onedraw.server.batch.store.MAX_BATCH_FILES", 3)
    client = batching.client()
    file = client.files.create(file=("in.jsonl", encoded(line("a"))), purpose="batch")

    def create() -> Any:
        return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

    for _ in range(2):
        assert ended(client, create().id).status == "completed"
    with pytest.raises(openai.APIStatusError) as refused:
        create()
    assert refused.value.status_code == 413


def test_a_full_disk_is_named_and_nothing_is_left(batching: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an unexpected error with a traceback, and what was written before the disk was full stayed there."""
    client = batching.client()
    file = client.files.create(file=("in.jsonl", encoded(line("a"))), purpose="batch")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(openai.APIStatusError) as upload:
            client.files.create(file=("more.jsonl", b"x" * 1000), purpose="batch")
        with pytest.raises(openai.APIStatusError) as create:
            client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert [(one.value.status_code, one.value.code) for one in (upload, create)] == [(507, "disk_full")] * 2
    assert [one.id for one in client.files.list()] == [file.id]
    assert not list(client.batches.list())


def test_lines_of_an_engine_that_died_run_again(tmp_path: Path) -> None:
    """They were kept as failed lines with a 503, so the files of a batch depended on when the engine's process was killed."""
    options = ServerOptions(batch_dir=tmp_path)
    lines = [line(str(i), max_tokens=200, ignore_eos=True) for i in range(60)]
    settings = Settings(model="fake", backend="fake", threads=1)
    with build_llm(settings, start_engine=EngineProcess) as llm, serving(llm, options) as served:
        client = served.client()
        batch = submitted(client, encoded(*lines))
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        llm.service._end_process(0)  # type: ignore[attr-defined,unused-ignore]
        wait_until(lambda: not llm.service.ready)
        assert served.get(f"/v1/batches/{batch.id}").status_code == 503
    with fake_llm() as llm, serving(llm, options) as served:
        done = ended(served.client(), batch.id)
        assert (done.status, done.request_counts.completed, done.error_file_id) == ("completed", 60, None)


def test_results_that_do_not_fit_on_the_disk_fail_the_batch(tmp_path: Path) -> None:
    content = encoded(*(line(str(i)) for i in range(40)))
    with fake_llm() as llm, serving(llm, ServerOptions(batch_dir=tmp_path, batch_disk=len(content) + 5_000)) as served:
        client = served.client()
        batch = ended(client, submitted(client, content).id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "batch_storage_full")
        output, errors = results(client, batch)
        assert output
        assert {one["error"]["code"] for one in errors} == {"batch_failed"}
        assert len(output) + len(errors) == 40


def test_files_and_batches_belong_to_the_key_that_created_them(tmp_path: Path) -> None:
    options = ServerOptions(batch_dir=tmp_path, api_keys=(ApiKey("ann", "a"), ApiKey("bob", "b")))
    with fake_llm() as llm, serving(llm, options) as served:
        ann, bob = (openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) for key in "ab")
        with ann, bob:
            batch = ended(ann, submitted(ann, encoded(line("a"))).id)
            assert [one.id for one in ann.batches.list()] == [batch.id]
            assert not list(bob.files.list()) and not list(bob.batches.list())  # noqa: PT018
            for file_id in (batch.input_file_id, batch.output_file_id):
                for read in (bob.files.retrieve, bob.files.content, bob.files.delete):
                    with pytest.raises(openai.NotFoundError):
                        read(file_id)
            for see in (bob.batches.retrieve, bob.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    see(batch.id)
            with pytest.raises(openai.NotFoundError):
                bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")


def test_lists_have_pages(batching: Served) -> None:
    client = batching.client()
    made = [ended(client, submitted(client, encoded(line(str(i)))).id).id for i in range(5)]
    assert [one.id for one in client.batches.list(limit=2)] == made[::-1]
    assert [one.purpose for one in client.files.list(purpose="batch", order="asc", limit=3)] == ["batch"] * 5
    assert batching.get("/v1/batches", params={"limit": 101}).json()["error"]["param"] == "limit"
    assert batching.get("/v1/files", params={"nonsense": 1}).json()["error"]["param"] == "nonsense"


def test_a_cancelled_batch_has_every_line_in_one_file(tmp_path: Path) -> None:
    with slowed(fake_llm(), 0.01) as llm, serving(llm, ServerOptions(batch_dir=tmp_path)) as served:
        client = served.client()
        made = submitted(client, encoded(*(line(str(i), ignore_eos=True) for i in range(400))))
        wait_until(lambda: client.batches.retrieve(made.id).request_counts.completed > 3)
        with pytest.raises(openai.BadRequestError, match="cancel it first"):
            client.files.delete(made.input_file_id)
        assert client.batches.cancel(made.id).status == "cancelling"
        batch = ended(client, made.id)
        assert batch.status == "cancelled"
        output, errors = results(client, batch)
        assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
        assert sorted(int(one["custom_id"]) for one in output + errors) == list(range(400))
        assert client.batches.cancel(made.id).status == "cancelled"
        assert not list((tmp_path / "batches").glob("*.results"))
        assert not llm.service.stats().running


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that servers of this test see, in a list."""
    found = [1e9]
    monkeypatch.setitem(BatchEndpoints.__init__.__kwdefaults__, "clock", lambda: found[0])
    monkeypatch.setattr(batches, "SWEEP_SECONDS", 0.02)
    return found


def test_batches_and_files_expire(tmp_path: Path, now: list[float]) -> None:
    options = ServerOptions(batch_dir=tmp_path)
    with slowed(fake_llm(), 0.01) as llm, serving(llm, options) as served:
        client = served.client()
        made = submitted(client, encoded(*(line(str(i), ignore_eos=True) for i in range(400))))
        wait_until(lambda: client.batches.retrieve(made.id).request_counts.completed > 3)
        now[0] += 24 * 3600
        batch = ended(client, made.id)
        assert (batch.status, batch.expired_at) == ("expired", int(now[0]))
        output, errors = results(client, batch)
        assert {one["error"]["code"] for one in errors} == {"batch_expired"}
        assert len(output) + len(errors) == 400
        now[0] += limits.BATCH_KEEP_SECONDS + 1
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.output_file_id)
        wait_until(lambda: not list(client.batches.list()))
        assert [one.id for one in client.files.list()] == [made.input_file_id]  # an upload expires only if it is told so
        expires: Any = {"anchor": "created_at", "seconds": 3600}
        client.files.create(file=b"x", purpose="batch", expires_after=expires)
        now[0] += 3601
        assert len(list(client.files.list())) == 1
        wait_until(lambda: len(list((tmp_path / "files").iterdir())) == 2)


def test_a_batch_waits_for_a_server_with_its_model(tmp_path: Path, now: list[float]) -> None:
    """Another model would give other replies, so its server leaves the batch alone until the time is over."""
    options, content = ServerOptions(batch_dir=tmp_path), encoded(*(line(str(i), ignore_eos=True) for i in range(60)))
    with slowed(fake_llm(), 0.01) as llm:
        first = llm.card
        with serving(llm, options) as served:
            client = served.client()
            made = [submitted(client, content).id for _ in range(2)]
            wait_until(lambda: client.batches.retrieve(made[0]).request_counts.completed > 3)
            llm.card = replace(first, fingerprint="another")
            wait_until(lambda: not llm.service.stats().running)
            quick = ended(client, submitted(client, encoded(line("a"))).id)
            assert quick.status == "completed"
            assert [client.batches.retrieve(one).status for one in made] == ["in_progress"] * 2
            llm.card = first
            done = ended(client, made[0])
            assert done.status == "completed"
            assert {one["response"]["body"]["system_fingerprint"] for one in results(client, done)[0]} == {first.fingerprint}
            llm.card = replace(first, fingerprint="another")
            now[0] += 25 * 3600
            assert ended(client, made[1]).status == "expired"


def test_lines_that_a_pause_ends_run_again(tmp_path: Path) -> None:
    content = encoded(*(line(str(i), ignore_eos=True, max_tokens=30) for i in range(40)))
    with slowed(fake_llm(), 0.005) as llm, serving(llm, ServerOptions(batch_dir=tmp_path)) as served:
        client = served.client()
        made = submitted(client, content, seed=1)
        wait_until(lambda: client.batches.retrieve(made.id).request_counts.completed > 3)
        llm.service.pause(end=True)
        llm.service.resume()
        output, errors = results(client, ended(client, made.id))
        expected, _ = results(client, ended(client, submitted(client, content, seed=1).id))
    assert (len(output), errors) == (40, [])
    choices = [[one["response"]["body"]["choices"] for one in found] for found in (output, expected)]
    assert choices[0] == choices[1]


def test_one_server_uses_a_folder(tmp_path: Path) -> None:
    options = ServerOptions(batch_dir=tmp_path)
    with fake_llm() as llm, serving(llm, options) as first, serving(llm, options) as second:
        refused = second.get("/v1/batches")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "batch_folder_in_use")
        assert first.get("/v1/batches").status_code == 200
    with fake_llm() as llm, serving(llm) as served:
        assert "--batch-dir" in served.get("/v1/files").json()["error"]["message"]


def test_damaged_and_half_written_files_of_the_folder_are_left_out(tmp_path: Path) -> None:
    options = ServerOptions(batch_dir=tmp_path)
    with fake_llm() as llm:
        with serving(llm, options) as served:
            client = served.client()
            batch = ended(client, submitted(client, encoded(line("a"))).id)
        (tmp_path / "files" / f"{batch.input_file_id}.json").write_text("{")
        (tmp_path / "files" / "file-0.jsonl").write_text("without its description")
        (tmp_path / "files" / "file-1.json.part").write_text("{")
        with serving(llm, options) as served:
            assert [one.id for one in served.client().files.list()] == [batch.output_file_id]
            assert {path.name for path in (tmp_path / "files").iterdir()} == {
                *(f"{batch.output_file_id}{kind}" for kind in (".json", ".jsonl")),
                *(f"{batch.input_file_id}{kind}" for kind in (".json", ".jsonl")),
            }


def test_the_output_of_a_file_replaces_files_alone(tmp_path: Path) -> None:
    """`onedraw batch IN /dev/stdout` by root replaced the device by a file; a folder was noticed after all lines had run."""
    source, target, link = tmp_path / "in", tmp_path / "out", tmp_path / "link"
    source.write_bytes(encoded(line("a")))
    os.mkfifo(tmp_path / "pipe")
    link.symlink_to(target)
    with fake_llm() as llm:
        for output in (tmp_path, tmp_path / "pipe"):
            with pytest.raises(BadSetting, match="name a file"):
                asyncio.run(run_file(llm, source, output))
        asyncio.run(run_file(llm, source, link))
    assert link.is_symlink()
    assert target.read_bytes().count(b"\n") == 1


def test_a_batch_whose_input_file_the_disk_has_lost_fails_and_says_so(tmp_path: Path) -> None:
    """All later batches of its caller waited for it, and then it waited itself until it was cancelled."""
    options = ServerOptions(batch_dir=tmp_path)
    with fake_llm() as llm:
        slowed(llm, 0.05)
        with serving(llm, options) as served:
            client = served.client()
            first, second = (submitted(client, encoded(line(name, max_tokens=30, ignore_eos=True))) for name in "ab")
        (tmp_path / "files" / f"{first.input_file_id}.jsonl").unlink()
        with serving(llm, options) as served:
            assert ended(served.client(), second.id).status == "completed"
            assert served.get(f"/v1/files/{first.input_file_id}/content").status_code == 404
            lost = served.client().batches.retrieve(first.id)
            assert (lost.status, lost.errors.data[0].code) == ("failed", "input_file_lost")
            assert "upload it again" in lost.errors.data[0].message


def test_results_are_read_up_to_the_first_torn_one(tmp_path: Path) -> None:
    """Cut the file at every byte: what is left is whole results, and with the rest run again the texts are the same."""
    whole = tmp_path / "whole"
    found = {
        number: LineResult(number % 3 > 0, json.dumps({"n": number, "t": "é\n" * number}).encode()) for number in (4, 0, 2, 1, 3)
    }

    def texts(log: ResultLog) -> list[tuple[int, bytes]]:
        return [*log.results(ok=True), *log.results(ok=False)]

    with ResultLog(whole, title="t") as log:
        for number, result in found.items():
            log.add(number, result)
        expected = texts(log)
    data, kept = whole.read_bytes(), set()
    assert [number for number, _ in expected] == [1, 2, 4, 0, 3]
    for cut in range(len(data)):
        path = tmp_path / "cut"
        path.write_bytes(data[:cut] + b"\0" * (cut % 3))
        with ResultLog(path, title="t") as log:
            kept.add(len(log))
            for number, result in found.items():
                if number not in log:
                    log.add(number, result)
            assert texts(log) == expected
        with ResultLog(path, title="t") as log:
            assert texts(log) == expected
    assert kept == set(range(5))
    with pytest.raises(ForeignResults):
        ResultLog(whole, title="another")
    assert whole.read_bytes() == data
