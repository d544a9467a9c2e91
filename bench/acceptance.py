"""Measure how many tokens a decode step gives with a drafter: six kinds of text, several temperatures, chains and trees.

    python -m bench.acceptance [MODEL] [--draft DRAFTER] [--prompts FILE] [--per-kind 6] [--new-tokens 256]
                               [--temperatures 0,0.7,1] [--trees 0,24] [--at-once 4] [--json]

The prompts are those of bench/prompts/six_kinds.jsonl, with which no drafter is trained. Every step drafts the drafter's full
length, so the figures do not depend on the machine's speed. The tokens of every reply are compared with plain decoding; the exit
status is 1 if any differ. Bounds with 95 % confidence, by bootstrap over the replies.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onedraw.build.llm import build_llm
from onedraw.settings import Settings
from onedraw.training.acceptance import acceptance, prompt_generations, run_counted
from onedraw.training.data import NamedPrompt, read_prompts

PROMPTS = Path(__file__).parent / "prompts" / "six_kinds.jsonl"
LENGTH = 15  # drafts per step; a drafter of shorter blocks drafts its full length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--draft", default="auto", help="a drafter; auto: the one that comes with the model")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--per-kind", type=int, default=6, help="prompts of each kind")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--temperatures", default="0,0.7,1")
    parser.add_argument("--trees", default="0,24", help="sizes of draft trees; 0: a chain")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    heats = [float(text) for text in options.temperatures.split(",")]
    named: dict[str, list[NamedPrompt]] = {}
    for prompt in read_prompts(options.prompts):
        named.setdefault(prompt.kind, []).append(prompt)
    chosen = [prompt for prompts in named.values() for prompt in prompts[: options.per_kind]]
    shared: dict[str, Any] = {"model": options.model, "device": "cpu", "max_batch": options.at_once, "max_context": 1024}
    expected: dict[tuple[str, float], list[tuple[int, ...]]] = {}
    rows: list[dict[str, Any]] = []
    draft = built_in(options.model) if options.draft == "auto" else options.draft
    for tree in (None, *map(int, options.trees.split(","))):
        drafting: dict[str, Any] = {"draft": ("none",)} if tree is None else {"draft": (draft,), "draft_tokens": LENGTH}
        with build_llm(Settings(**shared, **drafting, tree_budget=tree or 0)) as llm:
            for heat in heats:
                for kind, generations in prompt_generations(llm, chosen, temperature=heat, new_tokens=options.new_tokens).items():
                    counts = run_counted(llm, generations, at_once=options.at_once)
                    ids = [count.ids for count in counts]
                    if tree is None:
                        expected[kind, heat] = ids
                        continue
                    row = {"kind": kind, "temperature": heat, "tree": tree, **asdict(acceptance(counts))}
                    rows.append({**row, "same": ids == expected[kind, heat]})
                    if not options.json:
                        shape = f"tree of {tree}" if tree else "chain"
                        print(
                            f"{kind:6s} T {heat:<4g} {shape:11s} {row['mean']:.2f} tokens per step "
                            f"({row['low']:.2f} to {row['high']:.2f}), {row['replies']} replies, {row['tokens']:,} tokens, "
                            f"{'same' if rows[-1]['same'] else 'DIFFERENT'}",
                            flush=True,
                        )
    if options.json:
        print(json.dumps(rows, indent=1))
    raise SystemExit(not all(row["same"] for row in rows))


def built_in(model: str) -> str:
    """The path of the drafter that comes with a model. With `auto` the host's proposers would draft too."""
    from onedraw.build.checkpoint import describe, find_checkpoint
    from onedraw.build.drafters import find_built_in_drafter

    settings = Settings(model=model)
    checkpoint = find_checkpoint(settings)
    try:
        found = find_built_in_drafter(describe(settings, checkpoint).spec, checkpoint)
    finally:
        checkpoint.close()
    if found is None:
        raise SystemExit(f"no drafter comes with {model}; name one with --draft")
    return str(found)


if __name__ == "__main__":
    main()
