"""The process of an engine: its errors, its death, a client that does not read or that dies, and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from onedraw.build.engine_process import EngineProcess
from onedraw.build.llm import build_llm
from onedraw.engine.client import CheckedRequest, Event
from onedraw.engine.remote import EngineServer, EventSender, RemoteEngine
from onedraw.errors import BadParameter, BadRequest, EngineLost, ModelError, OutOfMemory, QueueFull, ShuttingDown
from onedraw.llm.llm import LLM
from onedraw.settings import Settings
from onedraw.types import Request, SamplingParams

PATIENCE = 120.0


def fake(**settings: Any) -> LLM:
    return build_llm(Settings(model="fake", backend="fake", threads=1, **settings), start_engine=EngineProcess)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.005)


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # The thread has ended meanwhile.
            found.update(map(int, (task / "children").read_text().split()))
    return found


@pytest.fixture
def before() -> set[int]:
    return children()


def engine_pid(before: set[int]) -> int:
    (pid,) = [pid for pid in children() - before if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def long_streams(llm: LLM, count: int) -> list[Iterator[Any]]:
    return [llm.stream("The sea", seed=seed, max_tokens=2000, ignore_eos=True) for seed in range(count)]


def test_a_killed_engine_ends_every_stream_with_an_error_that_says_so(before: set[int], caplog: Any) -> None:
    with fake(max_batch=4) as llm:
        streams = long_streams(llm, 4)
        for stream in streams:
            next(stream)
        os.kill(engine_pid(before), signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineLost, match=r"the engine's process ended \(killed by SIGKILL\)"):
                list(stream)
        assert llm.service.failed
        assert not llm.service.ready
        with pytest.raises(EngineLost, match="takes no new requests"):
            llm.generate("The sea")
    assert "killed by SIGKILL" in caplog.text


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def test_an_error_while_it_loads_is_raised_as_it_was(before: set[int], tmp_path: Path) -> None:
    settings = Settings(model="random:no-such-shape", threads=1)
    with pytest.raises(Exception) as here:
        build_llm(settings)
    with pytest.raises(Exception) as there:
        build_llm(settings, start_engine=EngineProcess)
    assert (type(there.value), str(there.value)) == (type(here.value), str(here.value))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    with pytest.raises(OutOfMemory):  # This one is found by the engine's process alone.
        build_llm(Settings(model=f"random:{config}", threads=1, kv_memory=1), start_engine=EngineProcess)
    assert children() == before


def test_an_unbuildable_format_has_the_same_error() -> None:
    pytest.importorskip("llguidance")
    options: dict[str, Any] = {"json_schema": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}}
    with build_llm(Settings(model="fake", backend="fake", threads=1)) as llm, pytest.raises(BadParameter) as here:
        llm.generate("The sea", **options)
    with fake() as llm:
        with pytest.raises(BadParameter) as there:
            llm.generate("The sea", **options)
        assert llm.generate("The sea", max_tokens=1)
    assert str(there.value) == str(here.value)


def test_requests_too_large_for_a_frame_are_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the length of a frame has four bytes, and a longer one ended the thread that sends requests."""
    with fake() as llm:
        with monkeypatch.context() as small:
            small.setattr("onedraw.engine.remote.MOST_FRAME_BYTES", 1_000)
            with pytest.raises(BadRequest, match="over 1,000"):
                llm.generate([5] * 400, max_tokens=1, n=4)
        assert llm.generate([5] * 400, max_tokens=3, n=4)


def test_a_full_queue_is_the_error_of_each_request() -> None:
    with fake(max_batch=1, queue_limit=1, scheduling_policy="fcfs") as llm:
        first = llm.stream("The sea", max_tokens=2000, ignore_eos=True)
        next(first)
        second = llm.stream("The sea", max_tokens=5, ignore_eos=True)
        waiting = threading.Thread(target=list, args=(second,))
        waiting.start()
        wait_until(lambda: llm.service.stats().waiting == 1)
        with pytest.raises(QueueFull):
            llm.generate("The sea", max_tokens=5)
        first.close()  # type: ignore[attr-defined]
        waiting.join()
        assert llm.generate("The sea", max_tokens=5)


def test_a_client_that_does_not_read_stops_the_engine_and_loses_nothing() -> None:
    """The sockets fill up, so the engine waits in the middle of its step. Requests and cancellations are still accepted."""
    options: dict[str, Any] = {"seed": 1, "max_tokens": 1500, "ignore_eos": True, "logprobs": 100}
    with build_llm(Settings(model="fake", backend="fake", threads=1)) as llm:
        expected = llm.generate("The sea", **options)
    with fake() as llm:
        hold, seen = threading.Event(), threading.Event()
        engine = llm.service
        assert isinstance(engine, RemoteEngine)

        def blocking(event: Event) -> None:
            seen.set()
            hold.wait(PATIENCE)

        request = Request(id="blocks", prompt=(97,), params=SamplingParams(max_tokens=3, seed=1))
        engine.submit([(CheckedRequest(request), blocking)])
        assert seen.wait(PATIENCE)
        got: list[Any] = []
        reader = threading.Thread(target=lambda: got.append(llm.generate("The sea", **options)))
        reader.start()
        time.sleep(1.0)  # The engine fills the sockets: 1,500 tokens have 2 MB of logprobs.
        for number in range(20):
            other = Request(id=f"other{number}", prompt=(97,) * 1000, params=SamplingParams(max_tokens=3, seed=1))
            engine.submit([(CheckedRequest(other), lambda event: None)])
            engine.cancel(f"other{number}")
        assert not got
        hold.set()
        reader.join(PATIENCE)
        assert [(one.token_ids, one.tokens) for one in got] == [(expected.token_ids, expected.tokens)]  # type: ignore[union-attr]


def test_close_lets_running_requests_finish_and_refuses_others(before: set[int]) -> None:
    llm = fake()
    stream = llm.stream("The sea", max_tokens=1000, ignore_eos=True)
    next(stream)
    closer = threading.Thread(target=llm.close, args=(PATIENCE,))
    closer.start()
    wait_until(lambda: not llm.service.ready)
    with pytest.raises(ShuttingDown):
        llm.generate("The sea")
    assert len(list(stream)) > 500
    closer.join(PATIENCE)
    assert not llm.service.failed
    assert children() == before


def test_close_without_time_ends_running_requests() -> None:
    llm = fake()
    stream = llm.stream("The sea", max_tokens=2000, ignore_eos=True)
    next(stream)
    llm.close()
    with pytest.raises(ShuttingDown):
        list(stream)


FRONT = """
import sys, time
from onedraw.build.engine_process import EngineProcess
from onedraw.build.llm import build_llm
from onedraw.settings import Settings
llm = build_llm(Settings(model="fake", backend="fake", threads=1), start_engine=EngineProcess)
stream = llm.stream("The sea", max_tokens=2000, ignore_eos=True)
next(stream)
print("ready", flush=True)
time.sleep(600)
"""


def test_the_engine_ends_when_its_client_is_killed() -> None:
    front = subprocess.Popen([sys.executable, "-c", FRONT], stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    assert front.stdout.readline() == "ready\n"
    pids = Path(f"/proc/{front.pid}/task/{front.pid}/children").read_text().split()
    front.kill()
    front.communicate()
    assert pids
    wait_until(lambda: not any(alive(int(pid)) for pid in pids))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------------- a cancellation while a constraint is built


class SlowBuilder:
    """An engine client whose `check` waits."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.calls: list[str] = []

    def check(self, request: Request) -> CheckedRequest:
        self.go.wait(PATIENCE)
        return CheckedRequest(request)

    def submit(self, requests: Any) -> None:
        self.calls += [f"submit {checked.request.id}" for checked, _ in requests]

    def cancel(self, request_id: str) -> None:
        self.calls.append(f"cancel {request_id}")


def test_a_cancellation_while_a_constraint_is_built_comes_after_the_submission() -> None:
    engine: Any = SlowBuilder()
    nothing: Any = None
    server = EngineServer(engine, nothing, EventSender(nothing), nothing, fingerprint="")
    constrained: Any = Request(id="a", prompt=(1,), params=SamplingParams(), constraint=SimpleQueue())  # type: ignore[arg-type]
    server._submit([constrained])
    server._submit([Request(id="b", prompt=(1,), params=SamplingParams())])
    server._cancel("a")
    server._cancel("b")
    assert engine.calls == ["submit b", "cancel b"]
    engine.go.set()
    wait_until(lambda: len(engine.calls) == 4)
    assert engine.calls[2:] == ["submit a", "cancel a"]


def test_an_engine_of_another_model_is_refused(before: set[int], tmp_path: Path) -> None:
    """A replica's machine may have other weights by the same name."""
    models = []
    for name, width in (("here", 64), ("there", 128)):
        models.append(tmp_path / name / "config.json")
        models[-1].parent.mkdir()
        models[-1].write_text(json.dumps({**TINY, "intermediate_size": width}))
    here, there = (Settings(model=f"random:{model}", threads=1, self_check=False) for model in models)
    with pytest.raises(ModelError, match="have the same model and version"):
        build_llm(here, start_engine=lambda _: EngineProcess(there))
    assert children() == before


def test_an_engine_that_stands_still_is_noticed(before: set[int]) -> None:
    with fake() as llm:
        engine = llm.service
        assert isinstance(engine, RemoteEngine)
        assert engine.silent_seconds == 0
        stream = llm.stream("The sea", max_tokens=1000, ignore_eos=True)
        next(stream)
        pid = engine_pid(before)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: engine.silent_seconds > 0.5)
        os.kill(pid, signal.SIGCONT)
        list(stream)
        assert engine.silent_seconds == 0
