"""The routes of OpenAI's files."""

from __future__ import annotations

import time
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from gateway.answer import ApiBackend
from gateway.batches.files import StoredFile
from gateway.described import TEXT, operation
from gateway.exchange import Json
from gateway.openai.described import FILE, deleted, listed
from gateway.openai.pages import ORDER, limit_of, order_of, page_of, whole_number
from gateway.uploads import Uploads
from springtide.errors import InvalidRequest

PATH = "/v1/files"
_FORM: Json = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
    "required": ["file", "purpose"],
    "additionalProperties": False,
}
"""For the API's own description: what is sent is read as it comes."""
_FIELDS = {"purpose"}
_PAGE, _MOST_FILES = 100, 1000
_MAX_NAME_LENGTH = 512


def routes(backend: ApiBackend) -> APIRouter:
    router = APIRouter()
    files, uploads = backend.files, Uploads(backend.server.max_file_size)

    @router.post(PATH, openapi_extra=operation(FILE, form=_FORM))
    async def create(request: Request) -> Json:
        tenant: str = request.state.tenant
        form = await uploads.receive(request, tenant, "file", lambda: files.upload(tenant))
        try:
            _check(form.fields)
            if form.upload is None:
                raise InvalidRequest("file: a file with something in it is wanted", param="file", code="missing_required_parameter")
            return file_json(await files.keep(tenant, form.upload, form.filename[:_MAX_NAME_LENGTH], "batch", time.time()))
        except BaseException:
            if form.upload is not None:
                await form.upload.discard()
            raise

    page = {"order": ORDER, "limit": limit_of(_MOST_FILES), "after": TEXT, "purpose": TEXT}

    @router.get(PATH, openapi_extra=operation(listed(FILE), query=page))
    async def list_files(request: Request) -> Json:
        query = request.query_params
        order = order_of(query)
        limit = whole_number(query, "limit", _PAGE, _MOST_FILES)
        after, purpose = query.get("after", ""), query.get("purpose", "")
        found, more = await files.page(request.state.tenant, order=order, after=after, limit=limit, purpose=purpose)
        return page_of([file_json(one) for one in found], more)

    @router.get(f"{PATH}/{{file_id}}", openapi_extra=operation(FILE))
    async def retrieve(request: Request, file_id: str) -> Json:
        return file_json(await files.get(request.state.tenant, file_id))

    @router.delete(f"{PATH}/{{file_id}}", openapi_extra=operation(deleted("file")))
    async def delete(request: Request, file_id: str) -> Json:
        await files.delete(request.state.tenant, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    @router.get(f"{PATH}/{{file_id}}/content", response_class=_Content)
    async def content(request: Request, file_id: str) -> Response:
        stored = await files.get(request.state.tenant, file_id)
        headers = {
            "content-length": str(stored.num_bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(stored.filename)}",
        }
        return _Content(files.content(stored), headers=headers)

    return router


class _Content(StreamingResponse):
    """A file's."""

    media_type = "application/octet-stream"


def _check(fields: dict[str, str]) -> None:
    for name in fields:
        if name not in _FIELDS:
            raise InvalidRequest(f"{name} is not a field that this server supports", param=name, code="unknown_parameter")
    purpose = fields.get("purpose")
    if purpose is None:
        raise InvalidRequest("purpose is required", param="purpose", code="missing_required_parameter")
    if purpose != "batch":
        raise InvalidRequest(f"purpose: files are served for 'batch' only, not {purpose!r}", param="purpose", code="invalid_value")


def file_json(stored: StoredFile) -> Json:
    return {
        "id": stored.file_id,
        "object": "file",
        "bytes": stored.num_bytes,
        "created_at": stored.created_at,
        "expires_at": None,
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "processed",
        "status_details": None,
    }
