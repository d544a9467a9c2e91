"""What `onedraw export` wrote, run by IREE on the CPU: a backend whose graphs give logits and whose host chooses.

In: the folder of an export. Out: a Backend, so the same engine drives it; tokens are chosen by `sampling/law.py` itself. jax is
not needed here. Graphs are compiled at first use and kept beside their text. Runs no drafts and keeps no checkpoints.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from onedraw.backends.base import Capacity, PageGroup, StepHandle
from onedraw.backends.sampled_rows import row_outcome
from onedraw.backends.xla.inputs import CHUNK, XlaInputs, compiled_shapes, make_inputs
from onedraw.errors import ModelNotFound, Unsupported, UnsupportedModel
from onedraw.sampling.law import sample
from onedraw.types import Outcome, Plan

DRIVER = "local-task"
FORMAT = 2


class IreeBackend:
    """Complete when constructed: graphs compiled, weights on the device, pages zeroed."""

    def __init__(self, folder: Path, *, tell: Callable[[str], None] = lambda line: None) -> None:
        path = folder / "manifest.json"
        if not path.exists():
            raise ModelNotFound(
                f"{folder} is no export: it has no manifest.json; make one with `onedraw export MODEL --out {folder}`"
            )
        self._manifest = manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise UnsupportedModel(f"{path} has format {manifest['format']}, this version reads {FORMAT}; export it again")
        sizes: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in manifest["sizes"].items()
        }
        self._shape = compiled_shapes(**sizes)
        self._runtime = Runtime()
        self._graphs = {}
        for name, graph in manifest["graphs"].items():
            tell(f"iree: compiling {name}")
            self._graphs[name] = self._runtime.load(folder / graph["file"])
        self._held: dict[str, Any] = {}
        with np.load(folder / "weights.npz") as stored:
            self._held |= {name: self._runtime.put(stored[name]) for name in stored.files}
        for one in manifest["state"]:
            self._held[one["name"]] = self._runtime.put(np.zeros(one["shape"], dtype=one["dtype"]))
        groups = zip(self._shape.pages, self._shape.windows, strict=True)
        self._capacity = Capacity(
            vocab=manifest["vocab"],
            max_context=self._shape.max_context,
            lanes=self._shape.lanes,
            groups=tuple(PageGroup(count, window) for count, window in groups),
            page_size=self._shape.page_size,
            chunk=CHUNK if manifest["recurrent"] else 1,
            recurrent=manifest["recurrent"],
            logits_per_position=False,
            step_tokens=self._shape.mixed.tokens - CHUNK,
            device=f"iree-{DRIVER}",
        )
        self._tickets = itertools.count()
        self._outcomes: dict[StepHandle, Outcome] = {}

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: Plan) -> StepHandle:
        ticket = StepHandle(next(self._tickets))
        self._outcomes[ticket] = self._run(plan)
        return ticket

    def collect(self, ticket: StepHandle) -> Outcome:
        return self._outcomes.pop(ticket)

    def close(self) -> None:
        self._outcomes.clear()
        self._held.clear()

    def _run(self, plan: Plan) -> Outcome:
        begin = time.perf_counter()
        if any(row.scores_prompt for row in plan.rows):
            raise Unsupported("prompt_logprobs: an exported graph gives the logits of chosen positions alone")
        inputs = make_inputs(plan.rows, self._shape, conv=self._manifest["conv"])
        choosing = [number for number, row in enumerate(plan.rows) if row.samples]
        picks = np.zeros(self._shape.picks, dtype=np.int32)
        picks[: len(choosing)] = [inputs.firsts[number] + len(plan.rows[number].tokens) - 1 for number in choosing]
        logits = self._turn(inputs, picks)[:, : self._capacity.vocab]
        rows = []
        for number, row in enumerate(plan.rows):
            chosen = [sample(logits[choosing.index(number)], row.params, row.history)] if row.samples else []
            rows.append(row_outcome(row, chosen))
        return Outcome(tuple(rows), time.perf_counter() - begin)

    def _turn(self, inputs: XlaInputs, picks: Any) -> Any:
        """Pages and states are consumed by a turn, and what it gave takes their place."""
        name = "decode" if inputs.bucket == self._shape.decode else "prefill"
        given = {f"inputs/{key}": value for key, value in inputs.arrays.items()} | {"picks": picks}
        given |= {f"runs/{key}": value for key, value in inputs.delta.items()}
        graph = self._manifest["graphs"][name]
        arguments = [self._held[a["name"]] if a["name"] in self._held else given[a["name"]] for a in graph["arguments"]]
        results = self._graphs[name](*arguments)
        logits = None
        for described, result in zip(graph["results"], results, strict=True):
            if described["name"] == "logits":
                logits = result.to_host()
            else:
                self._held[described["name"]] = result
        return logits


class Runtime:
    """IREE's compiler and runtime for one device."""

    def __init__(self) -> None:
        try:
            from iree import runtime
        except ImportError:
            raise UnsupportedModel('an export is run by IREE, which is not installed: pip install "onedraw[xla]"') from None
        self._runtime = runtime
        self._config = runtime.Config(DRIVER)

    def put(self, array: Any) -> Any:
        return self._runtime.asdevicearray(self._config.device, array)

    def load(self, path: Path) -> Callable[..., Any]:
        """The function of a graph, compiled now unless it is kept beside its text."""
        compiled = path.with_suffix(".vmfb")
        if not compiled.exists() or compiled.stat().st_mtime < path.stat().st_mtime:
            from iree import compiler

            options = ["--iree-llvmcpu-target-cpu=host"]
            given = {"target_backends": ["llvm-cpu"], "input_type": "stablehlo", "extra_args": options}
            part = compiled.with_name(f"{compiled.name}.{os.getpid()}.part")  # whoever reads beside us finds a whole file or none
            part.write_bytes(compiler.compile_str(path.read_text(), **given))
            os.replace(part, compiled)
        context = self._runtime.SystemContext(config=self._config)
        context.add_vm_module(self._runtime.VmModule.copy_buffer(context.instance, compiled.read_bytes()))
        module = next(module for name, module in context.modules.items() if name != "hal")
        found: Callable[..., Any] = module["main"]
        return found
