"""Checkpoint offload: which checkpoints are written to disk and which prompts resume from a snapshot."""

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


def run(place: Path, *requests: Request, **changes: object) -> tuple[Engine, CheckpointOffload]:
    """Run the requests one after the other in a new engine."""
    backend = FakeBackend(**{"pages": 60, "checkpoints": 4, **changes})  # type: ignore[arg-type]
    allocator = Allocator(backend.capacity, reuse=True)
    folder = SnapshotFolder(place, fingerprint="f", page_size=backend.capacity.page_size, budget=10**9)
    offload = CheckpointOffload(folder, allocator=allocator, backend=backend)
    speculator = Speculator([], draft_tokens=0)
    scheduler = Scheduler(
        allocator=allocator, capacity=backend.capacity, speculator=speculator, step_tokens=512, fetch=offload.fetch
    )
    engine = Engine(backend=backend, scheduler=scheduler, offload=offload)
    for request in requests:
        engine.add(request, lambda event: None)
        while engine.busy:
            engine.step()
            allocator.audit_all()
    engine.close()
    return engine, offload


def request(prompt: tuple[int, ...] = PROMPT, **params: object) -> Request:
    return Request("r", prompt, SamplingParams(max_tokens=2, **params))  # type: ignore[arg-type]


def test_a_prompt_is_written_once_and_restored_once(tmp_path: Path) -> None:
    engine, offload = run(tmp_path, request(), request())
    assert (offload.saved, offload.restored) == (1, 0)  # the second request hits the prefix cache
    engine, offload = run(tmp_path, request(), request())
    assert (offload.saved, offload.restored) == (0, 1)
    assert engine.stats().prompt_tokens == 0


def test_a_short_prompt_gets_no_snapshot(tmp_path: Path) -> None:
    assert run(tmp_path, request(PROMPT[:63]))[1].saved == 0
    assert run(tmp_path, request(PROMPT[:64]))[1].saved == 1


def test_a_request_for_prompt_logprobs_restores_nothing(tmp_path: Path) -> None:
    run(tmp_path, request())
    assert run(tmp_path, request(prompt_logprobs=1))[1].restored == 0


@pytest.mark.parametrize("changes", [{"pages": 20}, {"checkpoints": 0}])
def test_without_free_pages_the_prompt_is_computed(tmp_path: Path, changes: dict[str, object]) -> None:
    run(tmp_path, request())
    engine, offload = run(tmp_path, request(PROMPT[:70]), **changes)
    assert engine.stats().completion_tokens == 2
    if changes.get("checkpoints") == 0:
        assert offload.restored == 1  # without recurrent state the pages are sufficient


def test_a_snapshot_of_another_backend_is_discarded_with_a_warning(tmp_path: Path, snapshot_warnings: list[str]) -> None:
    folder = SnapshotFolder(tmp_path, fingerprint="f", page_size=4, budget=10**9)
    folder.write(PROMPT, {}, logits=True, firsts=(0,))
    folder.close()
    engine, offload = run(tmp_path, request())
    assert (offload.restored, offload.saved) == (0, 1)  # it was written again
    assert engine.stats().prompt_tokens == 100
    assert len(snapshot_warnings) == 1
    assert "is discarded" in snapshot_warnings[0]
    assert run(tmp_path, request())[1].restored == 1


@pytest.mark.parametrize("method", ["export_checkpoint", "import_checkpoint"])
def test_a_failing_export_or_import_fails_no_request(
    tmp_path: Path, snapshot_warnings: list[str], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: FakeBackend, *given: object) -> None:
        raise RuntimeError("planted")

    if method == "import_checkpoint":
        run(tmp_path, request())
    monkeypatch.setattr(FakeBackend, method, fails)
    engine, offload = run(tmp_path, request())
    assert (offload.saved, offload.restored) == (0, 0)
    assert (engine.stats().prompt_tokens, engine.stats().completion_tokens) == (100, 2)
    assert "planted" in "".join(snapshot_warnings)
