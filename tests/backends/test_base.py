"""The dtype of recurrent state is checked when a backend is made."""

from __future__ import annotations

import pytest

from onedraw.backends.base import require_state_dtype
from onedraw.backends.fake import FakeBackend
from onedraw.errors import BadSetting


@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_a_state_dtype_other_than_float32_is_rejected_with_dtype_and_buffer(dtype: str) -> None:
    with pytest.raises(BadSetting, match=f"--state-dtype: {dtype} is not supported for the delta state"):
        require_state_dtype(dtype, "delta state")


def test_a_backend_checks_the_state_dtype_when_it_is_made() -> None:
    FakeBackend(recurrent=True, state_dtype="f32")
    with pytest.raises(BadSetting, match="f16 is not supported for the recurrent state of the fake backend"):
        FakeBackend(recurrent=True, state_dtype="f16")
