"""The shelf: what goes out, what comes in, and what is not worth either."""

from __future__ import annotations

from pathlib import Path

import pytest

from onedraw.backends.fake import FakeBackend
from onedraw.engine.checkpoint_offload import CheckpointOffload
from onedraw.engine.engine import Engine
from onedraw.engine.scheduler import Scheduler
from onedraw.memory.allocator import Allocator
from onedraw.memory.disk_snapshots import SnapshotFolder
from onedraw.speculation.speculator import Speculator
from onedraw.types import Request, SamplingParams

PROMPT = tuple(i % 59 for i in range(100))


def asked(place: Path, *requests: Request, fewest: int = 64, **changes: object) -> tuple[Engine, CheckpointOffload]:
    """All requests through one life of an engine."""
    backend = FakeBackend(**{"pages": 60, "checkpoints": 4, **changes})  # type: ignore[arg-type]
    allocator = Allocator(backend.capacity, reuse=True)
    folder = SnapshotFolder(place, fingerprint="f", page_size=backend.capacity.page_size, budget=10**9)
    shelf = CheckpointOffload(folder, allocator=allocator, backend=backend, fewest=fewest)
    speculator = Speculator([], draft_tokens=0)
    scheduler = Scheduler(
        allocator=allocator, capacity=backend.capacity, speculator=speculator, turn_tokens=512, fetch=shelf.fetch
    )
    engine = Engine(backend=backend, scheduler=scheduler, offload=shelf)
    for request in requests:
        engine.add(request, lambda event: None)
        while engine.busy:
            engine.step()
            allocator.audit_all()
    engine.close()
    return engine, shelf


def request(prompt: tuple[int, ...] = PROMPT, **params: object) -> Request:
    return Request("r", prompt, SamplingParams(max_tokens=2, **params))  # type: ignore[arg-type]


def test_a_prompt_goes_out_once_and_comes_in_once(tmp_path: Path) -> None:
    engine, shelf = asked(tmp_path, request(), request())
    assert (shelf.saved, shelf.restored) == (1, 0)  # the second was in memory
    engine, shelf = asked(tmp_path, request(), request())
    assert (shelf.saved, shelf.restored) == (0, 1)
    assert engine.stats().prompt_tokens == 0


def test_a_short_prompt_is_not_worth_it(tmp_path: Path) -> None:
    assert asked(tmp_path, request(PROMPT[:63]))[1].saved == 0
    assert asked(tmp_path, request(PROMPT[:64]))[1].saved == 1


def test_prompt_logprobs_look_nothing_up(tmp_path: Path) -> None:
    asked(tmp_path, request())
    assert asked(tmp_path, request(prompt_logprobs=1))[1].restored == 0


@pytest.mark.parametrize("changes", [{"pages": 20}, {"checkpoints": 0}])
def test_without_room_the_prompt_is_computed(tmp_path: Path, changes: dict[str, object]) -> None:
    asked(tmp_path, request())
    engine, shelf = asked(tmp_path, request(PROMPT[:70]), **changes)
    assert engine.stats().completion_tokens == 2
    if changes.get("checkpoints") == 0:
        assert shelf.restored == 1  # pages alone still serve where there is no recurrent state


def test_a_snapshot_that_is_not_this_backends_is_refused_with_a_warning(tmp_path: Path, snapshot_warnings: list[str]) -> None:
    folder = SnapshotFolder(tmp_path, fingerprint="f", page_size=4, budget=10**9)
    folder.write(PROMPT, {}, logits=True, firsts=(0,))
    folder.close()
    engine, shelf = asked(tmp_path, request())
    assert (shelf.restored, shelf.saved) == (0, 1)  # a good one took its place
    assert engine.stats().prompt_tokens == 100
    assert len(snapshot_warnings) == 1
    assert "is not used" in snapshot_warnings[0]
    assert asked(tmp_path, request())[1].restored == 1


@pytest.mark.parametrize("way", ["export", "adopt"])
def test_a_device_that_cannot_give_or_take_a_snapshot_fails_nobody(
    tmp_path: Path, snapshot_warnings: list[str], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: FakeBackend, *given: object) -> None:
        raise RuntimeError("planted")

    if way == "adopt":
        asked(tmp_path, request())
    monkeypatch.setattr(FakeBackend, way, fails)
    engine, shelf = asked(tmp_path, request())
    assert (shelf.saved, shelf.restored) == (0, 0)
    assert (engine.stats().prompt_tokens, engine.stats().completion_tokens) == (100, 2)
    assert "planted" in "".join(snapshot_warnings)
