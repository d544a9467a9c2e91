"""`onedraw bench`: time to first token, inter-token latency and tokens per second for growing batch sizes.

Each run submits all requests at once in one event loop, as clients do. Every request has a prompt of its own, so that the prefix
cache is never hit, and generates its full number of tokens. With drafts the table also shows how many were kept (equal to the
sampled token); on one device, the share of the floor: the least time a step can take, which is the bytes it reads divided by the
memory bandwidth. A row is the work of one sequence in a step. `--draft replay:K` runs everything twice: without drafts, then with
the recorded answers as drafts of which K are kept. `--guided-json` holds replies, or some of each batch, to a JSON schema that no
reply can complete early.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onedraw.checkpoints.random_weights import SHAPES
from onedraw.cli import terminal
from onedraw.cli.flags import add_request_options, add_settings, argument_type, read_request_options, read_settings, token_ids
from onedraw.cli.svg_plot import Line, Panel, draw
from onedraw.engine.stats import Stats
from onedraw.errors import BadSetting, OnedrawError
from onedraw.lab.recorded_drafts import DEFAULT_LENGTH, RecordedProposer
from onedraw.llm.llm import LLM, idle_stats
from onedraw.llm.reply_stream import Generation
from onedraw.llm.request_options import NEUTRAL_SAMPLING, RequestOptions, make_generation
from onedraw.speculation.speculator import Speculator
from onedraw.types import ModelCard

HELP = "measure time to first token, inter-token latency and tokens per second"
EXAMPLES = """examples:
  onedraw bench smollm2
  onedraw bench smollm2 --batch 1,8,32 --prompt-tokens 512 --new-tokens 128 --json
  onedraw bench smollm2 --batch 1 --draft ngram --draft-tokens 4 --temperature 0
  onedraw bench random:llama3-8b --batch 1,8,32 --temperature 0.8 --top-p 0.95 --against transformers
  onedraw bench random:llama3-8b --batch 1,8 --temperature 1 --logprobs 5
  onedraw bench random:llama3-8b --batch 32 --temperature 1 --guided-json 1
  onedraw bench smollm2 --prompts ./prompts.jsonl --draft ./drafter --new-tokens 256
  onedraw bench random:qwen3.6-27b --batch 1 --draft replay:4 --draft-tokens 15
  onedraw bench random:qwen3.6-27b-q4_k_m --batch 1 --draft random:qwen3.6-27b-dflash-q4_k_m --draft-tokens 15
"""
REPLAY = "replay:"  # the prefix of `--draft replay:K`, which only this command accepts
CHANGED = "drafts changed an answer, so the contract does not hold on this machine; run `onedraw prove` for details"
# Request options that are not flags of this command, because the benchmark decides them.
SET_HERE = (
    *("max_tokens", "ignore_eos", "n", "seed", "stop", "stop_token_ids", "min_tokens", "prediction", "speculation"),
    *("continue_ids", "reply_ids", "system_fingerprint"),
    *("reasoning_effort", "thinking_budget", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


# One item of the array that `--guided-json` asks for; every item takes more than one token.
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["harbour", "lighthouse", "pier"]},
        "open": {"type": "boolean"},
    },
    "required": ["name", "count", "kind", "open"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one request in seconds: until its first token, then the gap before each further token."""

    first: float
    gaps: tuple[float, ...]
    tokens: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One run of a batch: seconds until the last request ended, and how much the engine's counters grew meanwhile."""

    seconds: float
    timings: tuple[Timing, ...]
    counted: Stats


@dataclass(frozen=True, slots=True)
class Measure:
    """The result for one batch size over all repeats. The field names are keys of the JSON output; `turn` in them means an engine
    step."""

    batch: int
    first_token_ms: float  # median over requests, in milliseconds
    inter_token_ms: float  # median over tokens, in milliseconds
    inter_token_p99_ms: float  # 99th percentile over tokens, in milliseconds
    tokens_per_second: float  # new tokens of all requests, divided by the whole time with prompts
    decode_tokens_per_second: float  # rate of new tokens while every request is past its first token and none has ended
    draft_tokens: int  # number of drafts that were verified
    accepted_tokens: int  # drafts that were kept
    tokens_per_turn: float  # new tokens of one request in one engine step, on average; 1 without drafts
    turns_per_second: float  # engine steps per second over the whole time
    drafter_share: float = 0.0  # share of the engine steps after which the model's own drafter drafted
    drafter_ms: float = 0.0  # milliseconds that the drafter took after such a step
    floor_share: float | None = None  # least possible time of a step divided by its actual time
    plain_tokens_per_second: float | None = None  # the decode rate without drafts, measured with --draft replay:K
    peer_tokens_per_second: float | None = None  # the decode rate of the library that --against names


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name, a folder, a .gguf file, a hub id, or random:SHAPE with random weights "
        f"({', '.join(SHAPES)}, or the path of a config.json)",
    )
    parser.add_argument(
        "--batch", type=argument_type(token_ids), metavar="LIST", default=(1, 2, 4, 8), help="requests at once (default: 1,2,4,8)"
    )
    parser.add_argument("--prompt-tokens", type=int, metavar="N", default=128, help="tokens of each prompt (default: 128)")
    parser.add_argument("--new-tokens", type=int, metavar="N", default=64, help="tokens of each reply (default: 64)")
    parser.add_argument("--repeats", type=int, metavar="N", default=3, help="measured runs per batch size (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--guided-json",
        nargs="?",
        type=int,
        const=-1,
        default=0,
        metavar="ROWS",
        help="hold replies to a JSON schema that none can complete early: all, or so many of each batch",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="measure replies to these prompts instead (.jsonl, objects with messages or prompt, and kind): tokens per step and "
        "speed, with drafts and without",
    )
    parser.add_argument(
        "--against",
        choices=("transformers",),
        help="measure this library too, with weights of the same shape; show the ratio",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="plot the time of a step over batch size and over context, beside the floor, as FILE.svg",
    )
    add_request_options(parser, leave_out=SET_HERE)
    add_settings(parser, leave_out=("served_name", "queue_limit"))


def run(arguments: argparse.Namespace) -> int:
    from onedraw.build.llm import build_llm
    from onedraw.lab.references import decode_step_floor

    batches: tuple[int, ...] = arguments.batch
    if not batches or min(batches) < 1 or min(arguments.prompt_tokens, arguments.new_tokens, arguments.repeats) < 1:
        raise BadSetting("--batch, --prompt-tokens, --new-tokens and --repeats: must be at least 1")
    if arguments.prompts is not None:
        return _over_prompts(arguments)
    if arguments.plot is not None and arguments.plot.suffix != ".svg":
        raise BadSetting(f"--plot: {arguments.plot} does not end in .svg, the only format; name a file that does")
    recorded, needed = _recorded(arguments), arguments.prompt_tokens + arguments.new_tokens
    settings = read_settings(
        arguments,
        max_batch=max(batches) if arguments.max_batch is None else arguments.max_batch,
        max_context=needed if arguments.max_context is None else arguments.max_context,
        queue_limit=max(batches),
    )
    options = measured_options(arguments)
    work = {"prompt_tokens": arguments.prompt_tokens, "repeats": arguments.repeats, "constrained": arguments.guided_json}
    contexts: list[tuple[int, float]] = []
    with terminal.progress() as notify:
        floor = decode_step_floor(settings)
        speculator = None if recorded is None else Speculator([recorded], draft_tokens=recorded.length)
        # There is no warm-up here: each batch size runs once before it is measured, which captures the CUDA graphs that it needs.
        with build_llm(settings, notify, speculator=speculator, warm_up=False) as llm:
            measures = measure_all(llm, options, batches=batches, notify=notify, recorded=recorded, **work)
            if arguments.plot is not None:
                contexts = _over_contexts(llm, options, arguments.prompt_tokens, notify)
            card = llm.card
        if floor is not None:
            measures = [with_floor(m, floor, arguments.prompt_tokens + arguments.new_tokens // 2) for m in measures]
        if arguments.against is not None:
            from onedraw.lab.references import peer_rates

            same = {"temperature": options.temperature, "top_p": options.top_p} if options.temperature != 0 else {}
            rates = peer_rates(settings, notify, batches=batches, prompt_tokens=arguments.prompt_tokens, sampling=same)
            measures = [replace(m, peer_tokens_per_second=rates[m.batch]) for m in measures]
    title = f"{card.name} · {card.device} · {card.dtype} · {arguments.prompt_tokens} + {arguments.new_tokens} tokens"
    if arguments.plot is not None:
        arguments.plot.write_text(step_plot(title, measures, contexts, floor=floor, arguments=arguments), encoding="utf-8")
    if arguments.json:
        _print(measures, card, arguments)
    else:
        _show(measures, title=title)
    return 0


def _over_prompts(arguments: argparse.Namespace) -> int:
    """Answer the prompts of a file with drafts and without, and show tokens per step and the ratio of both times by kind."""
    from onedraw.build.llm import build_llm
    from onedraw.training.acceptance import acceptance, prompt_generations, run_counted
    from onedraw.training.data import read_prompts

    if not arguments.prompts.is_file():
        raise BadSetting(f"--prompts: there is no file {arguments.prompts}")
    prompts, at_once = read_prompts(arguments.prompts), min(arguments.batch)
    settings = read_settings(arguments, max_batch=at_once if arguments.max_batch is None else arguments.max_batch)
    temperatures = (0.0, 0.7, 1.0) if arguments.temperature is None else (arguments.temperature,)
    rows: list[dict[str, Any]] = []
    with terminal.progress() as notify, build_llm(settings, notify) as llm:
        for temperature in temperatures:
            by_kind = [
                prompt_generations(llm, prompts, temperature=temperature, new_tokens=arguments.new_tokens, speculate=drafts)
                for drafts in (True, False)
            ]
            for kind, drafted in by_kind[0].items():
                notify(f"{kind}, temperature {temperature:g}")
                begin = time.perf_counter()
                counts = run_counted(llm, drafted, at_once=at_once)
                middle = time.perf_counter()
                plain = run_counted(llm, by_kind[1][kind], at_once=at_once)
                ratio = (time.perf_counter() - middle) / (middle - begin)
                if [count.ids for count in counts] != [count.ids for count in plain]:
                    raise OnedrawError(CHANGED)
                found = acceptance(counts)
                rate = sum(len(count.ids) for count in counts) / (middle - begin)
                rows.append(
                    {"kind": kind, "temperature": temperature, **asdict(found), "tokens_per_second": rate, "x_plain": ratio}
                )
        card = llm.card
    if arguments.json:
        terminal.print_json({"model": card.name, "fingerprint": card.fingerprint, "rows": rows})
        return 0
    heads = ("kind", "temperature", "replies", "tokens", "tokens/step", "low", "high", "tokens/s", "x plain")
    cells = [
        [row["kind"] or "all", f"{row['temperature']:g}", f"{row['replies']}", f"{row['tokens']}"]
        + [f"{row[name]:.2f}" for name in ("mean", "low", "high")]
        + [f"{row['tokens_per_second']:.1f}", f"{row['x_plain']:.2f}"]
        for row in rows
    ]
    terminal.table(f"{card.name} · {card.device} · {card.dtype} · {at_once} at once", heads, cells)
    return 0


def _recorded(arguments: argparse.Namespace) -> RecordedProposer | None:
    """Return the proposer of `--draft replay:K`. Only this command has it, because the answers must be known first."""
    wanted = [entry for entry in arguments.draft or () if entry.startswith(REPLAY)]
    if not wanted:
        return None
    kept = wanted[0].removeprefix(REPLAY)
    if len(arguments.draft) > 1 or not kept.isdecimal():
        raise BadSetting("--draft replay:K cannot be combined with other drafters; K is the number of drafts kept per step")
    arguments.draft = ["ngram"]  # reserves memory for drafts and loads no drafter; the RecordedProposer drafts instead
    length = arguments.draft_tokens or max(DEFAULT_LENGTH, int(kept))
    return RecordedProposer(kept=int(kept), length=int(length))


def measured_options(arguments: argparse.Namespace) -> RequestOptions:
    """Return the options of every measured request. A sampling value that was not given is the neutral one, and not the one that
    the model's authors recommend, so that the figures of several models compare."""
    neutral = {name: value for name, value in NEUTRAL_SAMPLING.items() if getattr(arguments, name) is None}
    return read_request_options(arguments, **neutral, max_tokens=arguments.new_tokens, ignore_eos=True, seed=0, guided_json=None)


def _print(measures: Sequence[Measure], card: ModelCard, arguments: argparse.Namespace) -> None:
    model = {"model": card.name, "fingerprint": card.fingerprint, "device": card.device, "dtype": card.dtype}
    work = {name: getattr(arguments, name) for name in ("prompt_tokens", "new_tokens", "repeats", "guided_json")}
    terminal.print_json({**model, **work, "batches": [asdict(m) for m in measures]})


def measure_all(
    llm: LLM,
    options: RequestOptions,
    *,
    batches: Sequence[int],
    prompt_tokens: int,
    repeats: int,
    notify: Callable[[str], None],
    recorded: RecordedProposer | None = None,
    constrained: int = 0,
) -> list[Measure]:
    """Measure every batch size, each after a warm-up run that is not counted. `constrained`: how many replies of a batch are held
    to a schema; negative: all."""
    prompts = Prompts(llm, prompt_tokens)
    measures = []

    def of_batch(batch: int) -> list[Generation]:
        held = batch if constrained < 0 else constrained
        wanted = [constrained_options(options) if row < held else options for row in range(batch)]
        return [_generation(llm, one, prompts.next()) for one in wanted]

    for batch in batches:
        notify(f"batch {batch}, warm-up")
        generations = of_batch(batch)
        first = _together(llm, generations)
        if recorded is not None:
            _replayed(llm, generations, first, recorded)
        runs, plain = [], []
        for repeat in range(repeats):
            notify(f"batch {batch}, run {repeat + 1} of {repeats}")
            generations = of_batch(batch)
            runs.append(_together(llm, generations))
            if recorded is not None:
                plain.append(runs[-1])
                runs[-1] = _replayed(llm, generations, plain[-1], recorded)
        measure = summarise(batch, runs)
        measures.append(
            replace(measure, plain_tokens_per_second=summarise(batch, plain).decode_tokens_per_second) if plain else measure
        )
    return measures


def _replayed(llm: LLM, generations: Sequence[Generation], plain: BenchRun, recorded: RecordedProposer) -> BenchRun:
    """Run the same requests with their recorded answers as drafts, and raise if any token differs from the run `plain`."""
    recorded.vocab = llm.card.vocab
    recorded.answers = {generation.prompt: timing.ids for generation, timing in zip(generations, plain.timings, strict=True)}
    again = _together(llm, generations)
    recorded.answers = {}
    if [t.ids for t in again.timings] != [t.ids for t in plain.timings]:
        raise OnedrawError(CHANGED)
    return again


def with_floor(measure: Measure, floor: Callable[[int, int], float], context: int) -> Measure:
    """Return the measurement with its share of the floor (the least possible time of a step). A step gives each row
    `tokens_per_turn` tokens on average."""
    step_seconds = measure.batch * measure.tokens_per_turn / max(measure.decode_tokens_per_second, 1e-9)
    return replace(measure, floor_share=floor(measure.batch, context) / step_seconds)


def _over_contexts(llm: LLM, options: RequestOptions, longest: int, notify: Callable[[str], None]) -> list[tuple[int, float]]:
    """Measure one request's milliseconds per token, for prompts of several lengths up to `longest` tokens."""
    found = []
    for length in sorted({max(longest // part, 1) for part in (16, 8, 4, 2, 1)}):
        notify(f"context of {length}")
        measured = summarise(1, [_together(llm, [_generation(llm, options, Prompts(llm, length).next())])])
        found.append((length, measured.inter_token_ms))
    return found


class Prompts:
    """Generates random prompts of one length, which have no common prefixes."""

    def __init__(self, llm: LLM, length: int) -> None:
        self._allowed = [i for i in range(llm.card.vocab) if i not in llm.card.eos_ids]
        self._length = length
        self._random = random.Random(0)

    def next(self) -> tuple[int, ...]:
        return tuple(self._random.choices(self._allowed, k=self._length))


def constrained_options(options: RequestOptions) -> RequestOptions:
    """Return the options with a JSON schema that asks for so many records that no reply completes it."""
    return replace(options, guided_json={"type": "array", "minItems": options.max_tokens, "items": RECORD}, ignore_eos=False)


def _generation(llm: LLM, options: RequestOptions, prompt: tuple[int, ...]) -> Generation:
    return make_generation(options, llm=llm, prompt=prompt, label="bench")


def _together(llm: LLM, generations: Sequence[Generation]) -> BenchRun:
    before = idle_stats(llm)
    seconds, timings = asyncio.run(_at_once(llm, generations))
    return BenchRun(seconds, timings, idle_stats(llm).since(before))


async def _at_once(llm: LLM, generations: Sequence[Generation]) -> tuple[float, tuple[Timing, ...]]:
    start = time.perf_counter()
    timings = await asyncio.gather(*(_timed(llm, generation, start) for generation in generations))
    return time.perf_counter() - start, tuple(timings)


async def _timed(llm: LLM, generation: Generation, start: float) -> Timing:
    """Run one request and time its tokens. Tokens of one piece share equally the time since the previous piece."""
    first, last, gaps, tokens, ids = 0.0, start, [], 0, []
    async for piece in llm.apieces(llm.prepare(generation)):
        if not piece.tokens:
            continue
        now = time.perf_counter()
        if not tokens:
            first = now - start
            gaps += [0.0] * (len(piece.tokens) - 1)
        else:
            gaps += [(now - last) / len(piece.tokens)] * len(piece.tokens)
        tokens, last = tokens + len(piece.tokens), now
        ids += [choice.token for choice in piece.tokens]
    return Timing(first=first, gaps=tuple(gaps), tokens=tokens, ids=tuple(ids))


def summarise(batch: int, runs: Sequence[BenchRun]) -> Measure:
    timings = [t for run in runs for t in run.timings]
    gaps = sorted(g for t in timings for g in t.gaps) or [0.0]
    seconds = sum(run.seconds for run in runs)
    sampled = sum(run.counted.completion_tokens for run in runs)
    accepted = sum(run.counted.accepted_tokens for run in runs)
    return Measure(
        batch=batch,
        first_token_ms=1e3 * statistics.median(t.first for t in timings),
        inter_token_ms=1e3 * statistics.median(gaps),
        inter_token_p99_ms=1e3 * gaps[min(int(len(gaps) * 0.99), len(gaps) - 1)],
        tokens_per_second=sum(t.tokens for t in timings) / seconds,
        decode_tokens_per_second=statistics.median(_decode_rate(run.timings) for run in runs),
        draft_tokens=sum(run.counted.draft_tokens for run in runs),
        accepted_tokens=accepted,
        # Each row gives its kept drafts and one more token, so the number of rows is that of sampled tokens minus kept drafts.
        tokens_per_turn=sampled / max(sampled - accepted, 1),
        turns_per_second=sum(run.counted.steps for run in runs) / seconds,
        drafter_share=sum(run.counted.drafter_steps for run in runs) / max(sum(run.counted.steps for run in runs), 1),
        drafter_ms=1e3
        * sum(run.counted.drafter_seconds for run in runs)
        / max(sum(run.counted.drafter_steps for run in runs), 1),
    )


def _decode_rate(timings: Sequence[Timing]) -> float:
    """Return the tokens per second of a run, while every request was past its first token and none had ended."""
    begin = max(t.first for t in timings)
    end = min(t.first + sum(t.gaps) for t in timings)
    if end <= begin:
        return 0.0
    return sum(_tokens_between(t, begin, end) for t in timings) / (end - begin)


def _tokens_between(timing: Timing, begin: float, end: float) -> int:
    moment, count = timing.first, 0
    for gap in timing.gaps:
        moment += gap
        count += begin < moment <= end + 1e-9
    return count


def _show(measures: Sequence[Measure], *, title: str) -> None:
    heads = ["batch", "first token ms", "inter-token ms", "p99 ms", "tokens/s", "decode tokens/s"]
    rows = [[str(m.batch), *(f"{value:.1f}" for value in list(asdict(m).values())[1 : len(heads)])] for m in measures]
    if any(m.draft_tokens for m in measures):
        heads += ["accepted/drafts", "tokens/step", "steps/s"]
        for row, m in zip(rows, measures, strict=True):
            row += [f"{m.accepted_tokens}/{m.draft_tokens}", f"{m.tokens_per_turn:.2f}", f"{m.turns_per_second:.1f}"]
    beside: list[tuple[str, list[str]]] = [
        ("drafter steps", [f"{m.drafter_share:.0%}" for m in measures if any(one.drafter_share for one in measures)]),
        ("drafter ms", [f"{m.drafter_ms:.2f}" for m in measures if any(one.drafter_share for one in measures)]),
        ("of floor", [f"{m.floor_share:.0%}" for m in measures if m.floor_share is not None]),
        ("plain tokens/s", [f"{m.plain_tokens_per_second:.1f}" for m in measures if m.plain_tokens_per_second is not None]),
        ("x plain", [f"{m.decode_tokens_per_second / p:.2f}" for m in measures if (p := m.plain_tokens_per_second)]),
        ("peer tokens/s", [f"{m.peer_tokens_per_second:.1f}" for m in measures if m.peer_tokens_per_second is not None]),
        ("x peer", [f"{m.decode_tokens_per_second / p:.2f}" for m in measures if (p := m.peer_tokens_per_second)]),
    ]
    for head, cells in beside:
        if len(cells) == len(rows):
            heads.append(head)
            for row, cell in zip(rows, cells, strict=True):
                row.append(cell)
    terminal.table(title, heads, rows)


def step_plot(
    title: str,
    measures: Sequence[Measure],
    contexts: Sequence[tuple[int, float]],
    *,
    floor: Callable[[int, int], float] | None,
    arguments: argparse.Namespace,
) -> str:
    """Draw the milliseconds of a step over the batch size, and one request's milliseconds per token over its context, beside the
    floor of both."""
    middle = arguments.prompt_tokens + arguments.new_tokens // 2
    steps = [(m.batch, 1e3 * m.batch * m.tokens_per_turn / max(m.decode_tokens_per_second, 1e-9)) for m in measures]
    batch, context = [Line("onedraw", steps)], [Line("onedraw", contexts)]
    if floor is not None:
        batch.append(Line("floor", [(m.batch, 1e3 * floor(m.batch, middle)) for m in measures], dashed=True))
        context.append(Line("floor", [(length, 1e3 * floor(1, length)) for length, _ in contexts], dashed=True))
    peer = [(m.batch, 1e3 * m.batch / m.peer_tokens_per_second) for m in measures if m.peer_tokens_per_second]
    if peer:
        batch.append(Line("transformers", peer))
    return draw(
        title,
        [
            Panel("requests at once", "milliseconds per step", batch),
            Panel("tokens of context, one request", "milliseconds per token", context),
        ],
    )
