"""A drafter reads the outputs of the target layers that its config lists, in that order, also if a layer is listed twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onedraw
from onedraw.backends.torch.drafters.dflash import DflashDrafter
from tests.support import tiny, tiny_drafters

WIDTH = 64  # of the target's residual stream


def features(folder: Path, ids: tuple[int, ...], dtype: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Tensor]:
    """Return the tokens of a reply and the features [T, n] that the drafter wrote to its context."""
    seen: list[Tensor] = []
    remember = DflashDrafter._write_context

    def recording(self: Any, *args: Any) -> None:
        real = self._fc
        self._fc = lambda x: (seen.append(x.clone()), real(x))[1]
        remember(self, *args)
        self._fc = real

    drafter = tiny_drafters.write(folder / str(ids), tiny_drafters.zlab_config(2, ids=ids), tiny_drafters.tensors(2))
    with monkeypatch.context() as patch:
        patch.setattr(DflashDrafter, "_write_context", recording)
        with onedraw.load(str(folder / "target"), draft=str(drafter), draft_tokens=4, dtype=dtype, self_check=False) as model:
            reply = model.generate([5, 6, 7, 8], seed=3, max_tokens=8, ignore_eos=True)
    assert not isinstance(reply, list)
    return [choice.token for choice in reply.tokens], seen[0]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_features_are_in_the_drafters_order(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_safetensors("llama", tmp_path / "target")
    tokens, forth = features(tmp_path, (0, 2), dtype, monkeypatch)
    assert forth.shape[1] == 2 * WIDTH
    first, second = forth[:, :WIDTH], forth[:, WIDTH:]
    assert not torch.equal(first, second)
    for ids, expected in (((2, 0), (second, first)), ((2, 2), (second, second))):
        same, found = features(tmp_path, ids, dtype, monkeypatch)
        assert same == tokens
        assert torch.equal(found, torch.cat(expected, 1))
