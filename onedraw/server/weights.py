"""The endpoints for trainers: pause, resume, update the weights, and read properties of the server.

The input is an LLM and the server's options; the output is the handlers. Handlers that change anything need `--update-token`,
which trainers send as a bearer token, in the header `x-update-token`, or as the password of the server's URL. Weights come from a
folder below `--weight-dir`, as the body of the request, or from another process of this machine. TRL and other trainers call the
paths of vLLM; a transfer over NCCL, which some trainers start in vLLM, is refused with an error that says so.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from onedraw import __version__
from onedraw.errors import BadParameter, Unsupported
from onedraw.llm.llm import LLM
from onedraw.server.body import read_body, read_json
from onedraw.server.config import ServerOptions
from onedraw.server.errors import BodyTooLarge, BodyTooSlow, WrongKey
from onedraw.server.parsing import parse
from onedraw.server.protocol import WEIGHTS_ADVICE, WeightUpdateRequest

UPDATE_PATHS = frozenset(
    {"/pause", "/resume", "/update_weights", "/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"}
)
SAFETENSORS = ("application/octet-stream", "application/x-safetensors")
UPLOAD_SECONDS = 1800.0  # the time within which the last byte of uploaded weights must arrive
SMALL_BODY = 1 << 20  # most bytes of a request body that is JSON and not weights
TORCH_DTYPES: Mapping[str, str] = {"f32": "torch.float32", "bf16": "torch.bfloat16", "f16": "torch.float16"}


class WeightEndpoints:
    """The handlers of the paths for trainers."""

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self._llm, self._options = llm, options
        token = options.update_token
        self._digest = None if token is None else _digest(token.encode())

    # ------------------------------------------------------------------ change

    async def pause(self, request: Request) -> Response:
        self._authorize(request)
        mode = request.query_params.get("mode", "keep")
        if mode not in ("keep", "abort"):
            raise BadParameter("mode", 'must be "keep", which lets requests wait, or "abort", which ends them as "moved"')
        await asyncio.to_thread(self._llm.service.pause, end=mode == "abort")
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self._authorize(request)
        await asyncio.to_thread(self._llm.service.resume)
        return JSONResponse({"status": "resumed"})

    async def update_weights(self, request: Request) -> Response:
        self._authorize(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() in SAFETENSORS:
            await self._upload(request)
        else:
            body = await read_body(request, limit=SMALL_BODY)
            asked = parse(WeightUpdateRequest, read_json(body), lenient=self._options.lenient).request
            if asked.port is None:
                await asyncio.to_thread(self._llm.update_weights, self._folder(asked.folder))
            else:
                await asyncio.to_thread(self._llm.receive_weights, asked.port)
        return JSONResponse({"status": "updated", "fingerprint": self._llm.card.fingerprint})

    async def no_op(self, request: Request) -> Response:
        """Do nothing: clients of vLLM call these endpoints before and after an update, which is a single request here."""
        self._authorize(request)
        return JSONResponse({"status": "ok"})

    async def refuse_nccl(self, request: Request) -> Response:
        self._authorize(request)
        raise Unsupported(f"weights are not received over NCCL; {WEIGHTS_ADVICE}", code="nccl_unsupported")

    def _authorize(self, request: Request) -> None:
        if self._digest is None:
            raise Unsupported("this server was started without --update-token, so nothing can be changed", code="no_update_token")
        matches = [hmac.compare_digest(_digest(one), self._digest) for one in _tokens(request.headers)]
        if not any(matches):
            raise WrongKey(
                "wrong or missing update token; send the header 'Authorization: Bearer TOKEN'", code="invalid_update_token"
            )

    def _root(self) -> Path:
        if self._options.weight_dir is None:
            raise Unsupported("this server was started without --weight-dir, so it reads no weights", code="no_weight_dir")
        return self._options.weight_dir.resolve()

    def _folder(self, name: str) -> Path:
        """Return the folder of a request, which must be below --weight-dir after links are followed."""
        root = self._root()
        try:
            folder = (root / name).resolve()
            inside = folder.is_relative_to(root) and folder.is_dir()
        except (OSError, ValueError, RuntimeError):  # The name is not valid as the name of a folder.
            inside = False
        if not inside:
            raise BadParameter("weight_dir", "is not a folder below --weight-dir, whose name may be left out")
        return folder

    async def _upload(self, request: Request) -> None:
        """Write the body to a file below --weight-dir, bounded by the size of the weights in use, and load the weights from
        that file."""
        most = self._llm.most_weight_bytes
        declared = request.headers.get("content-length", "")
        with tempfile.NamedTemporaryFile(dir=self._root(), prefix=".upload-", suffix=".safetensors") as file:
            size = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
            try:
                async with asyncio.timeout(UPLOAD_SECONDS):
                    if size <= most:
                        size = await _received(request, file, most)
            except TimeoutError:
                raise BodyTooSlow(f"the weights did not arrive within {UPLOAD_SECONDS:g} seconds") from None
            if size > most:
                raise BodyTooLarge(f"the body is over {most:,} bytes, the size of the weights in use with a header")
            await asyncio.to_thread(file.flush)
            await asyncio.to_thread(self._llm.load_weight_file, Path(file.name))

    # ------------------------------------------------------------------ ask

    async def is_paused(self) -> Response:
        return JSONResponse({"is_paused": self._llm.service.paused})

    async def world_size(self) -> Response:
        return JSONResponse({"world_size": 1})

    async def server_info(self) -> Response:
        """The part of vLLM's configuration that trainers read."""
        card = self._llm.card
        config = {
            "model_config": {
                "model": card.name,
                "served_model_name": card.name,
                "dtype": TORCH_DTYPES.get(card.dtype, card.dtype),
                "max_model_len": card.max_context,
            },
            "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
            "lora_config": None,
            "weight_transfer_config": None,
        }
        return JSONResponse({"vllm_config": config, "version": __version__, "fingerprint": card.fingerprint})


async def _received(request: Request, file: IO[bytes], most: int) -> int:
    """Write the body to a file, and stop once it exceeds `most` bytes. Return how many bytes have arrived."""
    size = 0
    async for block in request.stream():
        size += len(block)
        if size > most:
            break
        await asyncio.to_thread(file.write, block)
    return size


def _tokens(headers: Headers) -> list[bytes]:
    """Return the update tokens that a request contains: in `x-update-token`, as a bearer token, or as a URL's password."""
    scheme, _, text = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-update-token", "")]
    if scheme.lower() == "bearer":
        given.append(text)
    found = [one.strip(" \t").encode("latin-1") for one in given if one]
    if scheme.lower() == "basic":
        with suppress(binascii.Error, ValueError):
            found.append(base64.b64decode(text, validate=True).partition(b":")[2])
    return found


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
