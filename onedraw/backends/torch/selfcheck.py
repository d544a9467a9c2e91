"""The self-check at start: does batching change results on this machine?

In: a model and its state before anything is served. Out: the row rule with which no row depends on another, and which
comparisons passed. Libraries change with versions, processors and shapes, so this is measured, not assumed. Where our own code
takes another kernel from some number of rows on (a border), bits are compared on both sides of every border. The row rule says
with how many rows a matrix product may be called (`ops/plain/linear.py`). A row is an input row of a product, and in a whole step
the work of one sequence; a lane is the slot of a sequence's recurrent state.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onedraw.backends.base import CheckResult, SelfCheck
from onedraw.backends.memory_plan import LOGITS_BYTES
from onedraw.backends.torch.model.layer import MixtureOfExperts
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.ops.base import Ops
from onedraw.backends.torch.ops.plain.linear import Linear, RowRule
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.inputs import InputLayout, make_inputs
from onedraw.backends.torch.runner.pipeline import Stage, current_device
from onedraw.backends.torch.state.model_state import StageState
from onedraw.backends.torch.state.recurrent_state import CHUNK
from onedraw.types import History, Plan, Row, SamplingParams

ROWS = (1, 2, 5, 16, 64)  # numbers of rows that are always compared
MOST_OUTPUTS = 8192  # If a product can be cut to its first outputs, so many are compared: all are computed alike. 32 divides it.
DEPTH = 2  # fewest layers that run when whole steps are compared; more run until every kind of mixer is among them
STEP_LENGTH = 270  # positions that a generated token attends to: more than one split of the keys
MOST_STEPS = 256  # the most generated tokens of one compared step


@dataclass(frozen=True, slots=True)
class RowCheck(SelfCheck):
    rule: RowRule  # the row rule under which the products were compared


@torch.inference_mode()
def self_check(model: Transformer, states: Sequence[StageState], *, layout: InputLayout) -> RowCheck:
    """Find the first row rule (with how many rows products are called) under which all results agree. If whole steps differ, use
    only the largest tile of attention and compare them again. Return the comparisons and the rule."""
    with current_device(model.device):
        return _checked(model, states, layout)


def _checked(model: Transformer, states: Sequence[StageState], layout: InputLayout) -> RowCheck:
    rule, products = _rule_that_agrees(model, layout.rule)
    model.obey(rule)
    findings = [*products, *check_experts(model.local_stages)]
    for remote in model.remote_stages:
        known = {finding.check for finding in findings if finding.passed}
        findings += [found for found in remote.use_rule(rule, check=True) if found.check not in known]
    layout = replace(layout, rule=rule)
    whole = _batches_agree(model, states, layout)
    if not whole and (use_largest_tile(model.local_stages) or model.remote_stages):
        for remote in model.remote_stages:
            remote.use_rule(rule, check=False, largest_tile=True)
        whole = _batches_agree(model, states, layout)
    findings.append(CheckResult("a row alone, in a batch, and in chunks", whole))
    counts = _step_counts(model, states, layout)
    if counts:
        among = ", ".join(map(str, counts))
        findings.append(CheckResult(f"a generated token alone and among {among}", _steps_agree(model, states, layout, counts)))
    return RowCheck(tuple(findings), rule)


def _rule_that_agrees(model: Transformer, first: RowRule) -> tuple[RowRule, list[CheckResult]]:
    """Return the first row rule under which all products agree, in this process and in others, or else the last candidate, and
    the comparisons under that rule."""
    *rules, last = _candidates(first)
    for rule in rules:
        found = []
        for result in _compare_products(model.linears(), rule):
            found.append(result)
            if not result.passed:
                break
        else:
            if all(other.passed for remote in model.remote_stages for other in remote.use_rule(rule, check=True)):
                return rule, found
    return last, check_products(model.linears(), last)


def check_products(linears: list[Linear], rule: RowRule) -> list[CheckResult]:
    return list(_compare_products(linears, rule))


def _compare_products(linears: list[Linear], rule: RowRule) -> Iterator[CheckResult]:
    for x in _one_per_shape(linears):
        yield CheckResult(_words(x), _rows_agree(x, rule))


def check_experts(stages: Sequence[Stage]) -> list[CheckResult]:
    return [
        CheckResult(f"{x.spec.used} of {x.spec.experts} experts, {x.bank.kind}", _experts_agree(x, ops))
        for x, ops in _experts(stages)
    ]


def use_largest_tile(stages: Sequence[Stage]) -> bool:
    """Use only the largest attention tile, because results differ between tile heights. Return whether the operations of any
    stage have tile heights."""
    tiled = [stage.ops for stage in stages if isinstance(stage.ops, TorchOps)]
    for ops in tiled:
        ops.tile_heights = ops.tile_heights[-1:]
    return bool(tiled)


def _candidates(first: RowRule) -> list[RowRule]:
    wider = [RowRule(floor=n) for n in (2, 4, 8, 16) if n > first.floor] if first.block is None else []
    return [first, *wider, RowRule(block=16), RowRule(block=64)]


def _one_per_shape(linears: list[Linear]) -> list[Linear]:
    return list({(x.out_features, x.in_features, x.bias is None, x.kind): x for x in linears}.values())


def _words(linear: Linear) -> str:
    return f"product {linear.out_features} x {linear.in_features}" + (f" in {linear.kind}" if linear.kind else "")


def _rows_compared(borders: Iterable[int], most: int) -> list[int]:
    """The row counts to compare: some fixed ones, and the counts below and at every border (where another kernel is used) up to
    `most`."""
    return sorted({*ROWS, *(rows for border in borders if border <= most for rows in (border - 1, border))})


def _rows_agree(linear: Linear, rule: RowRule) -> bool:
    generator = torch.Generator().manual_seed(1)
    # Row counts are compared while the float32 outputs fit into LOGITS_BYTES; the head is never called with more rows.
    counts = _rows_compared(linear.borders, max(LOGITS_BYTES // (4 * linear.out_features), max(ROWS)))
    whole = -(-(counts[-1] + 1) // 64) * 64
    x = torch.randn(max(whole, max(ROWS) + 64), linear.in_features, generator=generator).to(linear.dtype).to(linear.device)
    linear = linear.first_outputs(MOST_OUTPUTS)
    kept, linear.rule = linear.rule, rule
    try:
        with current_device(linear.device):
            full = linear(x[: rule.padded(len(x))])
            return all(torch.equal(linear(x[: rule.padded(n)])[:n], full[:n]) for n in counts)
    finally:
        linear.rule = kept


def _experts(stages: Sequence[Stage]) -> list[tuple[MixtureOfExperts, Ops]]:
    """For each kind of mixture of experts whose kernels depend on the number of rows, one example with its operations."""
    found = {}
    for stage in stages:
        for layer in stage.layers:
            parallel = [] if layer.parallel_experts is None else [layer.parallel_experts.experts]
            for one in (layer.feed_forward, *parallel):
                if isinstance(one, MixtureOfExperts) and one.bank.borders(one.spec.used):
                    found[one.spec, one.bank.kind] = (one, stage.ops)
    return list(found.values())


def _experts_agree(experts: MixtureOfExperts, ops: Ops) -> bool:
    borders, router = experts.bank.borders(experts.spec.used), experts.router
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(max(max(borders), max(ROWS)) + 1, router.in_features, generator=generator).to(router.dtype).to(router.device)
    with current_device(router.device):
        full = experts(x, x, ops)
        return all(torch.equal(experts(x[:n], x[:n], ops), full[:n]) for n in _rows_compared(borders, len(x)))


def _batches_agree(model: Transformer, states: Sequence[StageState], layout: InputLayout) -> bool:
    """Three sequences in one batch, alone, and cut into chunks: equal hidden states at every position.

    The sequences fit into the pages and the context of this model, since kernels do not check bounds. If there are too few pages
    or lanes for three sequences, there are fewer sequences.
    """
    pages = min(layout.scratch)  # the scratch page comes after all other pages, so its number is their count
    count = min(3, pages, *([states[0].sizes.lanes] if model.spec.recurrent else []))
    per = min(-(-96 // layout.page_size), pages // count)
    longest = min(per * layout.page_size, 90, model.max_context)
    lengths = [longest, max(longest // 2, 1), 1][:count]
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(0, model.spec.vocab, (n,), generator=generator).tolist() for n in lengths]
    whole = _run(model, states, layout, [[(0, n)] for n in lengths], texts, per)
    alone = [_run(model, states, layout, [[(0, len(t))]], [t], per)[0] for t in texts]
    inner = [CHUNK] if model.spec.recurrent else [1, longest // 6, longest // 3, longest - 1]
    cuts = [sorted({0, n, *(cut for cut in inner if 0 < cut < n)}) for n in lengths]
    chunked = [_run(model, states, layout, [list(itertools.pairwise(c))], [t], per)[0] for c, t in zip(cuts, texts, strict=True)]
    return all(torch.equal(w, a) and torch.equal(w, c) for w, a, c in zip(whole, alone, chunked, strict=True))


@torch.inference_mode()
def logits_are_finite(model: Transformer, states: Sequence[StageState], *, layout: InputLayout) -> bool:
    """Whether a short text has finite logits, computed by all layers."""
    with current_device(model.device):
        per = min(2, *layout.scratch)
        text = list(range(min(per * layout.page_size, model.max_context, model.spec.vocab)))
        row = _row(text, (0, len(text)), 0, (range(per),) * len(layout.scratch))
        inputs = make_inputs(Plan((row,)), layout=layout, device=model.embed_device)
        hidden = model.hidden(inputs, states)
        return bool(torch.isfinite(model.logits(hidden)[: len(text)]).all())


def _step_counts(model: Transformer, states: Sequence[StageState], layout: InputLayout) -> list[int]:
    """The numbers of generated tokens in a step to compare: those below and at each border where kernels change, up to the number
    of lanes. Without recurrent state rows need no lanes, as all may be of one sequence, and the most is MOST_STEPS. None if pages
    or context hold fewer than two positions."""
    stage, most = model.stages[0], states[0].sizes.lanes if model.spec.recurrent else MOST_STEPS
    mixers = {layer.mixer for layer in model.spec.layers[: _depth(model)]}
    borders = stage.ops.kernel_borders(mixers) if isinstance(stage, Stage) else stage.facts.borders
    room = min(layout.scratch) * layout.page_size >= 2 and model.max_context >= 2
    return sorted({n for border in borders for n in (border - 1, border) if 1 < n <= most}) if room else []


def _steps_agree(model: Transformer, states: Sequence[StageState], layout: InputLayout, counts: Sequence[int]) -> bool:
    """The token after a prompt, generated in one row and in many: all rows read one text in the same pages, so all are equal."""
    per = min(-(-STEP_LENGTH // layout.page_size), min(layout.scratch))
    length = min(per * layout.page_size, STEP_LENGTH, model.max_context)
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, model.spec.vocab, (length,), generator=generator).tolist()
    pages = (range(per),) * len(layout.scratch)
    edges = [*range(0, length - 1, 2 * CHUNK), length - 1]

    def steps(count: int) -> Tensor:
        for lane in range(count if model.spec.recurrent else 1):
            for part in itertools.pairwise(edges):
                _run_step(model, states, layout, [_row(text, part, lane, pages, prompt_stop=length - 1)])
        rows = [_row(text, (length - 1, length), lane, pages, prompt_stop=length - 1) for lane in range(count)]
        return _run_step(model, states, layout, rows)[:count]

    alone = steps(1)
    return all(torch.equal(steps(count), alone.expand(count, -1)) for count in counts)


def _run_step(model: Transformer, states: Sequence[StageState], layout: InputLayout, rows: list[Row]) -> Tensor:
    inputs = make_inputs(Plan(tuple(rows)), layout=layout, device=model.embed_device)
    return model.hidden(inputs, states, depth=_depth(model)).clone()


def _run(
    model: Transformer,
    states: Sequence[StageState],
    layout: InputLayout,
    parts: list[list[tuple[int, int]]],
    texts: list[list[int]],
    per: int,
) -> list[Tensor]:
    """Hidden states of each text, computed part by part; part i of all texts is one step."""
    out: list[list[Tensor]] = [[] for _ in texts]
    for step in range(max(len(p) for p in parts)):
        batch = [i for i, p in enumerate(parts) if step < len(p)]
        groups = len(layout.scratch)
        rows = [_row(texts[i], parts[i][step], i, (range(i * per, (i + 1) * per),) * groups) for i in batch]
        inputs = make_inputs(Plan(tuple(rows)), layout=layout, device=model.embed_device)
        hidden = model.hidden(inputs, states, depth=_depth(model))
        for i, span in zip(batch, inputs.spans, strict=False):  # spans of padding follow those of the texts
            out[i].append(hidden[span.first : span.first + span.count].clone())
    return [torch.cat(parts_) for parts_ in out]


def _depth(model: Transformer) -> int:
    """How many of the first layers the comparison of whole steps runs: at least DEPTH, and enough for every kind of mixer."""
    kinds = [type(layer.mixer) for layer in model.spec.layers]
    return max(DEPTH, *(kinds.index(kind) + 1 for kind in set(kinds)))


def _row(text: list[int], part: tuple[int, int], lane: int, pages: tuple[range, ...], *, prompt_stop: int | None = None) -> Row:
    return Row(
        request_id="self-check",
        lane=lane,
        pages=pages,
        start=part[0],
        tokens=tuple(text[part[0] : part[1]]),
        drafts=(),
        prompt_stop=len(text) if prompt_stop is None else prompt_stop,
        samples=False,
        params=SamplingParams(),
        history=History(tuple(text)),
    )
