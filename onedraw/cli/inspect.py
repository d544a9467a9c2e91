"""`onedraw inspect`: show what a model is and what it would need to run, without loading its weights.

It prints a table or JSON: architecture, layers, sampling defaults, tokenizer, memory plan and unused tensors.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, assert_never

from onedraw.backends.devices import KV_QUANT_DTYPES, Device, float_dtype, parse_device
from onedraw.backends.memory_plan import MemoryPlan, human_bytes
from onedraw.backends.packing import PACKED_DTYPES, SPAN_BYTES, matrix_kinds, plan_weight_storage
from onedraw.backends.placement import SplitPlan
from onedraw.cli import terminal
from onedraw.cli.flags import add_settings, read_settings
from onedraw.errors import OutOfMemory
from onedraw.models.registry import ModelInfo
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, MoeSpec
from onedraw.settings import Settings

if TYPE_CHECKING:
    from onedraw.checkpoints.base import Checkpoint

HELP = "show what a model is and the memory it needs, without loading it"
EXAMPLES = """examples:
  onedraw inspect smollm2
  onedraw inspect ./my-model --devices cuda/sm86/24GiB,cuda/sm86/24GiB --max-context 262144
  onedraw inspect ./my-model --dtype bf16 --max-context 32768 --max-batch 16 --json
"""
# Settings that are not flags of this command, because they change nothing in its report.
NO_EFFECT = (
    *("served_name", "queue_limit", "xla_platform", "threads", "prefix_cache", "self_check", "overlap", "ahead"),
    *("draft_tokens", "tree_budget", "trace_verify", "cache_budget", "snapshot_dir"),
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name, a folder, a .gguf file or a hub id")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser, leave_out=NO_EFFECT)


def run(arguments: argparse.Namespace) -> int:
    from onedraw.backends.base import require_state_dtype
    from onedraw.build.checkpoint import describe, find_checkpoint
    from onedraw.build.drafters import drafter_bytes, proposer_names, select_drafter
    from onedraw.build.fit_devices import plan_devices, step_memory, stored_weights, with_device_sizes
    from onedraw.build.xla import compiled_steps, xla_settings

    settings = read_settings(arguments)
    require_state_dtype(settings.state_dtype)
    with terminal.progress() as notify:
        checkpoint = find_checkpoint(settings, notify)
    try:
        info = describe(settings, checkpoint)
        xla = settings.backend == "xla"
        drafter = None if xla else select_drafter(settings, info, checkpoint)
        size = drafter_bytes(drafter, info, checkpoint)
        devices = planned_devices(settings)
        settings = xla_settings(settings, devices) if xla else with_device_sizes(settings, info.spec, devices)
        fits = [] if xla else reach_rows(settings, info, devices, checkpoint, drafter)
        try:
            plan, split = plan_devices(settings, info, devices, drafter=size)
        except OutOfMemory as error:
            contexts = [f"  {reach_words(fit)}" for fit in fits]
            raise OutOfMemory("\n".join([str(error), *contexts])) from None
        drafts = [*proposer_names(settings), *([] if drafter is None else [str(drafter)])]
        report = {
            **identity(settings, checkpoint, info),
            "drafts": drafts,
            "memory": memory_json(plan, 0 if size is None else size(plan)),
        }
        report |= {"activation_dtype": split.activation, "stages": stages_json(split), "fits": fits}
        accelerators = [] if xla else [stage for stage in split.stages if stage.device.kind != "cpu"]
        report["turns"] = None
        if accelerators:
            report["turns"] = asdict(step_memory(settings, info, stored_weights(info, accelerators[0].dtype), devices))
        report["compiled_turns"] = compiled_steps(settings, info, plan, split.stages[-1].device) if xla else []
        report["holding"] = {
            dtype: asdict(plan_weight_storage(info.weights, dtype))
            for dtype in dict.fromkeys(stage.dtype for stage in split.stages)
            if dtype in PACKED_DTYPES
        }
    finally:
        checkpoint.close()
    if arguments.json:
        terminal.print_json(report)
    else:
        terminal.table("", ("", settings.model), rows(report))
    return 0


def reach_rows(
    settings: Settings,
    info: ModelInfo,
    devices: Sequence[Device],
    checkpoint: Checkpoint,
    chosen: Path | Literal["mtp"] | None,
) -> list[dict[str, Any]]:
    """Return the longest contexts that fit into the devices' memory, as JSON objects: without a drafter and with one, which is
    the selected drafter (`chosen`), else one whose shape is known for this model. The list is empty if no device is an
    accelerator whose memory size is known."""
    from onedraw.build.drafters import drafter_bytes, known_drafter
    from onedraw.build.fit_devices import longest_contexts

    if all(device.kind == "cpu" or device.memory is None for device in devices):
        return []
    packed = not SPAN_BYTES.keys().isdisjoint(matrix_kinds(info.weights))
    drafter = chosen or known_drafter(info, packed=packed)
    size = drafter_bytes(drafter, info, checkpoint)
    found = longest_contexts(settings, info, devices, drafters={} if size is None else {str(drafter): size})
    return [asdict(reach) for reach in found if reach.context]


def reach_words(fit: Mapping[str, Any]) -> str:
    drafter = f"with {fit['drafter']}" if fit["drafter"] else "no drafter"
    return f"one sequence of {fit['context']} tokens: keys and values in {fit['kv_dtype']}, {drafter}"


def planned_devices(settings: Settings) -> list[Device]:
    """Return the devices that the settings name or describe. The machine is not probed, so torch is not needed; `auto` counts as
    the CPU, and a CUDA device without an architecture as sm90."""
    found = [parse_device("cpu" if name == "auto" else name) for name in settings.device_names]
    return [replace(d, arch="sm90") if d.kind == "cuda" and not d.arch else d for d in found]


def identity(settings: Settings, checkpoint: Checkpoint, info: ModelInfo) -> dict[str, Any]:
    """Describe the model by the contents of its checkpoint."""
    spec = info.spec
    return {
        "model": settings.model,
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "fingerprint": checkpoint.fingerprint(),
        "architecture": spec.family,
        "parameters": spec.parameters,
        "hidden": spec.hidden,
        "vocabulary": spec.vocab,
        "context": spec.max_context,
        "tied_head": spec.tied,
        "layers": [{"count": count, **asdict(layer)} for layer, count in Counter(spec.layers).items()],
        "layers_in_words": [f"{count} × {in_words(layer)}" for layer, count in Counter(spec.layers).items()],
        "stored": dict(Counter(t.kind for t in checkpoint.tensors.values())),
        "defaults": info.defaults,
        "eos_ids": list(info.eos_ids),
        "tokenizer": tokenizer_kind(checkpoint),
        "not_used": list(spec.notes),
    }


def in_words(layer: LayerSpec) -> str:
    parts = [mixer_in_words(layer.mixer), feed_forward_in_words(layer.feed_forward)]
    if layer.parallel_experts is not None:
        parts.append(f"in parallel {feed_forward_in_words(layer.parallel_experts)}")
    if layer.inputs:
        parts.append(f"per-layer input ({layer.inputs} wide)")
    return " + ".join(parts) + (", norms before and after" if layer.sandwich else "") + (", scaled" if layer.scaled else "")


def mixer_in_words(mixer: AttentionSpec | DeltaSpec) -> str:
    match mixer:
        case DeltaSpec():
            heads = f"{mixer.key_heads} key heads {mixer.key_dim} wide, {mixer.value_heads} value heads {mixer.value_dim} wide"
            return f"Gated DeltaNet ({heads}, convolution over {mixer.conv})"
        case AttentionSpec():
            partial = f" over {mixer.rope.dims} of {mixer.head_dim}" if mixer.rope.dims != mixer.head_dim else ""
            kind = f" {mixer.rope.kind}" if mixer.rope.kind != "default" else ""
            parts = [
                f"{mixer.heads} heads, {mixer.kv_heads} for keys and values, {mixer.head_dim} wide",
                f"rope {mixer.rope.theta:g}{kind}{partial}",
                *([f"window {mixer.window}"] if mixer.window else []),
                *(["normed q and k" if mixer.reuses is None else "normed q"] if mixer.qk_norm else []),
                *(["normed v"] if mixer.v_norm and mixer.reuses is None else []),
                *(["values are keys before norm and rope"] if mixer.keys_as_values else []),
                *([f"{mixer.gate} gate per {mixer.gate_per}"] if mixer.gate else []),
                *([f"keys and values of layer {mixer.reuses}"] if mixer.reuses is not None else []),
            ]
            return f"attention ({', '.join(parts)})"
        case _:
            assert_never(mixer)


def feed_forward_in_words(feed_forward: MlpSpec | MoeSpec) -> str:
    match feed_forward:
        case MlpSpec():
            return f"feed-forward ({feed_forward.width} wide, {feed_forward.activation})"
        case MoeSpec():
            used = f"{feed_forward.used} of {feed_forward.experts} experts"
            text = f"{used} ({feed_forward.width} wide, {feed_forward.activation}, {feed_forward.scores} routing)"
            gated = ", gated" if feed_forward.shared_gate else ""
            return text + (f" and a shared expert ({feed_forward.shared} wide{gated})" if feed_forward.shared else "")
        case _:
            assert_never(feed_forward)


def tokenizer_kind(checkpoint: Checkpoint) -> str:
    """Name the kind of tokenizer by its metadata, without building it."""
    if checkpoint.format == "gguf":
        from onedraw.text.gguf_tokenizer import unsupported_reason

        kind, split = (checkpoint.config.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
        if kind is None:
            return "missing"
        reason = unsupported_reason(checkpoint.config)
        return f"{kind} in GGUF" + (f", split {split}" if split else "") + (f": {reason}" if reason else "")
    file = checkpoint.path / "tokenizer.json"
    if not file.is_file():
        return "missing: the folder has no tokenizer.json"
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return "unreadable: tokenizer.json is no JSON text"
    model = info.get("model") if isinstance(info, dict) else None
    if not isinstance(model, dict):
        return "unreadable: tokenizer.json names no model"
    return f"{model.get('type', 'unnamed')} in tokenizer.json"


def memory_json(plan: MemoryPlan, drafter: int) -> dict[str, Any]:
    """Return the memory plan as JSON. `drafter` is the number of bytes that a drafter needs in addition to the model."""
    return {
        **asdict(plan),
        "sequence_bytes": plan.sequence_bytes,
        "full_sequences": plan.full_sequences,
        "kv_bytes": plan.kv_bytes,
        "state_bytes": plan.lane_bytes * plan.max_batch,
        "rollback_bytes": plan.draft_positions * plan.draft_bytes,
        "checkpoints_bytes": plan.checkpoints * plan.checkpoint_bytes,
        "drafter_bytes": drafter,
        "total_bytes": plan.total_bytes + drafter,
    }


def stages_json(split: SplitPlan) -> list[dict[str, Any]]:
    return [{**asdict(stage), "total_bytes": stage.total_bytes} for stage in split.stages]


def stage_rows(stages: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Describe the layers and bytes of each pipeline stage, if there are several stages or the device's memory size is known."""
    if len(stages) == 1 and stages[0]["device"]["memory"] is None:
        return []
    kinds = ("weight", "page", "state", "staging")
    described = []
    for stage in stages:
        parts = ", ".join(f"{kind}s {human_bytes(stage[f'{kind}_bytes'])}" for kind in kinds if stage[f"{kind}_bytes"])
        room = "" if stage["device"]["memory"] is None else f" of {human_bytes(stage['device']['memory'])}"
        layers = f"layers {stage['start']}–{stage['stop'] - 1} in {stage['dtype']}"
        described.append([stage["device"]["name"], f"{layers}: {human_bytes(stage['total_bytes'])}{room} ({parts})"])
    return described


def kv_words(memory: Mapping[str, Any]) -> str:
    size = sum(group["page_bytes"] for group in memory["groups"]) // memory["page_size"]
    scales = ", with scales" if memory["kv_dtype"] in KV_QUANT_DTYPES else ""
    return f"{memory['kv_dtype']}: {human_bytes(size)} per position{scales}"


def page_words(group: Mapping[str, Any], page_size: int) -> str:
    size = human_bytes(group["pages"] * group["page_bytes"])
    seen = "" if group["window"] is None else f", of layers that see {group['window']} positions"
    return f"{size} ({group['pages']} × {human_bytes(group['page_bytes'])}, {page_size} positions each{seen})"


def state_rows(memory: Mapping[str, Any]) -> list[list[str]]:
    """Describe recurrent state, rollback buffer and checkpoints, as far as the model has them."""

    def row(name: str, total: str, count: str, size: str, what: str) -> list[str]:
        return [name, f"{human_bytes(memory[total])} ({memory[count]} {what} × {human_bytes(memory[size])})"]

    return [
        *([row("states", "state_bytes", "max_batch", "lane_bytes", "lanes")] if memory["lane_bytes"] else []),
        *([row("rollback", "rollback_bytes", "draft_positions", "draft_bytes", "drafts")] if memory["draft_positions"] else []),
        *([row("checkpoints", "checkpoints_bytes", "checkpoints", "checkpoint_bytes", "slots")] if memory["checkpoints"] else []),
    ]


def step_rows(scratch: Mapping[str, int] | None) -> list[list[str]]:
    """Describe the scratch memory that steps need on an accelerator, by purpose."""
    if scratch is None:
        return []
    names = {"opened": "dequantized weights", "parts": "partial sums of packed products", "recorded": "CUDA graphs"}
    parts = [f"{name} {human_bytes(scratch[key])}" for key, name in {"numbers": "activations", **names}.items() if scratch[key]]
    return [["steps", f"{human_bytes(sum(scratch.values()))} of scratch on each device ({', '.join(parts)})"]]


def holding_rows(holding: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Describe which matrices stay packed (in their quantized blocks), and why others are converted. `holding` has the
    storage plan of the weights for each dtype of matrix products."""
    rows = []
    for products, storage in holding.items():
        dtype, where = float_dtype(products), f" in {products}" if len(holding) > 1 else ""
        kept = ", ".join(f"{kind} × {count}" for kind, count in storage["kept"])
        rows.append(["packed", f"{kept}; norms and biases are {dtype}{where}"])
        rows += [["converted", f"{kind} × {count} to {dtype}: {why}{where}"] for kind, why, count in storage["converted"]]
    return rows


def rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Turn the report into the rows of a table."""
    memory = report["memory"]
    return [
        ["path", report["path"]],
        ["format", f"{report['format']}: " + ", ".join(f"{kind} × {count}" for kind, count in report["stored"].items())],
        ["fingerprint", report["fingerprint"]],
        ["architecture", report["architecture"]],
        ["parameters", f"{report['parameters']:,}"],
        *(["layers" if i == 0 else "", words] for i, words in enumerate(report["layers_in_words"])),
        ["hidden width", str(report["hidden"])],
        ["vocabulary", f"{report['vocabulary']}" + (", head tied to the embedding" if report["tied_head"] else "")],
        ["context", str(report["context"])],
        ["defaults", ", ".join(f"{k} {v}" for k, v in report["defaults"].items()) or "none"],
        ["end of reply", ", ".join(map(str, report["eos_ids"])) or "none"],
        ["tokenizer", report["tokenizer"]],
        ["drafts", ", ".join(report["drafts"]) or "none: --draft none"],
        [
            "weights",
            f"{human_bytes(memory['weight_bytes'])} as {' and '.join(dict.fromkeys(s['dtype'] for s in report['stages']))}",
        ],
        *holding_rows(report["holding"]),
        ["residual stream", report["activation_dtype"]],
        ["keys and values", kv_words(memory)],
        *(["pages" if i == 0 else "", page_words(group, memory["page_size"])] for i, group in enumerate(memory["groups"])),
        *state_rows(memory),
        ["room for", f"{memory['full_sequences']} sequences of {memory['max_context']} tokens, {memory['max_batch']} running"],
        *([["drafter", human_bytes(memory["drafter_bytes"])]] if memory["drafter_bytes"] else []),
        ["total", human_bytes(memory["total_bytes"])],
        *step_rows(report["turns"]),
        *(["fits" if i == 0 else "", reach_words(fit)] for i, fit in enumerate(report["fits"])),
        *(["compiled steps" if i == 0 else "", words] for i, words in enumerate(report["compiled_turns"])),
        *stage_rows(report["stages"]),
        *(["not used", note] for note in report["not_used"] or ["nothing"]),
    ]
