"""The dtype of recurrent state is checked before a backend is made."""

from __future__ import annotations

import pytest

from onedraw.backends.base import require_state_dtype
from onedraw.errors import BadSetting


@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_a_state_dtype_other_than_float32_is_rejected(dtype: str) -> None:
    require_state_dtype("f32")
    with pytest.raises(BadSetting, match=f"--state-dtype: {dtype} is not supported for the states of recurrent layers"):
        require_state_dtype(dtype)
