"""The contract over stages in other processes: they give the tokens and checksums of one process.

Here the processes are threads, which use the link and the messages of real ones; `tests/build/test_ray_stages.py` has processes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onedraw.backends.torch.remote.stage import RemoteStage
from onedraw.backends.torch.remote.stream_buffer import StreamBuffer
from onedraw.backends.torch.remote.worker import StageWorker
from onedraw.backends.torch.runner.pipeline import Stage
from onedraw.backends.torch.state.model_state import ModelState
from onedraw.checkpoints.open import open_checkpoint
from onedraw.engine.engine import MOST_LOSSES
from onedraw.errors import StateLost
from onedraw.memory.allocator import Allocator
from onedraw.memory.disk_snapshots import SnapshotFolder
from onedraw.models.registry import read_model_info
from onedraw.types import Request
from tests.laws.harness import KnownAnswerProposer, Schedule, plain, random_params, run, same
from tests.laws.test_modern_drafters import TRAINED, dflash, mtp
from tests.laws.test_modern_drafters import requests_of as drafted_requests
from tests.laws.test_split import LATE, REQUESTS, SIZES, answers_of, splits_of
from tests.support import tiny
from tests.support.stage_threads import make_remote_backend
from tests.support.torch_backend import make_backend

FAMILIES = ("llama31", "qwen3_5_odd", "gemma4_e4b", "qwen3_moe", "gemma4_26b")
REMOTE = {key: value for key, value in SIZES.items() if key != "kernels"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("remote")
    return {name: tiny.write_safetensors(name, place / name) for name in (*FAMILIES, "qwen3_5_mtp")}


@contextmanager
def remote(folder: Path, **how: Any) -> Iterator[Any]:
    backend, _ = make_remote_backend(folder, **how)
    try:
        yield backend
    finally:
        backend.close()


@pytest.mark.parametrize("name", [*FAMILIES[:3], *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES[3:])])
def test_a_stage_in_another_process_changes_no_bit(folders: dict[str, Path], name: str) -> None:
    """One remote stage; two in a row, which send the stream to each other; one between local stages; steps in flight at once."""
    expected, drafts = answers_of(folders[name])
    cuts, counted = splits_of(folders[name]), Counter[str]()
    places: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = [
        (cuts[0], (0,), False),
        (cuts[-1], (0, 1), False),
        (cuts[-1], (1,), False),
        (cuts[-1], (0, 1), True),
    ]
    for number, (at, where, overlap) in enumerate(places):
        schedule = Schedule(proposer=replace(drafts, tree=bool(number % 2)), reuse=True, step_tokens=64, arrivals=LATE)
        with remote(folders[name], cuts=at, remote=where, overlap=overlap, **REMOTE) as backend:
            got, stats = run(backend, REQUESTS, schedule)
        assert same(got, expected), (at, where, overlap)
        counted.update(kept=stats.accepted_tokens, rejected=stats.draft_tokens - stats.accepted_tokens)
        counted.update(restores=stats.restores, middle=stats.middle_chunks, overlapped=stats.overlapped_steps)
    assert all(counted[what] for what in ("kept", "rejected", "restores", "middle", "overlapped")), counted


def test_the_self_check_covers_stages_in_other_processes(folders: dict[str, Path]) -> None:
    """The products of a remote stage are compared where they are computed, and whole steps through all stages."""
    with remote(folders["qwen3_moe"], cuts=(1,), **{**REMOTE, "check": True}) as backend:
        assert backend.report is not None
        assert backend.report.passed
    with remote(folders["qwen3_moe"], cuts=(1,), **{**REMOTE, "check": True}) as again:
        assert again.identity == backend_identity(folders["qwen3_moe"])


def backend_identity(folder: Path) -> str:
    return make_backend(folder, kernels=False, lanes=1).identity


@pytest.mark.parametrize("name", ["dflash", "mtp"])
def test_a_drafter_reads_the_features_of_remote_layers(name: str, folders: dict[str, Path]) -> None:
    """A lost feature would change the number of kept drafts, not the tokens."""
    target = folders["qwen3_5_mtp"] if name == "mtp" else TRAINED / "trained_qwen3_5"
    make = (lambda: mtp(target)) if name == "mtp" else (lambda: dflash(target, 12))
    requests = drafted_requests(read_model_info(open_checkpoint(target)).spec.vocab)[:3]
    one = make_backend(target, kernels=False, check=False, make_drafter=make())
    expected, alone = run(one, requests, Schedule(reuse=True))
    with remote(target, cuts=(1, 3), remote=(0, 1), make_drafter=make()) as backend:
        got, stats = run(backend, requests, Schedule(reuse=True))
    assert same(got, expected)
    figures = [(s.draft_tokens, s.accepted_tokens, s.steps) for s in (alone, stats)]
    assert figures[0] == figures[1]
    assert stats.accepted_tokens


@pytest.mark.parametrize("name", ["qwen3_5_odd", "gemma4_e4b"])
def test_snapshots_are_the_same_files_with_and_without_remote_stages(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """A snapshot that one process wrote is restored into remote stages, bit for bit, and the other way round."""
    expected, _ = answers_of(folders[name])
    budget = {"fingerprint": "one", "page_size": 8, "budget": 2**30}
    local = make_backend(folders[name], **{**SIZES})
    run(local, REQUESTS, Schedule(reuse=True, snapshots=SnapshotFolder(tmp_path / "a", **budget)))
    with remote(folders[name], cuts=splits_of(folders[name])[-1], remote=(0, 1), **REMOTE) as backend:
        schedule = Schedule(reuse=True, snapshots=SnapshotFolder(tmp_path / "a", **budget))
        got, stats = run(backend, REQUESTS, schedule)
        assert same(got, expected)
        assert stats.snapshots_restored
        run(backend, REQUESTS, Schedule(reuse=True, snapshots=SnapshotFolder(tmp_path / "b", **budget)))
    again = make_backend(folders[name], **{**SIZES})
    got, stats = run(again, REQUESTS, Schedule(reuse=True, snapshots=SnapshotFolder(tmp_path / "b", **budget)))
    assert same(got, expected)
    assert stats.snapshots_restored


def test_a_remote_stage_without_memory_ends_and_changes_no_reply(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the second of two remote stages fail in turn; the stage after it is told instead of waiting."""
    expected, drafts = answers_of(folders["qwen3_5_odd"])
    real, failed = StageWorker._advance, set()

    def advance(self: StageWorker, step: Any, *given: Any) -> Any:
        if len(step.rows) > 1 and self not in failed:  # a step of one row always has enough memory
            failed.add(self)
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return real(self, step, *given)

    monkeypatch.setattr(StageWorker, "_advance", advance)
    twice = [*REQUESTS, *(replace(request, id=f"again {request.id}") for request in REQUESTS)]
    known = replace(drafts, answers={**drafts.answers, **{f"again {name}": text for name, text in drafts.answers.items()}})
    with remote(folders["qwen3_5_odd"], cuts=(1, 3), remote=(0, 1), **{**REMOTE, "lanes": 8}) as backend:
        got, stats = run(backend, twice, Schedule(proposer=known, reuse=True, step_tokens=256))
    assert stats.out_of_memory_steps == len(failed) == 2
    assert same(got, [*expected, *expected])


def test_another_error_of_a_remote_stage_ends_the_requests_of_its_step_alone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = answers_of(folders["llama31"])
    real, count = StageWorker._advance, 0

    def advance(self: StageWorker, *given: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise ValueError("planted")
        return real(self, *given)

    monkeypatch.setattr(StageWorker, "_advance", advance)
    with remote(folders["llama31"], cuts=(1,), **REMOTE) as backend:
        got, _ = run(backend, REQUESTS, Schedule(arrivals=(0, 8, 8, 8)))
    assert got[0].error == "internal_error"
    assert same(got[1:], expected[1:])


def test_a_float16_stream_that_overflows_on_a_remote_stage_names_the_layer(folders: dict[str, Path]) -> None:
    """Layer 0 is in another process, and only there its output is checked."""
    with remote(folders["llama31"], cuts=(1,), **{**REMOTE, "dtype": "f32", "activation": "f16"}) as backend:
        group = backend._stage_group
        layer = group._hosted[0].host.worker._stage.layers[0]
        layer.attn_norm.fill_(torch.inf)
        [answer], _ = run(backend, REQUESTS[:1], Schedule())
    assert answer.error == "not_finite"


# ---------------------------------------------------------------------- the death of a stage


def streams(count: int) -> list[Request]:
    """Requests of every kind, of which some begin alike, with long enough replies that all of them run when a stage dies."""
    rng = np.random.default_rng(11)
    stem = tuple(int(t) for t in rng.integers(0, tiny.VOCAB, 70))
    requests = []
    for number in range(count):
        prompt = stem[: 65 if number % 3 else 9] + tuple(int(t) for t in rng.integers(0, tiny.VOCAB, 1 + number % 5))
        params = random_params(rng, vocab=tiny.VOCAB, max_tokens=85, calm=True)
        requests.append(Request(f"q{number}", prompt, params))
    return requests


def die(monkeypatch: pytest.MonkeyPatch, at: Mapping[int, Sequence[int]]) -> list[int]:
    """Have the stage that begins with a layer die in the middle of these of its steps, with its layers. Returns the first
    layers of the stages that have died."""
    real, counts, deaths = StageWorker._advance, Counter[int](), []

    def advance(self: StageWorker, *given: Any) -> Any:
        start = self._stage.start
        counts[start] += 1
        stream = real(self, *given)
        if counts[start] in at.get(start, ()):
            deaths.append(start)
            self.dead = True  # type: ignore[attr-defined]
            raise StateLost("planted")
        return stream

    monkeypatch.setattr(StageWorker, "_advance", advance)
    return deaths


@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        ("qwen3_5_odd", False),
        *(pytest.param(*case, marks=pytest.mark.long) for case in itertools.product(("llama31", "gemma4_e4b"), (False, True))),
        pytest.param("qwen3_5_odd", True, marks=pytest.mark.long),
    ],
)
def test_the_death_of_a_stage_ends_and_changes_no_stream(
    name: str, overlap: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 streams; the first stage dies in step 50, the second in step 60, and both lose their layers."""
    requests = streams(20)
    sizes = {**REMOTE, "lanes": 20, "pages": 500, "drafts": 200}
    one = make_backend(folders[name], kernels=False, **{**sizes, "lanes": 1})
    expected = plain(lambda: one, requests)
    answers = {r.id: a.tokens for r, a in zip(requests, expected, strict=True)}
    drafts = KnownAnswerProposer(answers, tiny.VOCAB, wrong_every=2, empty_every=2)
    cuts = splits_of(folders[name])[-1]
    with monkeypatch.context() as patch, remote(folders[name], cuts=cuts, remote=(0, 1), overlap=overlap, **sizes) as backend:
        deaths = die(patch, {0: (50,), cuts[0]: (60,)})
        got, stats = run(backend, requests, Schedule(proposer=drafts, reuse=True, step_tokens=200))
        assert sorted(deaths) == [0, cuts[0]]
        assert stats.state_losses == 2
        assert stats.failed_steps == 0
        assert stats.accepted_tokens
        assert same(got, expected)
        assert [one.host.loads for one in backend._stage_group._hosted] == [2, 2]


def test_a_stage_that_does_not_come_back_ends_requests_with_an_error_that_says_so(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request tries again, and succeeds when the stage is back."""
    expected, _ = answers_of(folders["llama31"])
    deaths = die(monkeypatch, {0: (4,)})
    with remote(folders["llama31"], cuts=(1,), **REMOTE) as backend:
        host = backend._stage_group._hosted[0].host
        host.broken = True
        got, stats = run(backend, REQUESTS[:2], Schedule())
        assert deaths
        assert [answer.error for answer in got] == ["state_lost"] * 2
        host.broken = False
        got, stats = run(backend, REQUESTS, Schedule(arrivals=LATE))
        assert same(got, expected)
        assert stats.state_losses == 1


def test_a_stage_that_dies_in_every_step_does_not_keep_requests_for_ever(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    die(monkeypatch, {0: range(1, 1000)})
    with remote(folders["llama31"], cuts=(1,), **REMOTE) as backend:
        got, stats = run(backend, REQUESTS[:2], Schedule())
    assert [answer.error for answer in got] == ["state_lost"] * 2
    assert stats.state_losses == MOST_LOSSES + 1


def keep_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are resumed from pages whose content was lost."""
    monkeypatch.setattr(Allocator, "forget_cached", lambda self: None)


def test_a_cache_that_outlives_its_pages_is_noticed(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = answers_of(folders["llama31"])
    keep_the_prefix_cache(monkeypatch)
    die(monkeypatch, {0: (12,)})
    with remote(folders["llama31"], cuts=(1,), **REMOTE) as backend:
        got, stats = run(backend, REQUESTS, Schedule(reuse=True, arrivals=LATE))
    assert stats.state_losses == 1
    assert not same(got, expected)


# ---------------------------------------------------------------------- planted faults


def forget_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote stage does not commit kept drafts."""
    monkeypatch.setattr(RemoteStage, "commit", lambda self, drafts: None)


def run_the_stream_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote stage computes with the buffer as the step before left it."""
    real, kept = StageWorker._advance, {}

    def advance(self: StageWorker, step: Any, before: Any, probe: Any) -> Any:
        stale = kept.get(id(self))
        kept[id(self)] = before.x.clone()
        if stale is not None:
            count = min(len(stale), len(before.x))
            before.x[:count] = stale[:count]
        return real(self, step, before, probe)

    monkeypatch.setattr(StageWorker, "_advance", advance)


def forget_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes of a remote stage are not restored from their checkpoints."""
    real = ModelState.prepare
    monkeypatch.setattr(ModelState, "prepare", lambda self, *, copies, restored: real(self, copies=copies, restored=()))


def round_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is rounded to bfloat16 when it is sent."""
    real = StreamBuffer.fill
    monkeypatch.setattr(StreamBuffer, "fill", lambda self, step, x, own: real(self, step, x.bfloat16().float(), own))


def commit_in_the_wrong_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote stage reads the rollback buffer one slot further."""
    real = Stage.commit
    moved = lambda drafts: type(drafts)([replace(p, rollback_start=p.rollback_start + 1) for p in drafts.kept])  # noqa: E731
    monkeypatch.setattr(
        Stage, "commit", lambda self, state, drafts: real(self, state, moved(drafts) if not self.start else drafts)
    )


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (forget_commits, "qwen3_5_odd"),
        (run_the_stream_of_the_step_before, "llama31"),
        (forget_restores, "qwen3_5_odd"),
        (round_on_the_way, "llama31"),
        (commit_in_the_wrong_slots, "qwen3_5_odd"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_fault_of_a_remote_stage_is_caught(
    folders: dict[str, Path], fault: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, drafts = answers_of(folders[name])
    fault(monkeypatch)
    with remote(folders[name], cuts=(1,), **REMOTE) as backend:
        got, _ = run(backend, REQUESTS, Schedule(proposer=drafts, reuse=True, step_tokens=64, arrivals=LATE))
    assert not same(got, expected)
