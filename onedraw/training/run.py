"""One training run: sample replies if there are none, train on them, write the drafter, and measure it in the real engine.

In: RunOptions, which name a model, data and a folder. Out: a drafter in the folder that `--draft` and other engines read, and a
RunReport. Everything that a killed run needs to go on is in `training` inside that folder: `run.json` says what is trained,
`records` has the sampled replies, `state.safetensors` the weights, which are replaced atomically. The same command goes on from
there.

The target is the model that is drafted for. A reply depends on its request alone, so it is the same in whichever run it is
sampled.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from onedraw.build.llm import build_llm
from onedraw.build.training import DraftTraining, Example, target_info
from onedraw.checkpoints.drafter_writer import convert_drafter, replace_file, write_zlab
from onedraw.contract.record import Record, RecordingLLM, RecordWriter, read_records
from onedraw.errors import BadRequest, BadSetting, CorruptFile, OnedrawError
from onedraw.llm.llm import LLM
from onedraw.llm.reply_stream import Generation
from onedraw.llm.request_options import NEUTRAL_SAMPLING, RequestOptions, generation_for
from onedraw.settings import Settings
from onedraw.training.acceptance import ReplyCount, TokensPerStep, acceptance, run_counted
from onedraw.training.data import NamedPrompt, examples_of, read_data, split_records

SAMPLING_SHARE = 0.3  # at most this share of the run's time goes to sampling replies
MOST_ROUNDS = 64  # replies to one prompt at most
MOST_SAMPLED = 2**30  # bytes of sampled records at most
SAVES = 20  # times that the state is saved in a run, evenly in time
MOST_SECONDS_UNSAVED = 60.0
READ_AHEAD = 64  # this many sequences are read before the first step, and as many after every 64 steps until all are read
HELD_OUT_SEQUENCES = 32  # held-out sequences on which the expected number of kept drafts is computed
MEASURED_REPLIES = 16  # held-out replies that are generated again to measure a drafter in the engine
LABEL = "sample"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a training run: its data, its folder, the limits on time, replies and steps, and the initial drafter or the
    size of a new one. The target model is in `Settings`."""

    data: str
    out: Path
    minutes: float = 30.0
    replies: int | None = None  # most replies that are sampled; None: as many as the time allows
    steps: int | None = None  # most training steps; None: as many as the time allows
    initial: Path | None = None  # the drafter whose weights the run begins with; None: a new one
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    new_tokens: int = 256
    block: int = 8  # slots of a new drafter's block: the last sampled token, then block - 1 drafts
    layers: int | None = None  # layers of a new drafter; None: the number follows from the target model
    seed: int = 0
    memory: int = 2**30  # bytes of features (the target's hidden states) that are held in memory
    measure: bool = True
    recipe: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a run: `share` of the phase is done, and `seconds` of it are left, if that is known."""

    phase: str
    share: float
    seconds: float | None
    text: str


@dataclass(frozen=True, slots=True)
class RunReport:
    """The result of a run. `kept` is the expected number of drafts that a block keeps on held-out sequences."""

    drafter: Path
    steps: int
    seconds: float
    sequences: int
    tokens: int
    kept: float
    begun_with: TokensPerStep | None  # the initial drafter in the engine, on held-out requests; None: not measured
    measured: TokensPerStep | None  # the trained drafter, on the same requests
    gguf: Path | None


Notify = Callable[[RunProgress], None]


def train(settings: Settings, options: RunOptions, notify: Notify) -> RunReport:
    """Begin a training run, or continue the one whose state is in the output folder."""
    folder = options.out / "training"
    _begin(settings, options, folder)
    data = read_data(options.data)
    records = _sampled(settings, options, data, folder / "records", notify)
    trained, held_out = split_records(records)
    info = target_info(settings)
    longest = min(settings.max_context or info.spec.max_context, info.spec.max_context)
    examples = examples_of(trained, info, max_context=longest)
    held = examples_of(held_out, info, max_context=longest)
    run = TrainingRun(settings, options, folder, examples, held[:HELD_OUT_SEQUENCES], notify)
    try:
        run.train()
        run.write()
    finally:
        run.close()
    before = after = None
    if options.measure:
        requests = [_generation(record) for record in held_out[:MEASURED_REPLIES]]
        if options.initial is not None:
            before = _in_engine(settings, options.initial, options.block, requests, "measuring the initial drafter", notify)
        after = _in_engine(settings, options.out, run.block, requests, "measuring the drafter", notify)
    gguf = _write_gguf(options.out)
    tokens = sum(len(example.tokens) - example.generated for example in examples)
    report = RunReport(options.out, run.steps, run.seconds, len(examples), tokens, run.best_kept, before, after, gguf)
    replace_file(options.out / "README.md", _card(settings, options, report).encode())
    return report


def _begin(settings: Settings, options: RunOptions, folder: Path) -> None:
    """Write the settings that decide what is trained to the folder; if it has a run already, check that its settings are
    equal."""
    wanted = {
        "model": settings.model,
        "data": options.data if not Path(options.data).exists() else str(Path(options.data).resolve()),
        "initial": None if options.initial is None else str(options.initial.resolve()),
        "temperatures": list(options.temperatures),
        "new_tokens": options.new_tokens,
        "block": options.block,
        "layers": options.layers,
        "seed": options.seed,
        "recipe": options.recipe,
    }
    path = folder / "run.json"
    try:
        if not path.exists():
            if (options.out / "model.safetensors").exists():
                raise BadSetting(f"--out: {options.out} already holds a model; name another folder")
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, (json.dumps(wanted, indent=1) + "\n").encode())
            return
        recorded = json.loads(path.read_text())
    except OSError as error:
        raise BadSetting(f"--out: {options.out} cannot be used ({error.strerror or error}); name a writable folder") from None
    except ValueError:
        raise CorruptFile(f"{path} is damaged; remove {folder} to begin again") from None
    different = sorted(name for name in wanted if wanted[name] != recorded.get(name))
    if different:
        name = different[0]
        raise BadSetting(
            f"--out: {options.out} holds a run with another {name} ({recorded.get(name)!r}, not {wanted[name]!r}); "
            "repeat that command to go on, or name another folder"
        )


# ------------------------------------------------------------------ replies


def _sampled(
    settings: Settings, options: RunOptions, data: list[NamedPrompt] | list[Record], folder: Path, notify: Notify
) -> list[Record]:
    """Return the data if they are records; if they are prompts, return records of replies that the target samples to them."""
    records = [one for one in data if isinstance(one, Record)]
    if records:
        return records
    prompts = [one for one in data if isinstance(one, NamedPrompt)]
    seconds = 60 * options.minutes * SAMPLING_SHARE
    clock = _Clock(folder.parent / "sampling.json")
    known = _known(folder)
    if clock.seconds < seconds and _size(folder) < MOST_SAMPLED and len(known) < (options.replies or len(known) + 1):
        notify(RunProgress("sampling", 0.0, seconds - clock.seconds, "loading the model"))
        drafting = settings if options.initial is None else replace(settings, draft=(str(options.initial),))
        with build_llm(drafting) as plain:
            recording = RecordingLLM(plain, RecordWriter(folder), source=settings.model)
            with closing(recording):
                asyncio.run(_sample(recording, prompts, options, known, folder, clock, seconds, notify))
    return read_records(folder, damaged=lambda line: None)  # A kill leaves at most one incomplete line, whose reply is missing.


def _known(folder: Path) -> set[str]:
    """Return the ids of the replies that earlier runs sampled into this folder."""
    try:
        return {record.id for record in read_records(folder, damaged=lambda line: None)}
    except BadSetting:
        return set()


async def _sample(
    llm: LLM,
    prompts: Sequence[NamedPrompt],
    options: RunOptions,
    known: set[str],
    folder: Path,
    clock: _Clock,
    seconds: float,
    notify: Notify,
) -> None:
    """Sample replies until all requests are done, the records are large enough, or the time is over and there are two replies.
    Replies that are not finished then are dropped. Twice as many requests as the engine runs at once are sent, so that some
    always wait."""
    begun, tokens, replies = clock.seconds, 0, len(known)
    wanted = _requests(llm, prompts, options, known)
    if options.replies is not None:
        wanted = itertools.islice(wanted, max(options.replies - len(known), 0))
    running: set[asyncio.Task[int]] = set()

    async def one(generation: Generation) -> int:
        [reply] = await llm.arun(generation)
        return len(reply.tokens)

    try:
        while True:
            while len(running) < 2 * llm.service.capacity.lanes and (generation := next(wanted, None)) is not None:
                running.add(asyncio.create_task(one(generation)))
            if not running:
                return
            done, running = await asyncio.wait(running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                tokens, replies = tokens + task.result(), replies + 1
            clock.save()
            left = seconds - clock.seconds
            rate = tokens / max(clock.seconds - begun, 1e-9)
            notify(
                RunProgress(
                    "sampling", clock.seconds / seconds, max(left, 0.0), f"{replies:,} replies, {rate:.0f} tokens per second"
                )
            )
            if (left <= 0 and replies >= 2) or _size(folder) >= MOST_SAMPLED:
                return
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _requests(llm: LLM, prompts: Sequence[NamedPrompt], options: RunOptions, known: set[str]) -> Iterator[Generation]:
    """The requests of a run in order: in every round all prompts, each at its next temperature. Requests that have
    a sampled reply already are left out, and so are repeated greedy ones."""
    temperatures = options.temperatures
    for number in range(len(prompts) * MOST_ROUNDS):
        round_, index = divmod(number, len(prompts))
        temperature = temperatures[(round_ + index) % len(temperatures)]
        if (temperature == 0 and round_ >= len(temperatures)) or f"{LABEL}-{number}-0" in known:
            continue  # Another greedy reply to this prompt would be equal, or this reply has been sampled.
        wanted = {
            **NEUTRAL_SAMPLING,
            "temperature": temperature,
            "max_tokens": options.new_tokens,
            "seed": options.seed * 2**24 + number,
        }
        try:
            generation = generation_for(llm, prompts[index].prompt, RequestOptions.of(**wanted))
        except BadRequest as error:
            raise BadSetting(f"--data: prompt {index + 1} cannot be used: {error}") from None
        yield replace(generation, label=f"{LABEL}-{number}")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.jsonl")) if folder.is_dir() else 0


class _Clock:
    """The seconds that a phase has taken in all runs so far, stored in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._begun = path, time.monotonic()
        try:
            self._before = float(json.loads(path.read_text())["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            self._before = 0.0

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._begun

    def save(self) -> None:
        replace_file(self._path, json.dumps({"seconds": self.seconds}).encode())


# ------------------------------------------------------------------ training


class TrainingRun:
    """Trains until the time is over and saves its state on the way. `train` makes and closes it."""

    def __init__(
        self,
        settings: Settings,
        options: RunOptions,
        folder: Path,
        examples: list[Example],
        held_out: list[Example],
        notify: Notify,
    ) -> None:
        self._options, self._examples, self._notify = options, examples, notify
        self._state = folder / "state.safetensors"
        self._budget = 60 * options.minutes * (1 - SAMPLING_SHARE if not _is_records(options.data) else 1.0)
        self._before, self._next = 0.0, 0  # seconds of earlier runs; number of the sequence that is read next
        self.best_kept = -1.0
        self._best: dict[str, np.ndarray] = {}
        notify(RunProgress("training", 0.0, None, "loading the model"))
        saved = self._saved()
        self._training = DraftTraining(
            replace(settings, draft=("none",), prefix_cache=False, cache_budget=None, snapshot_dir=None),
            examples=examples,
            initial=options.initial,
            block=options.block,
            layers=options.layers,
            mask_token=None if saved is None else saved[0]["mask_token"],
            recipe=options.recipe,
            seed=options.seed,
            buffer_bytes=options.memory,
            notify=lambda line: notify(RunProgress("training", 0.0, None, line)),
        )
        try:
            self._held_out = self._training.reader.read(held_out)
            if saved is not None:
                self._restore(*saved)
            self.seconds = self._before
        except BaseException:
            self.close()
            raise

    @property
    def block(self) -> int:
        return self._training.spec.block

    @property
    def steps(self) -> int:
        return self._training.trainer.steps

    @property
    def _progress(self) -> float:
        """The share of the run that is over, by time or by steps."""
        by_steps = 0.0 if self._options.steps is None else self.steps / self._options.steps
        return max(self.seconds / self._budget, by_steps)

    def train(self) -> None:
        trainer, begun = self._training.trainer, time.monotonic()
        gap = min(self._budget / SAVES, MOST_SECONDS_UNSAVED)
        saved, notified, kept = self.seconds, -1.0, self._kept()
        try:
            self._read_next()
            while (progress := self._progress) < 1:
                if trainer.steps % READ_AHEAD == 0 and len(trainer.buffer.sequences) < len(self._examples):
                    self._read_next()
                measured = trainer.step(progress)
                self.seconds = self._before + time.monotonic() - begun
                if self.seconds - saved >= gap:
                    kept = self._kept()
                    self._save()
                    self.seconds = saved = self._before + time.monotonic() - begun
                if self.seconds - notified >= 0.5:
                    notified, left = self.seconds, self.seconds * (1 - progress) / max(progress, 1e-3)
                    line = f"step {trainer.steps:,}, loss {measured.loss:.2f}, about {1 + kept:.2f} tokens per step (held-out)"
                    self._notify(RunProgress("training", progress, left, line))
        finally:
            if trainer.steps:
                self._kept()
                self._save()

    def _kept(self) -> float:
        """Evaluate on held-out sequences, and keep the weights if they are the best so far."""
        kept = self._training.trainer.evaluate(self._held_out)
        if kept > self.best_kept:
            exported = self._training.trainer.drafter.exported()
            self.best_kept, self._best = kept, {f"{layer}/{name}": array for (layer, name), array in exported.items()}
        return kept

    def _read_next(self) -> None:
        """Read features of the next sequences into the buffer. Each round reads all sequences, in an order that depends on the
        seed."""
        chosen = []
        for _ in range(min(READ_AHEAD, len(self._examples))):
            round_, index = divmod(self._next, len(self._examples))
            order = np.random.default_rng((self._options.seed, round_)).permutation(len(self._examples))
            chosen.append(self._examples[int(order[index])])
            self._next += 1
        for sequence in self._training.reader.read(chosen):
            self._training.trainer.buffer.add(sequence)

    def write(self) -> None:
        """Write the best weights as a drafter."""
        weights = {
            (None if layer == "None" else int(layer), name): array
            for key, array in self._best.items()
            for layer, _, name in [key.partition("/")]
        }
        write_zlab(self._options.out, self._training.spec, weights)

    def close(self) -> None:
        self._training.close()

    # ------------------------------------------------------------------ state

    def _save(self) -> None:
        arrays = {f"trainer/{name}": array for name, array in self._training.trainer.state().items()}
        arrays |= {f"best/{name}": array for name, array in self._best.items()}
        header = {
            "seconds": self.seconds,
            "best_kept": self.best_kept,
            "next": self._next,
            "mask_token": self._training.spec.mask_token,
        }
        data = safetensors.numpy.save(arrays, {"run": json.dumps(header)})
        replace_file(self._state, data)

    def _saved(self) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """The saved state: a header that says how far the run is, and arrays. The header has the mask token, since a run that
        goes on keeps it, although replies that were sampled meanwhile may contain this token."""
        if not self._state.exists():
            return None
        try:
            with safetensors.safe_open(self._state, "numpy") as file:
                header = json.loads((file.metadata() or {})["run"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            if not isinstance(header["mask_token"], int):
                raise TypeError("mask_token is no number")
            return header, arrays
        except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
            raise self._damaged(error) from None

    def _restore(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        if header["mask_token"] != self._training.spec.mask_token:
            raise BadSetting(f"--init: the drafter changed since {self._options.out} was begun; name another folder with --out")
        try:
            trainer = {name.removeprefix("trainer/"): array for name, array in arrays.items() if name.startswith("trainer/")}
            self._training.trainer.restore(trainer)
            self._best = {name.removeprefix("best/"): array for name, array in arrays.items() if name.startswith("best/")}
            self._before, self.best_kept, self._next = float(header["seconds"]), float(header["best_kept"]), int(header["next"])
        except (KeyError, ValueError, TypeError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> CorruptFile:
        return CorruptFile(f"{self._state} is damaged ({error}); remove it to train from the beginning")


def _is_records(data: str) -> bool:
    return isinstance(read_data(data)[0], Record)


# ------------------------------------------------------------------ the result


def _generation(record: Record) -> Generation:
    """The request of a record, for as many tokens as its reply has."""
    assert record.generation is not None
    params = replace(record.generation.params, max_tokens=max(len(record.reply), 1), logprobs=None, checksums=False)
    return replace(
        record.generation, params=replace(params, min_tokens=min(params.min_tokens, params.max_tokens)), label="held-out"
    )


def _in_engine(
    settings: Settings, drafter: Path, block: int, requests: Sequence[Generation], phase: str, notify: Notify
) -> TokensPerStep:
    """Tokens per step of held-out requests with a drafter that always drafts its full length."""
    notify(RunProgress(phase, 0.0, None, "loading the model"))
    drafting = replace(
        settings, draft=(str(drafter),), draft_tokens=block - 1, prefix_cache=False, cache_budget=None, snapshot_dir=None
    )
    done = 0

    def report(line: str) -> None:
        nonlocal done
        done += 1
        notify(RunProgress(phase, done / len(requests), None, line))

    with build_llm(drafting) as llm:
        counts: list[ReplyCount] = run_counted(llm, requests, at_once=llm.service.capacity.lanes, notify=report)
    return acceptance(counts)


def _write_gguf(folder: Path) -> Path | None:
    """Write the drafter as GGUF too. None if the package that writes GGUF is missing, or GGUF cannot represent the
    drafter."""
    path = folder / "drafter.gguf"
    try:
        convert_drafter(folder, path)
    except (ImportError, OnedrawError):
        return None
    return path


def _card(settings: Settings, options: RunOptions, report: RunReport) -> str:
    """The README of a drafter: its target, how it was trained, and the measured tokens per step."""

    def shown(name: str, found: TokensPerStep | None) -> str:
        if found is None:
            return ""
        return (
            f"* {name}: {found.mean:.2f} tokens per step (95 % between {found.low:.2f} and {found.high:.2f}; "
            f"{found.replies} held-out replies, {found.tokens:,} tokens).\n"
        )

    return (
        f"# A DFlash drafter for {settings.model}\n\n"
        f"Use it with `onedraw serve {settings.model} --draft {report.drafter.name}`. "
        "It can change the speed of a reply, never a token.\n\n"
        f"* Data: {options.data}; {report.sequences:,} replies with {report.tokens:,} tokens. Seed {options.seed}.\n"
        f"* Training: {report.steps:,} steps in {report.seconds:.0f} s, "
        f"{'from random weights' if options.initial is None else f'from {options.initial}'}; "
        f"options {json.dumps(options.recipe)}.\n"
        f"{shown('The drafter it began with', report.begun_with)}{shown('This drafter', report.measured)}"
    )


def report_json(report: RunReport) -> dict[str, Any]:
    return {**asdict(report), "drafter": str(report.drafter), "gguf": None if report.gguf is None else str(report.gguf)}
