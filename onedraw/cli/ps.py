"""`onedraw ps`: the servers of this user that run on this machine.

Every `onedraw serve` holds a locked file in the cache folder while it serves. A file without a lock is left from a server that
was killed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from onedraw.cli import terminal
from onedraw.cli.flags import add_cache_dir
from onedraw.settings import Settings

HELP = "list the servers that run on this machine"
EXAMPLES = """examples:
  onedraw ps
  onedraw ps --json
"""
FOLDER = "servers"  # the folder of the locked files, inside the cache folder
FACTS = {"pid", "model", "device", "url", "started"}  # fields that the JSON object in every file has


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_cache_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    servers = running_servers(Settings.of(cache_dir=arguments.cache_dir).cache_folder)
    if arguments.json:
        terminal.print_json({"servers": servers})
    else:
        rows = [
            (str(s["pid"]), s["model"], s["device"], s["url"], f"{(time.time() - s['started']) / 60:.0f} min") for s in servers
        ]
        terminal.table("", ("pid", "model", "device", "url", "since"), rows)
    return 0


@contextmanager
def registered(cache_dir: Path, **facts: Any) -> Iterator[None]:
    """Keep this server in the list while the `with` block runs. If the folder cannot be written, the server runs all the same and
    is not listed."""
    # The name has a random part, because servers in containers that share the cache folder may have equal process ids.
    path = cache_dir / FOLDER / f"{os.getpid()}-{secrets.token_hex(4)}.json"
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("x", encoding="utf-8"))
            stack.callback(path.unlink, missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(json.dumps({"pid": os.getpid(), **facts, "started": int(time.time())}))
            file.flush()
        except OSError:
            with suppress(OSError):  # closing the file tries again to write what could not be written
                stack.close()
        yield


def running_servers(cache_dir: Path) -> list[dict[str, Any]]:
    """Return the facts of every server whose file is locked, and remove the files of those that were killed."""
    found = []
    for path in sorted((cache_dir / FOLDER).glob("*.json")):
        try:
            with path.open(encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    if isinstance(facts := json.load(file), dict) and facts.keys() >= FACTS:
                        found.append(facts)
                else:
                    path.unlink(missing_ok=True)
        except (OSError, ValueError):  # The server ended just now, or has not written its facts yet.
            continue
    return found
