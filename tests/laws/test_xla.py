"""The contract on the xla backend: tiny models of a dense family, of hybrids, of experts, and of one whose layers share keys and
values and have inputs of their own. Tokens and checksums are compared.

The laws share one backend per model, since compiling its programs takes long.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.backends.xla.making import xla_backend

# isort: split
from onedraw.backends.xla import backend as backend_module
from onedraw.backends.xla import inputs, layers, model, sampler, state
from onedraw.build import xla as compiling
from onedraw.checkpoints.open import open_checkpoint
from onedraw.memory.allocator import Allocator
from onedraw.models.registry import read_model_info
from onedraw.settings import Settings
from onedraw.types import DryParams, Request, SamplingParams
from tests.laws.harness import KnownAnswerProposer, Schedule, plain, run, same
from tests.laws.test_forced import forcing, scored
from tests.laws.test_snapshots import requests_of as disk_requests
from tests.laws.test_snapshots import restarted
from tests.support import tiny, tiny_modern

DENSE, HYBRID, EXPERTS, SHARED = "qwen3", "qwen3_5_odd", "qwen3_moe", "gemma4_e4b"
COUNTED = ("restores", "whole_prompts", "page_copies", "checkpoints_saved", "preemptions", "middle_chunks", "draft_trees")


def params(seed: int) -> SamplingParams:
    """Temperatures 0, 0.7 and 1 in turn, with penalties and filters."""
    return SamplingParams(
        temperature=(0.0, 0.7, 1.0)[seed % 3],
        top_k=30 if seed % 4 == 1 else 0,
        top_p=0.9 if seed % 4 == 2 else 1.0,
        min_p=0.02 if seed % 2 else 0.0,
        repetition_penalty=1.1,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        dry=DryParams(multiplier=0.5) if seed % 4 == 3 else None,
        logit_bias=((seed, 2.0),),
        seed=seed,
        max_tokens=9 + seed % 4,
        logprobs=2 if seed % 3 == 1 else None,
        logprob_token_ids=(seed, 3) if seed % 2 == 0 else (),
        prompt_logprobs=1 if seed == 4 else None,
        checksums=True,
    )


def conversation() -> list[Request]:
    """First messages, the same prompt again, prompts with a common prefix, second turns that contain a first prompt."""
    rng = np.random.default_rng(5)
    text = [tuple(int(t) for t in rng.integers(0, tiny.VOCAB, n)) for n in (150, 70, 90, 40)]
    prompts = [text[0], text[0], text[0] + text[1], text[0][:100] + text[2], text[3], text[0][:128], text[3]]
    return [Request(f"q{i}", prompt, params(i)) for i, prompt in enumerate(prompts)]


REQUESTS = conversation()
LATE = tuple(range(0, 7 * 16, 16))  # each arrives when the one before has finished


class FewPages(Allocator):
    """Uses only a few more pages than one long request needs, of a backend that has many."""

    def __init__(self, capacity: Any, **named: Any) -> None:
        groups = tuple(dataclasses.replace(group, pages=38) for group in capacity.groups)
        super().__init__(dataclasses.replace(capacity, groups=groups), **named)


class Case:
    """A backend, its plain answers, and a proposer that knows them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backend = xla_backend(folder)
        self.expected = plain(lambda: self.backend, REQUESTS)
        answers = {r.id: a.tokens for r, a in zip(REQUESTS, self.expected, strict=True)}
        self.drafts = KnownAnswerProposer(answers, tiny.VOCAB)

    def differs(self, schedule: Schedule) -> bool:
        """Whether a new backend, compiled with a planted fault, gives other answers."""
        return not same(run(xla_backend(self.folder), REQUESTS[:4], schedule)[0], self.expected[:4])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    place = tmp_path_factory.mktemp("xla")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_modern.QWEN3_MOE, "num_experts_per_tok", 3)  # the order of two additions could not be seen
        return {name: Case(tiny.write_safetensors(name, place / name)) for name in (DENSE, HYBRID, EXPERTS, SHARED)}


@pytest.mark.parametrize("name", [DENSE, HYBRID, EXPERTS, SHARED])
def test_no_schedule_changes_a_bit(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    drafts, trees = case.drafts, dataclasses.replace(case.drafts, tree=True)
    variations = {
        "batched": Schedule(),
        "small steps": Schedule(step_tokens=64, arrivals=(5, 0, 2, 9, 1, 3)),
        "checkpoints": Schedule(reuse=True, arrivals=LATE),
        "few pages": Schedule(reuse=True, step_tokens=100, allocator=FewPages),
        "drafts": Schedule(proposer=drafts, reuse=True, arrivals=LATE[::2]),
        "trees": Schedule(proposer=trees),
        "trees, few pages": Schedule(proposer=trees, step_tokens=80, reuse=True, allocator=FewPages),
    }
    counted: Counter[str] = Counter()
    for label, schedule in variations.items():
        got, stats = run(case.backend, REQUESTS, schedule)
        assert same(got, case.expected), label
        counted.update({field: getattr(stats, field) for field in COUNTED})
        counted.update(kept=stats.accepted_tokens, rejected=stats.draft_tokens - stats.accepted_tokens)
        counted.update(hits=stats.prefix_hits, mixed=stats.mixed_steps)
    assert [what for what, count in counted.items() if not count] == [], counted


@pytest.mark.parametrize("name", [DENSE, HYBRID])
def test_a_forced_reply_has_the_scores_of_its_generation(cases: dict[str, Case], name: str) -> None:
    requests = [scored(request) for request in REQUESTS]
    expected, _ = run(cases[name].backend, requests, Schedule())
    forced = [
        forcing(request, answer, len(answer.tokens) - (number == 2), speculate=number != 1)
        for number, (request, answer) in enumerate(zip(requests, expected, strict=True))
    ]
    got, stats = run(cases[name].backend, forced, Schedule(reuse=True, arrivals=LATE[::2]))
    assert same(got, expected)
    assert min(stats.forced_tokens, stats.prefix_hits) > 0


def test_a_prompt_restored_from_disk_gives_the_bits_of_a_cold_run(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases[HYBRID]
    cold = plain(lambda: case.backend, disk_requests(tiny.VOCAB))
    got, counted = restarted(lambda: case.backend, lambda: case.backend, disk_requests(tiny.VOCAB), tmp_path)
    assert same(got, cold)
    assert counted["restored"] >= 4
    assert counted["whole"] >= 3


@pytest.mark.parametrize(("name", "cuts"), [(DENSE, (1, 2)), (HYBRID, (2,)), (SHARED, (1, 2))])
def test_layers_on_several_devices_give_the_bits_of_one_device(cases: dict[str, Case], name: str, cuts: tuple[int, ...]) -> None:
    case = cases[name]
    split = xla_backend(case.folder, cuts=cuts)
    assert len({stage.device for stage in split._stages}) == len(cuts) + 1
    proposer = dataclasses.replace(case.drafts, tree=True)
    got, stats = run(split, REQUESTS, Schedule(proposer=proposer, reuse=True, step_tokens=80, arrivals=(0, 9, 9)))
    assert same(got, case.expected)
    assert min(stats.restores, stats.accepted_tokens, stats.draft_trees, stats.middle_chunks, stats.mixed_steps) > 0


def test_eight_devices_run_one_of_eight_layers_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.COMMON, "num_hidden_layers", 8)
    info = read_model_info(open_checkpoint(tiny.write_safetensors("llama", tmp_path / "hf")))
    names = ",".join(f"cpu:{number}" for number in range(8))
    found = []
    for devices in (None, names):
        settings = Settings.of(
            backend="xla", devices=devices, max_batch=4, max_context=256, turn_tokens=64, self_check=False, draft="none"
        )
        backend = compiling.xla_backend(
            dataclasses.replace(settings, cache_dir=tmp_path), info, lambda line: None, progress=lambda done, layers: None
        )
        found.append((backend, run(backend, [dataclasses.replace(r, prompt=r.prompt[:90]) for r in REQUESTS[:4]], Schedule())[0]))
    assert len(found[0][0]._stages) == 1
    assert [len(stage.layers) for stage in found[1][0]._stages] == [1] * 8
    assert same(found[0][1], found[1][1])


# ---------------------------------------------------------------------- planted faults


def forget_to_move_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept nodes of a tree stay in the tree's slots, and the state stays that of the previous step."""
    monkeypatch.setattr(state, "verified", lambda sampled, drafts, shape: jnp.zeros(max(shape.drafts, 1), bool))


def commit_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is committed to the lane's state, kept or not."""
    monkeypatch.setattr(state, "verified", lambda sampled, drafts, shape: jnp.ones(max(shape.drafts, 1), bool))


def key_noise_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sampler.gumbel
    monkeypatch.setattr(sampler, "gumbel", lambda keys, vocab: real(jnp.flip(keys, 0), vocab))


def lose_the_last_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories of drafted positions lack the last draft."""
    real = backend_module.sampling_inputs
    short = lambda p: p._replace(drafts=p.drafts[:-1])  # noqa: E731

    def short_histories(positions: Any, *given: Any, **named: Any) -> dict[str, Any]:
        found, keys = real([short(p) for p in positions], *given, **named), real(positions, *given, **named)["keys"]
        return {**found, "keys": keys}

    monkeypatch.setattr(backend_module, "sampling_inputs", short_histories)


def sum_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums depend on the number of rows."""
    real = layers.row_sum
    monkeypatch.setattr(layers, "row_sum", lambda x: real(x) * (1 + (x.shape[0] == 32) * 2.0**-22))


def shift_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution window ends one position early."""
    real = inputs._recurrent_inputs

    def off_by_one(*given: Any) -> dict[str, Any]:
        found = real(*given)
        return {**found, "closings": np.maximum(found["closings"] - 1, 0)}

    monkeypatch.setattr(inputs, "_recurrent_inputs", off_by_one)


def add_experts_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of every other token of the step are added in the opposite order."""
    real = model.choose_experts

    def turned(*given: Any) -> tuple[Any, Any]:
        return tuple(found.at[1::2].set(found[1::2, ::-1]) for found in real(*given))  # type: ignore[return-value]

    monkeypatch.setattr(model, "choose_experts", turned)


FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, bool]] = [
    (forget_to_move_nodes, DENSE, True),
    (commit_everything, HYBRID, False),
    (key_noise_by_row, DENSE, False),
    (lose_the_last_draft, DENSE, False),
    (sum_by_rows, DENSE, False),
    (shift_the_window, HYBRID, False),
    (add_experts_by_place, EXPERTS, False),
]


@pytest.mark.parametrize(("fault", "name", "tree"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_fault_is_caught(
    cases: dict[str, Case], fault: Callable[[pytest.MonkeyPatch], None], name: str, tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases[name]
    fault(monkeypatch)
    proposer = dataclasses.replace(case.drafts, tree=tree)
    assert case.differs(Schedule(proposer=proposer, reuse=True, step_tokens=80, arrivals=(0, 0, 16, 16)))


def test_the_self_check_passes_on_this_machine(cases: dict[str, Case]) -> None:
    backend = xla_backend(cases[DENSE].folder, check=True)
    assert backend.report is not None
    assert backend.report.passed, backend.report.results
    assert len(backend.report.results) == 3
    assert backend.shape != backend.shape.uniform


def test_the_self_check_notices_a_sum_that_depends_on_the_rows_and_fixes_the_number_of_rows(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    sum_by_rows(monkeypatch)
    backend = xla_backend(cases[DENSE].folder, check=True)
    assert backend.report is not None
    assert backend.report.passed
    assert backend.shape == backend.shape.uniform


def test_bf16_uses_one_fixed_number_of_rows_and_passes_the_self_check(cases: dict[str, Case]) -> None:
    backend = xla_backend(cases[DENSE].folder, dtype="bf16", check=True)
    assert backend.shape == backend.shape.uniform
    assert backend.report is not None
    assert backend.report.passed, backend.report.results


def test_the_number_of_lanes_and_of_tokens_in_a_step_changes_no_bit(cases: dict[str, Case]) -> None:
    case = cases[DENSE]
    other = xla_backend(case.folder, lanes=9, step_tokens=256)
    assert other.shape.decode != case.backend.shape.decode
    got, _ = run(other, REQUESTS, Schedule())
    assert same(got, case.expected)
