"""Under the Triton interpreter, `tl.dot` adds its products in one fixed order.

The interpreter computes `tl.dot` by numpy's matrix product, whose rounding may depend on the number of rows, because BLAS picks a
kernel by processor and shape. A tensor core's does not, so tests that compare bits across tile heights need this.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    library_dot = interpreter.InterpreterBuilder.create_dot

    def fixed_order_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        """a [M, K] times b [K, N] plus d, each output summed over K from first to last (in C order: no pairwise sums)."""
        if any(handle.dtype.primitive_bitwidth == 8 and handle.dtype.is_floating() for handle in (a, b)):
            return library_dot(self, a, b, d, input_precision, max_num_imprecise_acc)  # converts fp8 first
        left, right = (np.asarray(handle.data, dtype=d.data.dtype) for handle in (a, b))
        products = np.multiply(left[..., :, :, None], right[..., None, :, :], order="C")  # [M, K, N]
        return interpreter.TensorHandle(np.add.reduce(products, axis=-2) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = fixed_order_dot
