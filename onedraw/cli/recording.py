"""The options of `--record`, the same for every command that can record.

In: parsed arguments and a door. Out: the door, recording where that was asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from onedraw.cli.flags import argument_type
from onedraw.errors import BadSetting
from onedraw.settings import size_in_bytes

if TYPE_CHECKING:
    from onedraw.door import Door


def add_record(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recording, off unless a folder is named")
    group.add_argument(
        "--record",
        type=Path,
        metavar="FOLDER",
        help="append every finished request there (seed, parameters, token ids of prompt and reply), for `onedraw replay`",
    )
    group.add_argument(
        "--record-size",
        type=argument_type(size_in_bytes),
        metavar="SIZE",
        help="begin a new file when one would grow over this (default: 64MiB)",
    )
    group.add_argument("--record-text", action="store_true", help="also write prompt and reply as text")


def recorded(door: Door, arguments: argparse.Namespace) -> Door:
    """The door, which writes down what it answers if --record says so."""
    from onedraw.record import DEFAULT_SIZE, Recorder, RecordingDoor

    if arguments.record is None:
        for name in ("record_size", "record_text"):
            if getattr(arguments, name):
                raise BadSetting(f"--{name.replace('_', '-')}: only with --record")
        return door
    size = DEFAULT_SIZE if arguments.record_size is None else arguments.record_size
    if size < 1:
        raise BadSetting(f"--record-size: must be at least 1 byte, not {size}")
    path = Path(arguments.model)
    source = str(path.resolve()) if path.exists() else arguments.model
    return RecordingDoor(door, Recorder(arguments.record, size=size), source=source, text=arguments.record_text)
