"""Compare recipes of drafter training at equal time, on one model and the same replies.

    python -m bench.draft_recipes MODEL RECORDS [--seconds 60] [--seeds 3] [--replies 48] [--recipes NAME,NAME] [--json]

RECORDS: what `onedraw train-draft` or --record wrote, with replies at temperatures 0, 0.7 and 1. Every drafter begins with random
weights and trains for --seconds of processor time, so that other work on the machine does not count. Then it drafts held-out
requests in the engine, chains of its full length. Prints tokens per step for each temperature, the mean over the seeds and the
least and most of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onedraw.backends.torch.training.trainer import Recipe, TrainingSequence
from onedraw.build.llm import build_llm
from onedraw.build.training import DraftTraining, Example, target_info
from onedraw.checkpoints.drafter_writer import write_zlab
from onedraw.contract.record import Record, read_records
from onedraw.settings import Settings
from onedraw.training.acceptance import acceptance, run_counted
from onedraw.training.data import examples_of, split_records

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "adamw, sequence's token, falling weights": {"optimizer": "adamw", "loss": "hard", "weights": "decay"},
    "adamw, target's likeliest, falling weights": {"optimizer": "adamw", "loss": "soft", "weights": "decay"},
    "adamw, target's likeliest, length weights": {"optimizer": "adamw", "loss": "soft"},
    "adamw, keep probability, length weights": {"optimizer": "adamw"},
    "muon, sequence's token, length weights": {"loss": "hard"},
    "muon, target's likeliest, length weights": {"loss": "soft"},
    "muon, keep probability, length weights": {},
}


def trained(
    settings: Settings, examples: list[Example], recipe: Mapping[str, Any], *, seconds: float, seed: int, out: Path
) -> int:
    """Train a drafter for `seconds` of processor time, and write it. Returns the number of steps."""
    training = DraftTraining(
        settings,
        examples=examples,
        initial=None,
        block=8,
        layers=None,
        recipe=dict(recipe),
        seed=seed,
        buffer_bytes=2**33,
        notify=lambda line: None,
    )
    try:
        read: list[TrainingSequence] = training.reader.read(examples)
        for sequence in read:
            training.trainer.buffer.add(sequence)
        begin = time.process_time()
        while (spent := time.process_time() - begin) < seconds:
            training.trainer.step(spent / seconds)
        write_zlab(out, training.spec, training.trainer.drafter.exported())
        return training.trainer.steps
    finally:
        training.close()


def measured(settings: Settings, drafter: Path, held_out: list[Record], *, replies: int) -> dict[str, float]:
    """Tokens per step of held-out requests, by temperature."""
    found = {}
    with build_llm(replace(settings, draft=(str(drafter),), draft_tokens=7)) as llm:
        for heat in (0.0, 0.7, 1.0):
            generations = [
                replace(one.generation, label="", params=replace(one.generation.params, temperature=heat))
                for one in held_out[:replies]
                if one.generation is not None
            ]
            found[f"{heat:g}"] = acceptance(run_counted(llm, generations, at_once=8)).mean
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("records", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replies", type=int, default=48)
    parser.add_argument(
        "--recipes", help="parts of names, separated by semicolons; all recipes that have one of them are compared"
    )
    parser.add_argument("--vary", type=json.loads, default={}, help="changes to every recipe as JSON, such as '{\"rows\": 16}'")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = Settings(model=options.model, device="cpu", max_context=512, draft=("none",), prefix_cache=False)
    training, held_out = split_records(read_records(options.records))
    examples = examples_of(training, target_info(settings), max_context=512)
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):  # the outer loop, so that what disturbs the machine for a while disturbs all recipes
        for name, given in RECIPES.items():
            if options.recipes and not any(part in name for part in options.recipes.split(";")):
                continue
            recipe = {**given, **options.vary}
            Recipe(**recipe)
            with tempfile.TemporaryDirectory() as folder:
                steps = trained(settings, examples, recipe, seconds=options.seconds, seed=seed, out=Path(folder))
                found = measured(settings, Path(folder), held_out, replies=options.replies)
            results.setdefault(name, []).append({"steps": steps, **found})
            if not options.json:
                print(f"seed {seed}, {name}: {steps} steps, {found}", flush=True)
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for name, runs in results.items():
        cells = []
        for heat in ("0", "0.7", "1"):
            values = [run[heat] for run in runs]
            cells.append(f"T {heat}: {statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        print(f"{name}: {statistics.mean(run['steps'] for run in runs):.0f} steps; {'; '.join(cells)}")


if __name__ == "__main__":
    main()
