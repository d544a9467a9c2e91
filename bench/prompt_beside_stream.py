"""How long a stream waits while a long prompt is computed, with and without the limit --step-seconds.

    python -m bench.prompt_beside_stream [MODEL] [--tokens 3000] [--repeats 2]

Both settings are loaded in one process and take turns. Printed per round: the time of the prompt beside a stream and alone, the
longest gap between two tokens of the stream while the prompt was computed, and how many tokens the stream got meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from pathlib import Path

import onedraw
from onedraw.llm.llm import LLM
from onedraw.settings import Settings

TEXT = Path(__file__).parents[1] / "docs" / "api.md"
WARM = 20  # tokens of the stream before the prompt is sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    limits = (0.0, Settings().step_seconds)
    common = {"draft": "none", "prefix_cache": False, "max_context": options.tokens + 600}
    models = {limit: onedraw.load(options.model, step_seconds=limit, **common) for limit in limits}
    for _ in range(options.repeats):
        for limit, llm in models.items():
            print(f"--step-seconds {limit}: {measure(llm, options.tokens)}", flush=True)
    for llm in models.values():
        llm.close()


def measure(llm: LLM, tokens: int) -> str:
    prompt = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:tokens]
    times: list[float] = []
    warm = threading.Event()

    def stream() -> None:
        for _ in llm.stream("Once upon a time", max_tokens=400, seed=1, ignore_eos=True):
            times.append(time.perf_counter())
            if len(times) > WARM:
                warm.set()

    thread = threading.Thread(target=stream)
    thread.start()
    warm.wait()
    begin = time.perf_counter()
    llm.generate(prompt, max_tokens=1, seed=1)
    end = time.perf_counter()
    thread.join()
    gaps = [after - before for before, after in itertools.pairwise(times) if begin <= after and before <= end]
    meanwhile = sum(begin <= at <= end for at in times)
    again = time.perf_counter()
    llm.generate(prompt, max_tokens=1, seed=2)
    alone = time.perf_counter() - again
    return (
        f"prompt of {len(prompt)} {end - begin:.2f} s beside a stream, {alone:.2f} s alone; "
        f"longest gap {max(gaps) * 1e3:.0f} ms, {meanwhile} tokens of the stream meanwhile"
    )


if __name__ == "__main__":
    main()
