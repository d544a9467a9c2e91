"""Runs an export of `onedraw export` with IREE on the CPU: the graphs return logits, and the host samples.

In: the folder of an export. Out: a Backend for the same engine; tokens are sampled by `sampling/law.py`. jax is not needed.
Graphs are compiled at first use and cached in the folder of the export. Neither drafts nor checkpoints are supported.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from onedraw.backends.base import Capacity, ImmediateSteps, PageGroup
from onedraw.backends.sampled_rows import row_outcome
from onedraw.backends.xla.inputs import CHUNK, XlaInputs, compiled_shapes, make_inputs
from onedraw.backends.xla.selfcheck import self_check
from onedraw.errors import CorruptFile, ModelNotFound, UnsupportedModel
from onedraw.sampling.law import sample
from onedraw.types import Outcome, Plan

DRIVER = "local-task"  # IREE's multithreaded CPU driver
# Graphs of recurrent models fail in the multithreaded driver of IREE 3.13, which reads buffers before they are allocated.
RECURRENT_DRIVER = "local-sync"
MANIFEST = "manifest.json"
FORMAT = 4  # version of the manifest's format that `export.py` writes


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of an export, or raise if the folder has none that this version reads."""
    path = folder / MANIFEST
    if not path.exists():
        raise ModelNotFound(
            f"{folder} is not an export: it has no {MANIFEST}; create one with `onedraw export MODEL --out {folder}`"
        )
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = manifest["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CorruptFile(f"{path} is not the manifest of an export; export the model again") from None
    if found != FORMAT:
        raise UnsupportedModel(f"{path} has format {found}, this version reads {FORMAT}; export the model again")
    return manifest


class IreeBackend(ImmediateSteps):
    """A backend whose graphs are compiled, weights loaded and pages zeroed when its constructor returns."""

    def __init__(self, folder: Path, *, check: bool = True, notify: Callable[[str], None] = lambda line: None) -> None:
        """`check`: run the self-check. `notify` receives lines for the user."""
        super().__init__()
        self._manifest = manifest = read_manifest(folder)
        sizes: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in manifest["sizes"].items()
        }
        sizes["step_tokens"] = sizes.pop("turn_tokens")  # manifests call it by the name of --turn-tokens
        self._shape = compiled_shapes(**sizes)
        driver = RECURRENT_DRIVER if manifest["recurrent"] else DRIVER
        self._runtime = IreeRuntime(driver)
        self._graphs = {}
        for name, graph in manifest["graphs"].items():
            notify(f"iree: compiling {name}")
            self._graphs[name] = self._runtime.load(folder / graph["file"])
        self._arrays: dict[str, Any] = {}
        used = {one["name"]: one["dtype"] for graph in manifest["graphs"].values() for one in graph["arguments"]}
        with np.load(folder / "weights.npz") as stored:
            # The bits of bf16, which numpy lacks, are stored as integers.
            for name in stored.files:
                if name in used:
                    self._arrays[name] = self._runtime.put(stored[name].view(used[name]))
        for one in manifest["state"]:
            self._arrays[one["name"]] = self._runtime.put(np.zeros(one["shape"], dtype=one["dtype"]))
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
            scores_prompts=False,
            step_tokens=self._shape.mixed.tokens - CHUNK,
            device=f"iree-{driver}",
            dtype=manifest["dtype"],
            activation=manifest["dtype"],
        )
        self.report = self_check(self) if check else None

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def close(self) -> None:
        self._outcomes.clear()
        self._arrays.clear()

    def _run(self, plan: Plan) -> Outcome:
        begin = time.perf_counter()
        inputs = make_inputs(plan.rows, self._shape, conv=self._manifest["conv"])
        sampling = [number for number, row in enumerate(plan.rows) if row.samples]
        picks = np.zeros(self._shape.picks, dtype=np.int32)
        picks[: len(sampling)] = [inputs.firsts[number] + len(plan.rows[number].tokens) - 1 for number in sampling]
        logits = self._step(inputs, picks)[:, : self._capacity.vocab]
        rows = []
        for number, row in enumerate(plan.rows):
            sampled = [sample(logits[sampling.index(number)], row.params, row.history)] if row.samples else []
            rows.append(row_outcome(row, sampled))
        return Outcome(tuple(rows), time.perf_counter() - begin)

    def _step(self, inputs: XlaInputs, picks: Any) -> Any:
        """Run the graph for the step's compiled shape and return its logits. The graph returns new pages and states, which
        replace the old ones."""
        name = "decode" if inputs.bucket == self._shape.decode else "prefill"
        given = {f"inputs/{key}": value for key, value in inputs.arrays.items()} | {"picks": picks}
        given |= {f"runs/{key}": value for key, value in inputs.delta.items()}
        graph = self._manifest["graphs"][name]
        arguments = [self._arrays[a["name"]] if a["name"] in self._arrays else given[a["name"]] for a in graph["arguments"]]
        results = self._graphs[name](*arguments)
        logits = None
        for described, result in zip(graph["results"], results, strict=True):
            if described["name"] == "logits":
                logits = result.to_host()
            else:
                self._arrays[described["name"]] = result
        return logits


class IreeRuntime:
    """IREE's compiler and runtime for one device."""

    def __init__(self, driver: str = DRIVER) -> None:
        try:
            import ml_dtypes  # noqa: F401  # makes bfloat16 known to numpy; IREE needs it too
            from iree import runtime
        except ImportError:
            raise UnsupportedModel('exports run with IREE, which is not installed: pip install "onedraw[xla]"') from None
        self._runtime = runtime
        self._config = runtime.Config(driver)

    def put(self, array: Any) -> Any:
        return self._runtime.asdevicearray(self._config.device, array)

    def load(self, path: Path) -> Callable[..., Any]:
        """Return a graph as a function. It is compiled unless the cache has a program that is no older than the graph's
        text."""
        compiled = path.with_suffix(".vmfb")
        if not compiled.exists() or compiled.stat().st_mtime < path.stat().st_mtime:
            from iree import compiler

            options = ["--iree-llvmcpu-target-cpu=host"]
            given = {"target_backends": ["llvm-cpu"], "input_type": "stablehlo", "extra_args": options}
            # Renamed when complete, so that no other process reads a partial file.
            part = compiled.with_name(f"{compiled.name}.{os.getpid()}.part")
            part.write_bytes(compiler.compile_str(path.read_text(), **given))
            os.replace(part, compiled)
        context = self._runtime.SystemContext(config=self._config)
        context.add_vm_module(self._runtime.VmModule.copy_buffer(context.instance, compiled.read_bytes()))
        module = next(module for name, module in context.modules.items() if name != "hal")
        found: Callable[..., Any] = module["main"]
        return found
