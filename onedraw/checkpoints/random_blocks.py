"""Random blocks of the packed kinds: weights without a file, as GGUF has them.

In: a kind, a shape and the size of values. Out: stored rows, whose codes are random and whose values have about that size.
"""

from __future__ import annotations

import numpy as np

from onedraw.checkpoints.quants import KINDS, Bytes


def random_blocks(kind: str, rows: int, width: int, rng: np.random.Generator, size: float = 1.0) -> Bytes:
    """Rows of random codes whose values have about this size: [rows, bytes]."""
    packing = KINDS[kind]
    if packing.values == 1:
        values = (rng.standard_normal((rows, width)) * size).astype(np.float32)
        made = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype(np.uint16)}[kind]
        return np.ascontiguousarray(made).view(np.uint8)
    blocks = rng.integers(0, 256, (rows * width // packing.values, packing.size), dtype=np.uint8)
    count = len(blocks)

    def put(at: int, typical: float) -> None:
        drawn = typical * rng.uniform(0.5, 1.5, (count, 1))
        blocks[:, at : at + 2] = np.ascontiguousarray(drawn.astype(np.float16)).view(np.uint8)

    match kind:
        case "Q4_0" | "Q5_0" | "Q8_0":
            put(0, size / {"Q4_0": 4.6, "Q5_0": 9.2, "Q8_0": 74}[kind])
        case "Q4_1" | "Q5_1":
            step = size / (4.6 if kind == "Q4_1" else 9.2)
            put(0, step)
            put(2, -step * (7.5 if kind == "Q4_1" else 15.5))
        case "Q4_K" | "Q5_K":  # scales and minima of six bits, 31 on average
            step = size / (4.6 if kind == "Q4_K" else 9.2) / 31
            put(0, step)
            put(2, step * (7.5 if kind == "Q4_K" else 15.5))
        case "Q3_K":
            put(108, size / 100)
        case "Q6_K":  # signed scales of eight bits
            put(208, size / 18.5 / 74)
        case "NVFP4":  # scales that are tiny floats, the nearest above what is wanted
            sizes = np.array(
                [np.ldexp(code & 7, -9) if code < 8 else np.ldexp(8 + (code & 7), (code >> 3) - 10) for code in range(127)]
            )
            blocks[:, :4] = np.minimum(np.searchsorted(sizes, size / 3 * rng.uniform(0.5, 1.5, (count, 4))), 126)
        case "MXFP4":  # an exponent with a bias of 127; codes up to six, three on average
            blocks[:, 0] = 127 + round(np.log2(size / 3)) + rng.integers(-1, 2, count)
    return blocks.reshape(rows, -1)
