"""Which positions of a prompt are worth a checkpoint. A pure function of numbers; it can change no token.

In: lengths. Out: positions, the most useful first. The end of the prompt serves whoever asks for exactly this prompt
again. Where there is recurrent state, the last chunk boundary serves the next turn of the conversation, the boundary
before this prompt leaves a prefix the index knows serves everybody who shares that prefix, and one every so many chunks
serves who leaves a long prompt somewhere in the middle.
"""

from __future__ import annotations

INTERVAL = 8  # chunks between the checkpoints of a long prompt, at least
SHARE = 4  # one prompt's middle takes at most this part of the slots


def save_points(*, prompt: int, start: int, shared: int, chunk: int, recurrent: bool, slots: int) -> tuple[int, ...]:
    """Positions past `start`, where the prompt is resumed. `shared`: how much of it the index knows."""
    wanted = [prompt]
    if recurrent:
        wanted += [prompt - prompt % chunk, shared - shared % chunk]
        wanted += _regular(prompt, chunk=chunk, most=slots // SHARE)
    useful = (position for position in dict.fromkeys(wanted) if start < position <= prompt)
    return tuple(useful)[:slots]


def _regular(prompt: int, *, chunk: int, most: int) -> range:
    """At most `most` positions at equal distances, latest first. Distances double, so that prompts of different lengths
    save at the same places."""
    distance = INTERVAL * chunk
    while most and prompt // distance > most:
        distance *= 2
    return range(prompt - prompt % distance, 0, -distance) if most else range(0)
