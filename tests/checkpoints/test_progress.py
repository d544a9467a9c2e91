"""DownloadMeter: bar, speed and remaining time; and the hub's files fetched from a local server with them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from onedraw.checkpoints.download import DownloadMeter

COMMIT = "a" * 40
FILES = {"config.json": b"{}", "model.safetensors": bytes(3 * 2**20), "training.bin": b"not wanted"}


def test_a_line_has_bar_amounts_speed_and_time_left() -> None:
    lines: list[str] = []
    times = iter((0.0, 2.0, 30.0, 31.0))
    meter = DownloadMeter("downloading X", lines.append, clock=lambda: next(times))
    meter.update(10 * 2**20, 100 * 2**20)
    meter.update(30 * 2**20, 100 * 2**20)
    meter.update(40 * 2**20, 100 * 2**20)  # the earlier counts are too old to give a speed
    meter.update(200 * 2**20, 100 * 2**20)  # never more than there is
    assert lines == [
        "downloading X: [##..................] 10%, 10 of 100 MiB",
        "downloading X: [######..............] 30%, 30 of 100 MiB, 10.0 MiB/s, 0:07 left",
        "downloading X: [########............] 40%, 40 of 100 MiB",
        "downloading X: [####################] 100%, 100 of 100 MiB, 60.0 MiB/s, 0:00 left",
    ]


class Hub(BaseHTTPRequestHandler):
    """The requests of a hub that downloading one repository makes."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        headers = {"X-Repo-Commit": COMMIT}
        if path.startswith("/api/models/some/model/revision/"):
            content = json.dumps(
                {"id": "some/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            ).encode()
        elif path.startswith("/api/models/some/model/tree/"):
            content = json.dumps(
                [{"type": "file", "path": name, "size": len(data), "oid": "1" * 40} for name, data in FILES.items()]
            ).encode()
        elif (name := path.rpartition("/")[2]) in FILES and "/resolve/" in path:
            content = FILES[name]
            headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


def test_a_hub_id_is_fetched_with_a_bar_and_found_offline_then(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from onedraw.checkpoints.download import resolve_model
path = resolve_model("some/model", Path(sys.argv[1]), progress=print)
assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"], list(path.iterdir())
assert resolve_model("some/model", Path(sys.argv[1]), offline=True) == path
"""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"}
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            env={**os.environ, **environment, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        hub.shutdown()
    assert done.returncode == 0, done.stderr
    assert "downloading some/model: [####################] 100%, 3 of 3 MiB" in done.stdout
