"""Export of a model as StableHLO graphs for other runtimes, for `onedraw export`.

In: a spec, a source of weights, sizes. Out: a folder with `prefill.mlir` (a step of any rows, up to `step_tokens` tokens),
`decode.mlir` (a step of one token per lane), `weights.npz` and `manifest.json` with the order, names, shapes and dtypes of inputs
and results. Both graphs take and return KV pages and recurrent states, and return logits; the caller samples. `iree.py` runs an
export.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import jax
import numpy as np

from onedraw.backends.xla.experts import experts_of
from onedraw.backends.xla.inputs import ShapeBucket, compiled_shapes, conv_width, make_inputs, product_rows
from onedraw.backends.xla.iree import FORMAT, MANIFEST
from onedraw.backends.xla.model import XlaStage, XlaStream, run_layers
from onedraw.backends.xla.platform import find_devices
from onedraw.backends.xla.sampler import logits_of
from onedraw.backends.xla.state import as_stored
from onedraw.errors import BadSetting, UnsupportedModel
from onedraw.models.source import WeightSource
from onedraw.models.spec import ModelSpec


def export_model(
    spec: ModelSpec,
    source: WeightSource,
    folder: Path,
    *,
    lanes: int,
    page_size: int,
    pages: tuple[int, ...],
    max_context: int,
    step_tokens: int,
    dtype: str,
    version: str,
    about: dict[str, Any],
    notify: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write all files and return the path of the manifest. The graphs have the arithmetic of the xla backend in `dtype`.
    `about` has the other facts that serving needs; it is copied into the manifest."""
    if spec.inputs or any(experts_of(layer) for layer in spec.layers):
        raise UnsupportedModel(
            f"{spec.family} cannot be exported: IREE does not compile its experts, and layers with inputs of their own read the "
            "checkpoint in every step; run it with --backend xla or torch"
        )
    _require_writable(folder)
    sizes: dict[str, Any] = {"lanes": lanes, "page_size": page_size, "pages": pages, "windows": spec.windows}
    sizes |= {"max_context": max_context, "drafts": 0, "checkpoints": 0, "rows": product_rows("cpu", dtype)}
    shape = compiled_shapes(**sizes, step_tokens=step_tokens)
    _, (device,) = find_devices("cpu", ["auto"])
    stage = XlaStage(spec, source, shape, dtype=dtype, activation=dtype, device=device, start=0, stop=len(spec.layers))
    graphs = {}
    for name, bucket in (("prefill", shape.mixed), ("decode", shape.decode)):
        notify(f"writing {name}.mlir: steps of up to {bucket.tokens} tokens")
        text, graphs[name] = _graph(stage, bucket)
        (folder / f"{name}.mlir").write_text(text)
        graphs[name]["file"] = f"{name}.mlir"
    notify("writing weights.npz")
    arrays: dict[str, Any] = {name: as_stored(array) for name, array in _named({"weights": stage.weights})}
    np.savez(folder / "weights.npz", **arrays)
    state = [{"name": n, "shape": list(a.shape), "dtype": str(a.dtype)} for n, a in _named({"state": stage.state})]
    manifest = {
        "format": FORMAT,
        "made_by": f"onedraw {version}, jax {jax.__version__}",
        "family": spec.family,
        "vocab": spec.vocab,
        "recurrent": spec.recurrent,
        "conv": conv_width(spec),
        "dtype": dtype,
        "sizes": {**sizes, "turn_tokens": step_tokens},
        "buckets": {"prefill": asdict(shape.mixed), "decode": asdict(shape.decode)},
        "state": state,
        "graphs": graphs,
        "model": about,
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1))
    return path


def _require_writable(folder: Path) -> None:
    """Create the folder and check that it is writable, before weights are read and graphs computed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadSetting(f"--out {folder}: {error.strerror or error}; name a writable folder") from None


def _graph(stage: XlaStage, bucket: ShapeBucket) -> tuple[str, dict[str, Any]]:
    """The StableHLO text of the graph for a compiled shape, and the manifest entries of its arguments and results, in order."""
    spec = stage.spec

    def step(given: dict[str, Any]) -> dict[str, Any]:
        weights, inputs = given["weights"], given["inputs"]
        layers = (weights, given["state"], XlaStream(inputs["tokens"], None), inputs, given["runs"], given["picks"])
        state, _, _, picked = run_layers(*layers, stage=stage, bucket=bucket)
        return {"state": state, "logits": logits_of(weights, picked, spec=spec)}

    inputs = make_inputs((), stage.shape, conv=conv_width(spec), bucket=bucket)
    picks = np.zeros(stage.shape.picks, dtype=np.int32)
    given = {"weights": stage.weights, "state": stage.state, "inputs": inputs.arrays, "runs": inputs.delta, "picks": picks}
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype), given)
    exported = jax.export.export(jax.jit(step), platforms=["cpu"])(shapes)
    names = [name for name, _ in _named(given)]
    results = jax.eval_shape(step, shapes)
    arguments = [_entry(names[index], exported.in_avals[index]) for index in exported.module_kept_var_idx]
    return _text(exported), {"arguments": arguments, "results": [_entry(*pair) for pair in _named(results)]}


def _text(exported: Any) -> str:
    """The graph as text, without source locations, because these contain paths of this machine."""
    before = jax.config.read("jax_include_debug_info_in_dumps")
    jax.config.update("jax_include_debug_info_in_dumps", False)
    try:
        return str(exported.mlir_module())
    finally:
        jax.config.update("jax_include_debug_info_in_dumps", before)


def _named(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree in jax's order, with names such as state/0/keys."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in found]


def _entry(name: str, leaf: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(leaf.shape), "dtype": str(leaf.dtype)}
