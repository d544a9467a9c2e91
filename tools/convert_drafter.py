"""Convert the folder of a DFlash drafter to one GGUF file of architecture `dflash`, in the layout of llama.cpp's converter.

    python tools/convert_drafter.py FOLDER OUT.gguf [--kind Q8_0] [--name NAME] [--license SPDX]

In: a drafter in the z-lab or speculators layout. Out: matrices quantized as --kind (as F16 if the row length is not a multiple of
the block size), norms in F32. The file has no tokenizer, since the drafter uses that of the target, so it stores the vocabulary
size. Needs the `gguf` package.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

from onedraw.checkpoints.open import open_checkpoint
from onedraw.errors import UnsupportedModel
from onedraw.models.dflash import DRAFTER_WEIGHT_NAMES, DrafterInfo, read_drafter_info
from onedraw.models.spec import DrafterSpec

KINDS = {"Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "F16": gguf.LlamaFileType.MOSTLY_F16, "F32": gguf.LlamaFileType.ALL_F32}


def convert(folder: Path, out: Path, *, kind: str = "Q8_0", name: str = "", license_name: str = "") -> DrafterSpec:
    drafter = read_drafter_info(open_checkpoint(folder))
    refuse_unwritable(drafter.spec)
    writer = gguf.GGUFWriter(str(out), "dflash")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name or folder.name)
    if license_name:
        writer.add_license(license_name)
    writer.add_file_type(KINDS[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_keys(writer, drafter.spec)
    write_tensors(writer, drafter, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return drafter.spec


def refuse_unwritable(spec: DrafterSpec) -> None:
    """Refuse a drafter with properties that the GGUF layout cannot express."""
    if any(layer.attention.rope.kind != "default" for layer in spec.layers):
        raise UnsupportedModel("cannot convert this drafter: the GGUF layout of DFlash has no key for scaled rotary positions")
    if spec.causal_in_block != tuple(layer.attention.window is not None for layer in spec.layers):
        raise UnsupportedModel(
            "cannot convert this drafter: in GGUF exactly the layers with a sliding window are causal within the block"
        )


def write_keys(writer: gguf.GGUFWriter, spec: DrafterSpec) -> None:
    mixers = [layer.attention for layer in spec.layers]
    writer.add_block_count(len(spec.layers))
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.layers[0].feed_forward.width)
    writer.add_head_count(mixers[0].heads)
    writer.add_head_count_kv(mixers[0].kv_heads)
    writer.add_key_length(mixers[0].head_dim)
    writer.add_value_length(mixers[0].head_dim)
    writer.add_rope_freq_base(mixers[0].rope.theta)
    writer.add_layer_norm_rms_eps(spec.eps)
    writer.add_vocab_size(spec.vocab)
    writer.add_uint32("dflash.block_size", spec.block)
    writer.add_array("dflash.target_layers", [index + 1 for index in spec.target_layers])
    writer.add_uint32("tokenizer.ggml.mask_token_id", spec.mask_token)
    windows = [mixer.window for mixer in mixers]
    if any(windows):
        writer.add_sliding_window(max(window for window in windows if window))
        writer.add_array("dflash.attention.sliding_window_pattern", [window is not None for window in windows])


def write_tensors(writer: gguf.GGUFWriter, drafter: DrafterInfo, kind: str) -> None:
    rules = DRAFTER_WEIGHT_NAMES["gguf"]
    for weight, values in drafter.weights.outer().items():
        write_tensor(writer, rules.stored_name((None, weight)), values, kind)
    for index in range(len(drafter.spec.layers)):
        for weight, values in drafter.weights.layer(index).items():
            write_tensor(writer, rules.stored_name((index, weight)), values, kind)
    target_ids = drafter.weights.target_ids()
    if target_ids is not None:
        writer.add_tensor(rules.outer["d2t"], target_ids)


def write_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    if values.ndim == 1:
        kind = "F32"
    elif values.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
        kind = "F16"
    packing = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(values, packing), raw_dtype=packing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=tuple(KINDS), default="Q8_0")
    parser.add_argument("--name", default="", help="name stored in the file (default: the name of the folder)")
    parser.add_argument("--license", default="", help="SPDX identifier of the license, stored in the file")
    options = parser.parse_args()
    spec = convert(options.folder, options.out, kind=options.kind, name=options.name, license_name=options.license)
    print(f"{options.out}: {spec.parameters:,} parameters, {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
