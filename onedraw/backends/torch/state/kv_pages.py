"""Keys and values of one layer in pages, and the place of each token in them.

In: the step's new keys and values. Out: page stores that attention reads. Allocated once, zeroed, with one scratch page more
than the allocator lends: padding tokens write there, and kernels read it, masked, past a sequence's end. Codes (int8, fp8,
int4) are keys and values divided by a scale; the scales are in pages of their own under the same numbers, and whatever moves a
page moves its scales too. A slot is a position within a page. Axes: T tokens, P pages, S slots of a page, K key heads of size D.

Keys and values of 4 bits are those of a Walsh-Hadamard transform of every head, which spreads a large number over the whole head,
so that one scale serves the whole head. Queries are transformed too, which leaves every score as it was. The output of attention
is transformed once more, which undoes the transform of the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from onedraw.errors import OutOfMemory
from onedraw.models.spec import AttentionSpec

INT4 = torch.uint8  # a byte has the 4-bit codes of two neighbouring numbers, the first in its lower half
# LARGEST: the largest magnitude of a code. SCALES: the largest magnitude of a head, divided by its scale. These dtypes have one
# scale per token and key head. Codes of 4 bits stand for the odd numbers from -15 to 15; the largest numbers of a head are
# clamped, by up to a tenth, which makes the error of all others smaller.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, INT4: 15.0}
SCALES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, INT4: 16.5}
KV_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": INT4,
}


def coded(dtype: torch.dtype) -> bool:
    """Whether pages of this dtype have scales."""
    return dtype in LARGEST


def transformed(heads: Tensor, *, kept: bool) -> Tensor:
    """The Walsh-Hadamard transform of heads [..., D], in float32, in blocks of the largest power of two that divides D.

    `kept`: whether the heads are keys or values, which are kept in pages, and not queries or outputs of attention. The product of
    a transformed query and a transformed key is that of query and key, which takes a factor of 2^-n for a block of 2^n numbers.
    Each gets about half of n as a power of two, which rounds nothing: rounded up for kept heads, and down for the others.
    """
    dim, x, half = heads.shape[-1], heads.float(), 1
    block = dim & -dim
    while half < block:
        first, second = x.view(*heads.shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack((first + second, first - second), -2)
        half *= 2
    exponent = block.bit_length() - 1
    return x.view(heads.shape) * 2.0 ** -((exponent + 1) // 2 if kept else exponent // 2)


def encode(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize heads of finite numbers [..., D]: their codes [..., D], of 4 bits [..., D / 2]; and their scales [...]. Ties go to
    the even code. For 4-bit codes `heads` must be transformed already."""
    wide, largest = heads.float(), LARGEST[dtype]
    scales = wide.abs().amax(-1) / SCALES[dtype]
    ratios = torch.where(scales.unsqueeze(-1) > 0, wide / scales.unsqueeze(-1), 0.0).clamp_(-largest, largest)
    if dtype == INT4:
        codes = ratios.add_(largest).mul_(0.5).round_().to(torch.uint8)
        return codes[..., 0::2] | codes[..., 1::2] << 4, scales
    return (ratios.round_() if dtype == torch.int8 else ratios).to(dtype), scales


def code_values(codes: Tensor) -> Tensor:
    """The numbers that codes stand for, before they are multiplied by their scale: of 4-bit codes [..., D / 2], numbers
    [..., D]."""
    if codes.dtype != INT4:
        return codes
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) * 2 - 15


def bits(store: Tensor) -> Tensor:
    """The same memory in a dtype that every torch operation can move, because few operations support fp8."""
    return store.view(torch.uint8) if store.dtype == torch.float8_e4m3fn else store


class PageStore:
    """Keys and values of one layer, each [P * K, S * D] with a row per page and head (S * D / 2 bytes of 4-bit codes); and scales
    of codes, [P * K, S]."""

    def __init__(self, spec: AttentionSpec, *, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        rows = (pages + 1) * spec.kv_heads
        self.width = spec.head_dim // 2 if dtype == INT4 else spec.head_dim  # elements of the stores for one head
        shape = (rows, page_size * self.width)
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None
        if rows * page_size >= 2**31:  # a slot number would not fit into the 32 bits that kernels use
            raise OutOfMemory(
                f"{pages} pages of {page_size} positions exceed the 32-bit slot numbers of one layer; lower --kv-memory"
            )
        try:
            self.keys, self.values = zeros(shape, dtype, device), zeros(shape, dtype, device)
            if coded(dtype):
                self.key_scales, self.value_scales = (zeros((rows, page_size), torch.float32, device) for _ in range(2))
        except (RuntimeError, MemoryError):  # torch raises these when memory is exhausted
            raise OutOfMemory(
                f"{pages} pages of {page_size} positions do not fit into the memory of {device}; "
                f"lower --kv-memory, --max-context or --max-batch"
            ) from None
        self._page_size, self._heads = page_size, spec.kv_heads

    @property
    def transforms(self) -> bool:
        """Whether heads are transformed (`transformed`) before they are quantized."""
        return self.keys.dtype == INT4

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """Scales of keys and of values; None unless keys and values are codes."""
        return None if self.key_scales is None or self.value_scales is None else (self.key_scales, self.value_scales)

    def parts(self) -> dict[str, Tensor]:
        """The store's tensors by name, viewed page by page: keys and values [P, K, S * D], scales [P, K, S]."""
        named = {"keys": self.keys, "values": self.values, "key_scales": self.key_scales, "value_scales": self.value_scales}
        return {name: bits(x).view(-1, self._heads, x.shape[1]) for name, x in named.items() if x is not None}

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        for part in self.parts().values():
            part[targets] = part[sources]

    def read(self, pages: Sequence[int]) -> dict[str, Tensor]:
        """Copies on the host of these pages, of every tensor in `parts`."""
        return {name: part[list(pages)].cpu() for name, part in self.parts().items()}

    def fill(self, places: Mapping[int, int], given: Mapping[str, Tensor]) -> None:
        """Copy stored pages to pages here. `places`: from the index of a stored page to the page that receives it. `given`: the
        stored pages, named as in `parts`. A stored dtype of the same size is reinterpreted bit by bit."""
        for name, part in self.parts().items():
            stored_part = given[name]
            if stored_part.shape[1:] != part.shape[1:] or stored_part.dtype.itemsize != part.dtype.itemsize:
                raise ValueError(f"{name}: pages of {tuple(stored_part.shape[1:])}, not of {tuple(part.shape[1:])}")
            own = stored_part.view(part.dtype)
            for stored, here, count in _runs(places):
                part[here : here + count].copy_(own[stored : stored + count])

    def move(self, table: Tensor) -> None:
        """Copy keys and values from slots to other slots. Rows of the table are (from page, from slot, to page, to slot); all are
        read before any is written."""
        from_page, from_slot, to_page, to_slot = table.unbind(1)
        for part in self.parts().values():
            slots = part.view(len(part), self._heads, self._page_size, -1)
            slots[to_page, :, to_slot] = slots[from_page, :, from_slot]

    def write(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """Write keys and values [T, K, D] to places [T * K], which `write_places` returned.

        A value that is not finite is stored as a key of NaN and a value of zero: a query that sees the key gets NaN, and one
        that does not (a neighbour in a tile, the next owner of the page) is not affected, since zero times zero is zero. If keys
        are codes, the key's scale becomes NaN instead, also if only the key is not finite.
        """
        if self.key_scales is not None and self.value_scales is not None:
            if self.transforms:
                keys, values = transformed(keys, kept=True), transformed(values, kept=True)
            sound = (torch.isfinite(keys) & torch.isfinite(values)).all(-1)
            for given, store, scales in ((keys, self.keys, self.key_scales), (values, self.values, self.value_scales)):
                codes, found = encode(given.masked_fill(~sound.unsqueeze(-1), 0.0), store.dtype)
                found = found.masked_fill(~sound, torch.nan) if store is self.keys else found
                self._put(bits(store), bits(codes), places)
                scales.view(-1).index_copy_(0, places, found.reshape(-1))
            return
        keys, values = keys.to(self.keys.dtype), values.to(self.values.dtype)
        broken = torch.isfinite(values).all(-1, keepdim=True).logical_not_()
        self._put(self.keys, keys.masked_fill(broken, torch.nan), places)
        self._put(self.values, values.masked_fill(broken, 0.0), places)

    def _put(self, store: Tensor, heads: Tensor, places: Tensor) -> None:
        store.view(-1, self.width).index_copy_(0, places, heads.reshape(-1, self.width))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU its memory is untouched pages of the system, which take no time and no memory before they are
    written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return torch.from_numpy(raw).view(dtype)


def write_places(pages: Tensor, slots: Tensor, *, kv_heads: int, page_size: int) -> Tensor:
    """The place of each token and head, [T * K]: its index in a store viewed as vectors of one slot and head, [P * K * S, D]."""
    heads = torch.arange(kv_heads, device=pages.device)
    return ((pages[:, None] * kv_heads + heads) * page_size + slots[:, None]).reshape(-1)


def _runs(places: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Runs of consecutive keys with consecutive values, each copied at once: (first key, first value, count)."""
    runs: list[tuple[int, int, int]] = []
    for key, value in sorted(places.items()):
        if runs and (key, value) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((key, value, 1))
    return runs
