"""schemathesis against the server's own OpenAPI document, bounded: no 500, no undocumented status or shape, nothing accepted
that the document rules out, no way around the key.

The other direction is left out (`positive_data_acceptance`): rules between fields, the vocabulary and the context cannot be
written in a schema, and what breaks them is a documented 400. `tests/server/test_openapi.py` holds the ranges from inside.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.clients.conftest import Server, running

EXAMPLES = os.environ.get("ONEDRAW_SCHEMATHESIS_EXAMPLES", "60")


def test_the_server_conforms_to_its_openapi_document(tmp_path: Path) -> None:
    # Replies are short. The token for updates is none that schemathesis sends, so it never pauses the server.
    with running("--max-context", "64", "--max-batch", "32", "--update-token", "of the trainer") as server:
        run_schemathesis(server, tmp_path)


def run_schemathesis(server: Server, tmp_path: Path) -> None:
    command = [
        *(str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json", "--no-color"),
        *("--header", f"Authorization: Bearer {server.key}", "--exclude-checks", "positive_data_acceptance"),
        *(
            "--phases",
            "examples,coverage,fuzzing,stateful",
            "--max-examples",
            EXAMPLES,
            "--seed",
            "7",
            "--generation-database",
            "none",
        ),
        *("--request-timeout", "120"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
