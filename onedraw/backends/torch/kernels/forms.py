"""Ways to compute the same bits on a GPU, of which a device says which is fastest (`bench/gpu_trees.py`).

In: nothing. Out: Forms, which `TritonOps` is made with. No field changes a result; `TODAY` is what was measured last.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forms:
    group: int = 0  # splits of attention that are merged at once; 0: one after the other, through shared memory
    height: int = 128  # rows of a tile that nodes of a tree share, at most: low ones read keys more often, two at a time
    stages: int = 3  # blocks of keys that a high tile of attention has in shared memory at once, at most
    early: bool = False  # a high tile takes the scores of a block while it weighs the values of the one before it
    apart: bool = False  # nodes of a tree that would fill little of a high tile are read in a low one
    strands: int = 1  # branches of a tree that a program of the delta steps walks side by side


TODAY = Forms()
