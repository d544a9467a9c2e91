"""Send a trainer's weights to a server on the same machine, without a file. It is in `build`, which alone may import a backend.

In: the server's address and update token, tensors by name. Out: the fingerprint of the model with these weights.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from onedraw.errors import BadRequest, StateLost

UPDATE_SECONDS = 1800.0  # the longest wait for the server's answer


def send_weights(url: str, tensors: Iterable[tuple[str, Any]], *, token: str) -> str:
    from onedraw.backends.torch.remote.weights import WeightSender

    sender = WeightSender(tensors)

    def send() -> None:
        with suppress(StateLost):  # the server's answer says why
            sender.send()

    thread = threading.Thread(target=send, name="send weights", daemon=True)
    thread.start()
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    body = json.dumps({"port": sender.port}).encode()
    asked = urllib.request.Request(url.rstrip("/") + "/update_weights", body, headers)
    try:
        with urllib.request.urlopen(asked, timeout=UPDATE_SECONDS) as answer:
            return str(json.load(answer)["fingerprint"])
    except urllib.error.HTTPError as error:
        with error:
            said = error.read().decode("utf-8", "replace")
        raise BadRequest(f"the server refuses the weights: {said}", code="weights_refused") from None
    finally:
        sender.close()
