"""HTTP: /v1/files and /v1/batches, in OpenAI's shapes. The folder of `--batch-dir` is opened at start if it exists, else by the
first request for a file or batch."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from onedraw.errors import OnedrawError, QueueFull, Unsupported
from onedraw.limits import MAX_BATCH_FILE, MAX_CALLER_UPLOADS, MAX_UPLOADS
from onedraw.llm.llm import LLM
from onedraw.llm.request_options import settle_seed
from onedraw.server.auth import caller, turn_caller
from onedraw.server.batch.batches import Answer, Batches
from onedraw.server.batch.requests import BatchRequest, read_upload
from onedraw.server.batch.store import Batch, BatchStore, FolderInUse, NoSuchFile, StoredFile
from onedraw.server.config import ServerOptions
from onedraw.server.openai.responses import check_query, listing, page_of

log = logging.getLogger("onedraw.server.batch")

MAX_FILES_PAGE = 10_000
STATES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

Json = dict[str, Any]


class BatchEndpoints:
    """The handlers of the files and batches of one server. `check_open` raises while the server takes no new work."""

    def __init__(
        self,
        llm: LLM,
        options: ServerOptions,
        *,
        answer: Answer,
        check_open: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self._llm, self._options = llm, options
        self._answer, self._check_open = answer, check_open
        self._batches: Batches | None = None
        self._stopped = False
        self._uploads: Counter[str] = Counter()  # number of files that each caller is uploading

    def start(self) -> None:
        """Continue the batches in the folder, if there are any."""
        folder = self._options.batch_dir
        if folder is not None and folder.exists():
            try:
                self._opened()
            except OnedrawError as error:
                log.warning("%s", error)

    async def stop(self) -> None:
        self._stopped = True
        batches, self._batches = self._batches, None
        if batches is not None:
            await batches.stop()

    def _opened(self) -> Batches:
        self._check_open()
        folder = self._options.batch_dir
        if folder is None or self._stopped:
            raise Unsupported("this server keeps no files and batches; serve with --batch-dir FOLDER")
        if self._batches is None:
            try:
                store = BatchStore(folder, most_bytes=self._options.batch_disk, clock=self.clock, share=self._options.batch_share)
            except OSError as error:
                raise FolderInUse(
                    f"--batch-dir: cannot write to {folder} ({error.strerror})", code="batch_folder_not_writable"
                ) from None
            self._batches = Batches(
                store,
                self._answer,
                lanes=self._llm.service.capacity.lanes,
                longest=self._options.max_body,
                fingerprint=lambda: self._llm.card.fingerprint,
                clock=self.clock,
            )
            self._batches.start()
        return self._batches

    # ------------------------------------------------------------------ files

    async def files(self, request: Request) -> Response:
        return await (self._upload(request) if request.method == "POST" else self._listed_files(request))

    async def _upload(self, request: Request) -> Response:
        store, owner = self._opened().store, caller(request)
        store.check_room(owner)
        who = turn_caller(request.scope)
        if self._uploads[who] >= MAX_CALLER_UPLOADS or self._uploads.total() >= MAX_UPLOADS:
            raise QueueFull(
                f"{self._uploads[who]} files of this caller and {self._uploads.total()} in all are being uploaded already; "
                "try again later"
            )
        self._uploads[who] += 1
        try:
            upload = await read_upload(request, limit=min(MAX_BATCH_FILE, self._options.batch_share))
            add = partial(store.add_file, owner=owner, filename=upload.filename, purpose=upload.purpose, lifetime=upload.lifetime)
            try:
                stored = await asyncio.to_thread(add, upload.file.file)
            finally:
                await upload.file.close()
        finally:
            self._uploads.subtract([who])
            self._uploads += Counter()  # drops callers whose count is 0
        return JSONResponse(file_json(stored))

    async def _listed_files(self, request: Request) -> Response:
        page = page_of(request, also=("purpose",), most=MAX_FILES_PAGE, usual=MAX_FILES_PAGE)
        purpose = request.query_params.get("purpose")
        found = [one for one in self._opened().store.files(caller(request)) if purpose in (None, one.purpose)]
        return JSONResponse(listing([file_json(one) for one in found], page))

    async def file(self, request: Request, file_id: str) -> Response:
        check_query(request, {})
        store, owner = self._opened().store, caller(request)
        if request.method == "DELETE":
            await asyncio.to_thread(store.delete_file, file_id, owner)
            return JSONResponse({"id": file_id, "object": "file", "deleted": True})
        return JSONResponse(file_json(store.file(file_id, owner)))

    async def content(self, request: Request, file_id: str) -> Response:
        check_query(request, {})
        store = self._opened().store
        found = store.file(file_id, caller(request))
        path: Path = store.content(found.id)
        if not path.is_file():  # It was deleted meanwhile, or the disk has lost it.
            raise NoSuchFile(f"the content of the file {file_id!r} is not there", param="file_id")
        return FileResponse(path, media_type="application/octet-stream", headers={"x-content-type-options": "nosniff"})

    # ------------------------------------------------------------------ batches

    async def create(self, request: Request, body: BatchRequest, *, headers: Mapping[str, str]) -> Response:
        batches, owner, now = self._opened(), caller(request), int(self.clock())
        found = batches.store.file(body.input_file_id, owner)
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            owner=owner,
            endpoint=body.endpoint,
            input_file_id=found.id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + body.seconds,
            seed=settle_seed(body.seed),
            fingerprint=self._llm.card.fingerprint,
            model=self._llm.card.name,
            metadata=body.metadata,
            output_expires_seconds=None if body.output_expires_after is None else body.output_expires_after.seconds,
        )
        return JSONResponse(self._json(await batches.create(batch)), headers=dict(headers))

    async def batch(self, request: Request, batch_id: str) -> Response:
        check_query(request, {})
        return JSONResponse(self._json(self._opened().store.batch(batch_id, caller(request))))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        return JSONResponse(self._json(await self._opened().cancel(batch_id, caller(request))))

    async def listed(self, request: Request) -> Response:
        page = page_of(request, also=())
        found = self._opened().store.batches(caller(request))
        return JSONResponse(listing([self._json(one) for one in found], page))

    def _json(self, batch: Batch) -> Json:
        completed, failed = self._opened().counts(batch)
        faults: Sequence[Json] = [
            {"code": one.code, "message": one.message, "line": one.line, "param": one.param} for one in batch.errors
        ]
        return {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.endpoint,
            "model": batch.model,
            "errors": {"object": "list", "data": faults} if faults else None,
            "input_file_id": batch.input_file_id,
            "completion_window": batch.completion_window,
            "status": batch.status,
            "output_file_id": batch.output_file_id,
            "error_file_id": batch.error_file_id,
            "created_at": batch.created_at,
            "expires_at": batch.expires_at,
            **{f"{state}_at": batch.times.get(f"{state}_at") for state in STATES},
            "request_counts": {"total": batch.total, "completed": completed, "failed": failed},
            "metadata": None if batch.metadata is None else dict(batch.metadata),
            "seed": batch.seed,
            "system_fingerprint": batch.fingerprint,
        }


def file_json(found: StoredFile) -> Json:
    return {
        "id": found.id,
        "object": "file",
        "bytes": found.bytes,
        "created_at": found.created_at,
        "expires_at": found.expires_at,
        "filename": found.filename,
        "purpose": found.purpose,
        "status": "processed",
        "status_details": None,
    }
