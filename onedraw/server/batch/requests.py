"""The body of POST /v1/batches, and the form of POST /v1/files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from onedraw.errors import BadParameter, BadRequest
from onedraw.limits import BATCH_KEEP_SECONDS
from onedraw.server.batch.lines import ENDPOINTS
from onedraw.server.errors import BodyTooLarge, BodyTooSlow
from onedraw.server.fields import Metadata, StrictModel, field_doc, seed_field

HOUR = 3600
MAX_HOURS = 7 * 24
UPLOAD_SECONDS = 600.0  # the time within which the last byte of an uploaded file must arrive
FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/score"]
assert Endpoint.__args__ == ENDPOINTS  # type: ignore[attr-defined]


class ExpiresAfter(StrictModel):
    anchor: Literal["created_at"] = field_doc('"created_at"', "required", ...)
    seconds: int = field_doc(
        f"integer, {HOUR} … {BATCH_KEEP_SECONDS}", "from then on; required", ..., ge=HOUR, le=BATCH_KEEP_SECONDS
    )


class BatchRequest(StrictModel):
    input_file_id: str = field_doc("string", "the id of an uploaded file; required", ..., max_length=64)
    endpoint: Endpoint = field_doc(" or ".join(f'"{one}"' for one in ENDPOINTS), "of all lines; required", ...)
    completion_window: str = field_doc(
        'string, like "24h"',
        f"the batch expires after so many hours, 1 to {MAX_HOURS}; required",
        ...,
        pattern=r"^[1-9]\d{0,2}h$",
    )
    metadata: Metadata | None = field_doc("object", "the caller's own notes")
    output_expires_after: ExpiresAfter | None = field_doc("object", "when the output files expire; without it after 30 days")
    seed: int | None = seed_field("the batch")

    @property
    def seconds(self) -> int:
        hours = int(self.completion_window.removesuffix("h"))
        if hours > MAX_HOURS:
            raise BadParameter("completion_window", f"must be 1h to {MAX_HOURS}h")
        return hours * HOUR


@dataclass(frozen=True, slots=True)
class Upload:
    """An uploaded file, in a temporary file that the caller of `read_upload` closes."""

    file: UploadFile
    filename: str
    purpose: str
    lifetime: int | None  # seconds until the file is deleted, as the client asked (`expires_after`); None: the client did not ask


async def read_upload(request: Request, *, limit: int, seconds: float = UPLOAD_SECONDS) -> Upload:
    """Read a form with a file. The body is refused as soon as its declared or received size exceeds `limit` by more than 4096
    bytes, which are left for the other fields of the form."""
    declared = request.headers.get("content-length", "")
    too_large = BodyTooLarge(f"the file is over the limit of {limit:,} bytes; split it")
    if declared.isdecimal() and int(declared) > limit + 4096:
        raise too_large
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise BadRequest("the body must be a form (multipart/form-data) with the fields file and purpose", code="invalid_form")

    async def bounded() -> AsyncGenerator[bytes, None]:
        size = 0
        async for block in request.stream():
            size += len(block)
            if size > limit + 4096:
                raise too_large
            yield block

    parser = MultiPartParser(request.headers, bounded(), max_files=1, max_fields=len(FIELDS), max_part_size=1024)
    try:
        async with asyncio.timeout(seconds):
            form = await parser.parse()
    except MultiPartException as error:
        raise BadRequest(f"the form cannot be read: {error.message}", code="invalid_form") from None
    except TimeoutError:
        raise BodyTooSlow(f"the file did not arrive within {seconds:g} seconds") from None
    try:
        return _upload(form)
    except BaseException:
        await form.close()
        raise


def _upload(form: FormData) -> Upload:
    for name, _ in form.multi_items():
        if name not in FIELDS:
            raise BadRequest(f"{name[:64]}: unknown field; remove it", param=name[:64], code="unknown_field")
        if len(form.getlist(name)) > 1:
            raise BadParameter(name, "given twice")
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise BadRequest("file: this field is required, with a file name", param="file", code="missing_field")
    if purpose is None:
        raise BadRequest("purpose: this field is required", param="purpose", code="missing_field")
    if purpose != "batch":
        raise BadParameter("purpose", 'must be "batch"')
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return Upload(file, _file_name(file), "batch", None)
    if anchor != "created_at":
        raise BadParameter("expires_after[anchor]", 'must be "created_at"')
    if not (isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() and len(seconds) < 10):
        raise BadParameter("expires_after[seconds]", "must be a whole number")
    if not HOUR <= int(seconds) <= BATCH_KEEP_SECONDS:
        raise BadParameter("expires_after[seconds]", f"must be in [{HOUR}, {BATCH_KEEP_SECONDS}]")
    return Upload(file, _file_name(file), "batch", int(seconds))


def _file_name(file: UploadFile) -> str:
    return "".join(c for c in file.filename or "" if c.isprintable())[-255:] or "file.jsonl"
