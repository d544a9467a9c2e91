"""Which steps are captured, the shapes they are padded to, and the shapes that are captured before the first request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onedraw.backends.torch.ops.base import CaptureOps
from onedraw.backends.torch.ops.cuda.ops import TritonOps
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.cuda_graphs import graph_caches
from onedraw.backends.torch.runner.graph_runner import AnyToken, CapturedStep, WarmUpShape, sampling_positions, warm_up_shapes
from onedraw.backends.torch.runner.inputs import InputLayout, bucket_of, make_inputs
from onedraw.backends.torch.runner.pipeline import LayerProbe, StageDevice
from onedraw.types import CheckpointSave, Draft, DryParams, History, PageCopy, Plan, Row, SamplingParams
from tests.support.replayed_work import ReplayedWork

ROW = Row("r", 0, ((0, 1),), 20, (5,), (), 20, True, SamplingParams(), History((1,) * 20, [5]))
CHAIN = tuple(Draft(1, i - 1) for i in range(5))


def test_rows_and_reach_are_padded_to_the_next_size() -> None:
    assert bucket_of(Plan((ROW,) * 3), recurrent=True).rows == 4  # type: ignore[union-attr]
    one, many = bucket_of(Plan((ROW,)), recurrent=True), bucket_of(Plan((replace(ROW, start=600),)), recurrent=False)
    assert one is not None
    assert many is not None
    assert (one.rows, one.tokens, one.longest, one.depth) == (1, 1, 1, None)
    assert (one.reach, many.reach) == (512, 1024)


def test_chains_and_trees_of_drafts_have_buckets_of_their_own() -> None:
    chain = bucket_of(Plan((ROW, replace(ROW, drafts=CHAIN))), recurrent=True)
    tree = bucket_of(Plan((replace(ROW, drafts=(Draft(1, -1), Draft(2, -1))),)), recurrent=True)
    assert chain is not None
    assert tree is not None
    assert (chain.rows, chain.tokens, chain.longest, chain.depth) == (2, 8, 8, None)
    assert tree.depth is not None


def test_prompts_and_checkpoints_are_not_captured_and_sampling_of_every_kind_is() -> None:
    for row in (
        replace(ROW, tokens=(5, 6)),
        replace(ROW, tokens=()),
        replace(ROW, samples=False),
        replace(ROW, restore=1),
        replace(ROW, copies=(PageCopy(0, 1, 2),)),
        replace(ROW, saves=(CheckpointSave(21, 0),)),
        replace(ROW, scores_prompt=True),
    ):
        assert bucket_of(Plan((ROW, row)), recurrent=False) is None
    assert bucket_of(Plan(()), recurrent=False) is None
    in_prompt = replace(ROW, prompt_stop=21)  # the chunked form, where there is one
    assert bucket_of(Plan((in_prompt,)), recurrent=True) is None
    assert bucket_of(Plan((in_prompt,)), recurrent=False) is not None
    for params in (SamplingParams(dry=DryParams(1.0)), SamplingParams(logprobs=1), SamplingParams(bad_words=((1, 2),))):
        assert bucket_of(Plan((replace(ROW, params=params),)), recurrent=True) is not None
    constrained = replace(ROW, history=replace(ROW.history, constraint=AnyToken(100)))
    assert bucket_of(Plan((ROW, constrained)), recurrent=True) is not None


def test_warm_up_shapes_fit_the_context_and_reach_its_end() -> None:
    near, alone, drafted, more = (shapes for _, shapes in warm_up_shapes(2, 4096))
    assert near == [WarmUpShape(1, 256), WarmUpShape(1, 512), WarmUpShape(2, 256), WarmUpShape(2, 512)]
    assert (alone, drafted, more) == (
        [WarmUpShape(1, 1024), WarmUpShape(1, 2048)],
        [],
        [WarmUpShape(2, 1024), WarmUpShape(2, 2048)],
    )
    assert [shapes for _, shapes in warm_up_shapes(1, 512)] == [[WarmUpShape(1, 256), WarmUpShape(1, 511)], [], [], []]
    assert [shapes for _, shapes in warm_up_shapes(1, 100)] == [[WarmUpShape(1, 99)], [], [], []]
    starts = {shape.start for shape in (*near, *alone, *more)}
    reaches = {bucket_of(Plan((replace(ROW, start=start, prompt_stop=0),)), recurrent=False).reach for start in starts}  # type: ignore[union-attr]
    assert reaches == {512, 1024, 2048, 4096}


def drafted(max_context: int, drafts: int) -> list[WarmUpShape]:
    return warm_up_shapes(2, max_context, drafts)[2][1]


@pytest.mark.parametrize(
    ("drafts", "lengths"), [(0, []), (1, [1]), (2, [1, 2]), (4, [1, 3, 4]), (15, [1, 3, 7, 11, 15]), (16, [1, 3, 7, 11, 15, 16])]
)
def test_one_row_is_warmed_up_with_drafts_of_every_bucket_up_to_the_longest(drafts: int, lengths: list[int]) -> None:
    found = drafted(4096, drafts)
    assert [(shape.rows, shape.drafts, shape.start) for shape in found] == [
        (1, n, start) for n in lengths for start in (256, 512)
    ]
    rows = (replace(ROW, drafts=tuple(Draft(1, i - 1) for i in range(n))) for n in range(1, drafts + 1))
    buckets = {bucket_of(Plan((row,)), recurrent=True).longest for row in rows}  # type: ignore[union-attr]
    assert len(buckets) == len(lengths)  # every number of drafts has a bucket that was warmed up


def test_warm_up_drafts_end_within_the_context() -> None:
    for max_context in (1, 5, 20, 300, 520):
        assert all(shape.start >= 0 and shape.start + shape.drafts < max_context for shape in drafted(max_context, 15))


def test_an_empty_graph_cache_is_used_where_it_is_given() -> None:
    """Regression: len() of a cache without graphs is 0, so `given or own` ignored it."""

    class Empty(ReplayedWork):
        def __len__(self) -> int:
            return 0

    class Capturable(TorchOps):
        @property
        def capture(self) -> CaptureOps:
            return TritonOps(torch.device("cpu"))

    cpu, given = torch.device("cpu"), Empty()
    stage_devices = [StageDevice(cpu, Capturable(cpu), 1), StageDevice(cpu, TorchOps(cpu), 2), StageDevice(cpu, Capturable(cpu))]
    assert graph_caches(stage_devices, given) == [given, None, given]
    own = graph_caches(stage_devices, None)
    assert own[0] is own[2] is not None


@pytest.mark.parametrize("checked", [False, True])
def test_the_column_of_faults_is_no_logprob_of_a_captured_step(checked: bool) -> None:
    """Tokens whose logprobs are requested by id have the last columns of the samples; with layers checked, faults come after."""
    row = replace(ROW, params=SamplingParams(logprobs=1, logprob_token_ids=(9, 3)))
    scores = torch.arange(0.0, -12.0, -1.0)
    sampler = TorchOps(torch.device("cpu")).sampler(vocab=len(scores), lanes=1, device=torch.device("cpu"))
    positions = sampling_positions((row,))
    answers = sampler.answers(scores[None], positions)
    faults = torch.full((1, 1), -1, dtype=answers.dtype)
    [expected] = sampler.sample(scores[None], positions)
    step = CapturedStep(
        Plan((row,)),
        make_inputs(Plan((row,)), layout=InputLayout(16, (2,), RowRule(1)), device=torch.device("cpu")),
        torch.zeros(1, 4),
        LayerProbe((), finite=[] if checked else None),
        positions,
        torch.cat([answers, faults], 1) if checked else answers,
        None,
    )
    assert expected is not None
    assert expected.logprobs is not None
    assert [id for id, _ in expected.logprobs.asked] == [9, 3]
    assert step.rows()[0].sampled == (expected,)
