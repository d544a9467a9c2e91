"""Dequantizes GGUF blocks and other stored types to float32, in numpy.

In: the raw bytes of a tensor and the name of its type. Out: float32 values, written into a given array. Common types are
implemented here; the `gguf` package, if installed, handles the rarer ones (IQ, TQ).

A quantized row is a sequence of blocks, each `block_values` values in `block_bytes` bytes; a value depends on its block alone.
Blocks are processed in chunks that fit a core's cache, by a few threads (numpy releases the GIL). A code is the stored integer of
a value; a min is an offset that values of a block share. A nibble is four bits. Axis: n blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from onedraw.errors import UnsupportedModel

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Unpack = Callable[[Bytes, Floats], None]  # fills out [n, block_values] from [n, block_bytes]

RUN_VALUES = 1 << 17  # values of one chunk: 512 KiB of float32, which fits a core's L2 cache
THREAD_VALUES = 1 << 18  # fewest values for which another thread is used
THREAD_BYTES = 1 << 19  # fewest bytes for which another thread is used, if they are only copied
MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class QuantType:
    """A storage type: quantized blocks, or plain numbers as blocks of one value."""

    name: str
    block_values: int
    block_bytes: int
    ggml_type: int | None = None  # its number in GGUF files; None for types of safetensors only
    unpack: Unpack | None = None  # the function that dequantizes blocks; None if it is not implemented here
    in_gguf_package: bool = False  # whether the gguf package can dequantize it


# ------------------------------------------------------------------ implementations


def _fp16(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)  # [n, 1]


def _nibbles(packed: Bytes, out: Floats) -> None:
    """Split the bytes of `packed` into nibbles: the low ones fill the first half of `out`, the high ones the second. If packed is
    [..., m], out is [..., 2m]."""
    dense = np.ascontiguousarray(packed)
    middle = dense.shape[-1]
    out[..., :middle] = dense & 15
    out[..., middle:] = dense >> 4


def _add_bits(bits: Bytes, weight: float, out: Floats) -> None:
    """Add `weight` where a bit is set; bit j of byte i belongs to value 8i + j."""
    out += np.unpackbits(np.ascontiguousarray(bits), axis=-1, bitorder="little") * np.float32(weight)


def _f32(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    wide = out.view(np.uint32)
    wide[...] = blocks.view("<u2")
    wide <<= 16


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[...] = np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    out *= _fp16(blocks, 0)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _fp16(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _fp16(blocks, 0)
    out += _fp16(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 6:], out)
    _add_bits(blocks[:, 2:6], 16, out)
    out -= 16
    out *= _fp16(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 8:], out)
    _add_bits(blocks[:, 4:8], 16, out)
    out *= _fp16(blocks, 0)
    out += _fp16(blocks, 2)


def _q2_k(blocks: Bytes, out: Floats) -> None:
    """A block has 16 bytes of (min << 4 | scale), 64 of codes, a fp16 scale and a fp16 min. Sixteen values share a scale and a
    min."""
    scales = blocks[:, :16]
    values = out.reshape(-1, 16, 16)
    _two_bit_codes(blocks[:, 16:80], out)
    values *= (_fp16(blocks, 80) * (scales & 15))[:, :, None]
    values -= (_fp16(blocks, 82) * (scales >> 4))[:, :, None]


def _q3_k(blocks: Bytes, out: Floats) -> None:
    """A block has 32 bytes of high bits (a clear bit subtracts 4), 64 of codes, 12 of scales, and a fp16 scale."""
    values = out.reshape(-1, 8, 32)
    _two_bit_codes(blocks[:, 32:96], out)
    high = np.ascontiguousarray(blocks[:, :32])
    for part in range(8):
        values[:, part] -= (~high >> part & 1) << 2
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)  # [n, 16]
    top = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (low | top << 4).astype(np.float32) - 32
    out.reshape(-1, 16, 16)[...] *= (_fp16(blocks, 108) * scales)[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    """A block has a fp16 scale, a fp16 min, 12 bytes of scales and mins, and 128 of codes. 32 values share a scale and a min."""
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    _scale_and_min(blocks, out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    """Q4_K with 32 bytes of fifth bits before the codes: bit p of byte l belongs to value l of part p."""
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    values = out.reshape(-1, 8, 32)
    high = np.ascontiguousarray(blocks[:, 16:48])
    for part in range(8):
        values[:, part] += (high >> part & 1) << 4
    _scale_and_min(blocks, out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    """A block has 128 bytes of low nibbles, 64 of high two-bit codes, 16 signed scales, and a fp16 scale. Sixteen values share a
    scale."""
    low = np.ascontiguousarray(blocks[:, :128]).reshape(-1, 2, 64)
    high = np.ascontiguousarray(blocks[:, 128:192]).reshape(-1, 2, 32)
    values = out.reshape(-1, 2, 4, 32)
    for part in range(4):
        nibble = low[:, :, 32 * (part % 2) : 32 * (part % 2) + 32] >> 4 * (part // 2) & 15
        values[:, :, part] = nibble | (high >> 2 * part & 3) << 4
    out -= 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    out.reshape(-1, 16, 16)[...] *= (_fp16(blocks, 208) * scales)[:, :, None]


_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice the value of each FP4 code


def _mxfp4(blocks: Bytes, out: Floats) -> None:
    """A block has a byte with an exponent (E8M0) and 16 bytes of 4-bit floats (E2M1). The 128 below is the exponent's bias, 127,
    and 1 for the doubled values of _E2M1."""
    codes = np.ascontiguousarray(blocks[:, 1:])
    out[:, :16] = _E2M1[codes & 15]
    out[:, 16:] = _E2M1[codes >> 4]
    out *= np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)


def _e4m3_table() -> Floats:
    """Half the value of each E4M3 scale of NVFP4 (the other factor of 2 is in _E2M1); 0x7F (NaN) becomes 0."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    values: Floats = np.zeros(256, np.float32)
    values[:] = np.where(exponents == 0, np.ldexp(mantissas, -9), np.ldexp(1 + mantissas / 8, exponents - 7)) / 2
    values[0x7F] = 0
    return values


_HALF_E4M3 = _e4m3_table()


def _nvfp4(blocks: Bytes, out: Floats) -> None:
    """A block has four 8-bit scales (E4M3) and 32 bytes of 4-bit floats (E2M1). Sixteen values (eight bytes) share a scale."""
    codes = np.ascontiguousarray(blocks[:, 4:]).reshape(-1, 4, 8)
    values = out.reshape(-1, 4, 16)
    values[:, :, :8] = _E2M1[codes & 15]
    values[:, :, 8:] = _E2M1[codes >> 4]
    values *= _HALF_E4M3[blocks[:, :4]][:, :, None]


def _two_bit_codes(packed: Bytes, out: Floats) -> None:
    """Two-bit codes: 32 bytes hold 128 values, value 32j + l in bits 2j of byte l."""
    dense = np.ascontiguousarray(packed).reshape(-1, 2, 32)
    values = out.reshape(-1, 2, 4, 32)
    for part in range(4):
        values[:, :, part] = dense >> 2 * part & 3


def _scale_and_min(blocks: Bytes, out: Floats) -> None:
    """Apply the scales and mins of Q4_K and Q5_K: eight of six bits each, in bytes 4 to 16."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)  # [n, 8]
    mins = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    values = out.reshape(-1, 8, 32)
    values *= (_fp16(blocks, 0) * scales)[:, :, None]
    values -= (_fp16(blocks, 2) * mins)[:, :, None]


# ------------------------------------------------------------------ table of types

QUANT_TYPES: dict[str, QuantType] = {
    kind.name: kind
    for kind in (
        QuantType("F32", 1, 4, 0, _f32),
        QuantType("F16", 1, 2, 1, _f16),
        QuantType("BF16", 1, 2, 30, _bf16),
        QuantType("Q4_0", 32, 18, 2, _q4_0),
        QuantType("Q4_1", 32, 20, 3, _q4_1),
        QuantType("Q5_0", 32, 22, 6, _q5_0),
        QuantType("Q5_1", 32, 24, 7, _q5_1),
        QuantType("Q8_0", 32, 34, 8, _q8_0),
        QuantType("Q2_K", 256, 84, 10, _q2_k),
        QuantType("Q3_K", 256, 110, 11, _q3_k),
        QuantType("Q4_K", 256, 144, 12, _q4_k),
        QuantType("Q5_K", 256, 176, 13, _q5_k),
        QuantType("Q6_K", 256, 210, 14, _q6_k),
        QuantType("IQ2_XXS", 256, 66, 16, in_gguf_package=True),
        QuantType("IQ2_XS", 256, 74, 17, in_gguf_package=True),
        QuantType("IQ3_XXS", 256, 98, 18, in_gguf_package=True),
        QuantType("IQ1_S", 256, 50, 19, in_gguf_package=True),
        QuantType("IQ4_NL", 32, 18, 20, in_gguf_package=True),
        QuantType("IQ3_S", 256, 110, 21, in_gguf_package=True),
        QuantType("IQ2_S", 256, 82, 22, in_gguf_package=True),
        QuantType("IQ4_XS", 256, 136, 23, in_gguf_package=True),
        QuantType("IQ1_M", 256, 56, 29, in_gguf_package=True),
        QuantType("TQ1_0", 256, 54, 34, in_gguf_package=True),
        QuantType("TQ2_0", 256, 66, 35, in_gguf_package=True),
        QuantType("MXFP4", 32, 17, 39, _mxfp4),
        QuantType("NVFP4", 64, 36, 40, _nvfp4),  # a factor per matrix is in a separate tensor: see `gguf.py`
        # Not readable as weights, but valid in a header: the file is refused only if such a tensor is needed.
        QuantType("Q8_1", 32, 40, 9),
        QuantType("Q8_K", 256, 292, 15),
        QuantType("I8", 1, 1, 24),
        QuantType("I16", 1, 2, 25),
        QuantType("I32", 1, 4, 26),
        QuantType("I64", 1, 8, 27),
        QuantType("F64", 1, 8, 28),
        QuantType("U8", 1, 1),
        QuantType("U16", 1, 2),
        QuantType("U32", 1, 4),
        QuantType("U64", 1, 8),
        QuantType("BOOL", 1, 1),
        QuantType("F8_E4M3", 1, 1),
        QuantType("F8_E5M2", 1, 1),
        QuantType("F8_E8M0", 1, 1),
    )
}
QUANT_TYPE_BY_GGML_TYPE: dict[int, QuantType] = {
    kind.ggml_type: kind for kind in QUANT_TYPES.values() if kind.ggml_type is not None
}
BUILT_IN_TYPES: tuple[str, ...] = tuple(name for name, kind in QUANT_TYPES.items() if kind.unpack is not None)


# ------------------------------------------------------------------ dequantization


def dequantize_into(raw: Bytes, kind: str, out: Floats, *, tensor: str = "") -> None:
    """Write the values of `raw` into `out` (C order, float32, as many values as `raw` holds).

    `tensor` is named in the error if this type cannot be read.
    """
    quant = QUANT_TYPES[kind]
    unpack = unpacker(kind, tensor)
    blocks = raw.reshape(-1, quant.block_bytes)
    if not out.flags.c_contiguous or out.dtype != np.float32 or out.size != len(blocks) * quant.block_values:
        raise ValueError(f"out must be {len(blocks) * quant.block_values} float32 values in C order, not {out.dtype} {out.shape}")
    if quant.block_values == 1:  # process plain numbers as flat arrays, not one number per block
        unpack = _flat(unpack)
    values = out.reshape(-1, quant.block_values)
    shares = max(1, min(_threads(), out.size // THREAD_VALUES))
    edges = [len(blocks) * i // shares for i in range(shares + 1)]
    work = [(blocks[start:stop], values[start:stop]) for start, stop in pairwise(edges)]
    futures = [_pool().submit(_run, unpack, *share) for share in work[1:]]
    _run(unpack, *work[0])
    for future in futures:
        future.result()


def copy_rows(raw: Bytes, out: Bytes) -> None:
    """Copy the rows `raw` to out [n, bytes] by a few threads: most of the time goes into page faults of the mapped file."""
    shares = max(1, min(_threads(), raw.size // THREAD_BYTES))
    edges = [len(raw) * i // shares for i in range(shares + 1)]
    spans = [slice(start, stop) for start, stop in pairwise(edges)]
    futures = [_pool().submit(np.copyto, out[span], raw[span]) for span in spans[1:]]
    np.copyto(out[spans[0]], raw[spans[0]])
    for future in futures:
        future.result()


def unpacker(kind: str, tensor: str = "") -> Unpack:
    """The function that dequantizes this type; UnsupportedModel, naming type and tensor, if there is none."""
    return QUANT_TYPES[kind].unpack or _gguf_package_unpacker(QUANT_TYPES[kind], tensor)


def _run(unpack: Unpack, blocks: Bytes, out: Floats) -> None:
    step = max(1, RUN_VALUES // out.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):  # NaN in the file is kept without a warning
        for start in range(0, len(blocks), step):
            unpack(blocks[start : start + step], out[start : start + step])


def _flat(unpack: Unpack) -> Unpack:
    return lambda blocks, out: unpack(blocks.reshape(-1), out.reshape(-1))


def _gguf_package_unpacker(kind: QuantType, tensor: str) -> Unpack:
    """Dequantization by the gguf package."""
    where = f"tensor {tensor}: " if tensor else ""
    if not kind.in_gguf_package:
        raise UnsupportedModel(f"{where}type {kind.name} cannot be read as weights; supported: {', '.join(BUILT_IN_TYPES)}")
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise UnsupportedModel(
            f"{where}type {kind.name} needs the gguf package: pip install 'onedraw[models]'; "
            f"without it these types are supported: {', '.join(BUILT_IN_TYPES)}"
        ) from None
    code = GGMLQuantizationType[kind.name]

    def unpack(blocks: Bytes, out: Floats) -> None:
        out[...] = dequantize(blocks, code)

    return unpack


def _threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="onedraw-unpack")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
