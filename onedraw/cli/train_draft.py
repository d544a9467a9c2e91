"""`onedraw train-draft`: train a drafter for a model, from built-in prompts, your own prompts, or recorded traffic.

A run may be interrupted at any time; the same command goes on from where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onedraw.cli import terminal
from onedraw.cli.flags import add_settings, argument_type, read_settings
from onedraw.errors import BadSetting
from onedraw.settings import size_in_bytes

if TYPE_CHECKING:
    from onedraw.training.acceptance import TokensPerStep
    from onedraw.training.run import RunProgress

HELP = "train a drafter for a model, from its own replies"
EXAMPLES = """examples:
  onedraw train-draft smollm2 --data builtin --out ./drafter
  onedraw serve smollm2 --record ./requests
  onedraw train-draft smollm2 --data ./requests --init ./drafter --out ./drafter-2 --minutes 60
  onedraw serve smollm2 --draft ./drafter-2

The model samples replies to prompts, or recorded replies are used as they are. The folder is a drafter in the z-lab layout, with
a GGUF file beside it. Interrupt a run with Ctrl-C; the same command goes on.
"""
LONGEST_CONTEXT = 2048  # default of --max-context: longer sequences cost memory, and their beginnings suffice to learn from

# (option, least, greatest value) of options that may be left out, so that the time alone limits the run
MOST = (("replies", 2, 2**40), ("steps", 1, 2**40))


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the model to draft for")
    group = parser.add_argument_group("training")
    group.add_argument(
        "--data",
        required=True,
        metavar="FILE|DIR|builtin",
        help="records of --record or --learn-draft, a .jsonl file of prompts (objects with messages or prompt), or builtin",
    )
    group.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder of the drafter and of the run's state")
    group.add_argument("--minutes", type=float, default=30.0, metavar="X", help="time of the whole run in minutes (default: 30)")
    group.add_argument("--replies", type=int, metavar="N", help="sample at most so many replies (default: what the time allows)")
    group.add_argument("--steps", type=int, metavar="N", help="train at most so many steps (default: what the time allows)")
    group.add_argument("--init", type=Path, metavar="DRAFTER", help="the drafter to begin with (default: random weights)")
    group.add_argument(
        "--temperatures",
        type=argument_type(_temperatures),
        default=(0.0, 0.7, 1.0),
        metavar="LIST",
        help="temperatures at which replies to prompts are sampled (default: 0,0.7,1)",
    )
    group.add_argument("--new-tokens", type=int, default=256, metavar="N", help="longest sampled reply (default: 256)")
    group.add_argument(
        "--block", type=int, default=8, metavar="N", help="slots of a new drafter: it drafts N - 1 tokens (default: 8)"
    )
    group.add_argument(
        "--layers", type=int, metavar="N", help="layers of a new drafter (default: a third of the model's, at most 4)"
    )
    group.add_argument("--train-seed", type=int, default=0, metavar="N", help="seed of data and training (default: 0)")
    group.add_argument(
        "--feature-memory",
        type=argument_type(size_in_bytes),
        default=size_in_bytes("1GiB"),
        metavar="SIZE",
        help="memory for features of sequences; others are read again when it is their turn (default: 1GiB)",
    )
    group.add_argument("--no-measure", action="store_true", help="do not measure the drafter in the engine at the end")
    group.add_argument("--json", action="store_true", help="print one JSON object with the result")
    add_settings(parser, leave_out=("served_name", "queue_limit", "draft", "draft_tokens", "tree_budget", "trace_verify"))


def run(arguments: argparse.Namespace) -> int:
    from onedraw.training.run import RunOptions, report_json, train

    if not arguments.minutes > 0:
        raise BadSetting(f"--minutes: must be above 0, not {arguments.minutes:g}")
    for name, low, high in (("new_tokens", 2, 2**20), ("block", 2, 64), ("layers", 1, 64), ("train_seed", 0, 2**20), *MOST):
        value = getattr(arguments, name)
        if value is not None and not low <= value <= high:
            raise BadSetting(f"--{name.replace('_', '-')}: must be in [{low}, {high}], not {value}")
    if arguments.init is not None and not arguments.init.exists():
        raise BadSetting(f"--init: there is no {arguments.init}; name the folder or file of a drafter")
    options = RunOptions(
        data=arguments.data,
        out=arguments.out,
        minutes=arguments.minutes,
        replies=arguments.replies,
        steps=arguments.steps,
        initial=arguments.init,
        temperatures=arguments.temperatures,
        new_tokens=arguments.new_tokens,
        block=arguments.block,
        layers=arguments.layers,
        seed=arguments.train_seed,
        memory=arguments.feature_memory,
        measure=not arguments.no_measure,
    )
    settings = read_settings(
        arguments, max_context=LONGEST_CONTEXT if arguments.max_context is None else arguments.max_context, draft=("auto",)
    )
    with progress_bar() as notify, _terminated_as_interrupted():
        try:
            report = train(settings, options, notify)
        except KeyboardInterrupt:
            terminal.dim(f"interrupted; the same command goes on from {arguments.out}")
            raise
    if arguments.json:
        terminal.print_json(report_json(report))
        return 0
    print(f"{report.drafter}: {report.steps:,} steps on {report.sequences:,} replies in {report.seconds:.0f} s")
    for name, found in (("the drafter it began with", report.begun_with), ("this drafter", report.measured)):
        if found is not None:
            print(f"{name}: {_shown(found)}")
    print(f"use it: onedraw serve {arguments.model} --draft {report.drafter}")
    return 0


def _shown(found: TokensPerStep) -> str:
    return (
        f"{found.mean:.2f} tokens per step on {found.replies} held-out replies "
        f"(95 % between {found.low:.2f} and {found.high:.2f})"
    )


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.replace(",", " ").split())
    except ValueError:
        found = ()
    if not found or not all(0 <= value <= 100 for value in found):
        raise BadSetting(f"not a list of temperatures: {text!r}; write for example 0,0.7,1")
    return found


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that the state of the run is saved."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[RunProgress], None]]:
    """Return a function that shows a run's progress: a bar on a terminal if rich is installed, else a line every few seconds."""
    rich = _rich_progress() if terminal.decorated(sys.stderr) else None
    if rich is None:
        with terminal.progress() as notify:
            yield lambda progress: notify(_line(progress))
        return
    with rich as bar:
        task = bar.add_task("", total=1.0, left="")

        def show(progress: RunProgress) -> None:
            left = f"{_clock(progress.seconds)} left" if progress.seconds is not None else ""
            text = progress.text.replace("[", r"\[")
            bar.update(task, description=progress.phase, completed=progress.share, left=f"{left} {text}")

        yield show


def _rich_progress() -> Any | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)


def _line(progress: RunProgress) -> str:
    left = f", {_clock(progress.seconds)} left" if progress.seconds is not None else ""
    return f"{progress.phase} {progress.share:.0%}{left}: {progress.text}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
