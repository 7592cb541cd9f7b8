"""Forms with a file in them, `multipart/form-data`: read as they come, within bounds, the file to wherever it is to go."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from gateway.batches.files import Upload
from gateway.bodies import LEAST_BYTES_A_S, PATIENCE_S, BodyTimeout, ClientDisconnected
from springtide.errors import InvalidRequest, Overloaded

MOST_AT_ONCE = 16
"""Uploads that a gateway receives, of a tenant at most half of that."""
_MOST_FIELDS, _MOST_FIELD_BYTES = 16, 4096
_MOST_AROUND_BYTES = 1 << 18
"""What a form may have beside its file."""
_RETRY_AFTER_S = 5.0


@dataclass(slots=True)
class Form:
    """What has come: the fields that are text, and the file."""

    fields: dict[str, str] = field(default_factory=dict)
    upload: Upload | None = None
    filename: str = ""


class Uploads:
    """The uploads that are being received."""

    def __init__(self, most_file_bytes: int) -> None:
        self._most_bytes = most_file_bytes + _MOST_AROUND_BYTES
        self._receiving: Counter[str] = Counter()
        """By the tenant."""

    async def receive(self, request: Request, tenant: str, file_field: str, new_upload: Callable[[], Awaitable[Upload]]) -> Form:
        """The form in the body of the tenant's `request`, whose file is in an upload that has ended, if it has one under this name. Raises
        InvalidRequest, naming the field, BodyTimeout, Overloaded, ClientDisconnected and what writing fails with; there is no file then."""
        if self._receiving.total() >= MOST_AT_ONCE or self._receiving[tenant] >= MOST_AT_ONCE // 2:
            raise Overloaded("too many files are being received at once", retry_after_s=_RETRY_AFTER_S, reason="uploads")
        reader = _FormReader(_boundary(request), file_field, new_upload)
        self._receiving[tenant] += 1
        try:
            await self._read(request, reader)
            return await reader.end()
        except BaseException:
            if reader.form.upload is not None:
                await reader.form.upload.discard()
            raise
        finally:
            self._receiving -= Counter((tenant,))  # who has none left is not kept

    async def _read(self, request: Request, reader: _FormReader) -> None:
        started, received = asyncio.get_running_loop().time(), 0
        try:
            async with asyncio.timeout(PATIENCE_S) as patience:
                async for chunk in request.stream():
                    received += len(chunk)
                    await reader.take(chunk)
                    if received > self._most_bytes:
                        raise _no_form(f"it goes on after {self._most_bytes} bytes")
                    if not patience.expired():
                        patience.reschedule(started + PATIENCE_S + received / LEAST_BYTES_A_S)
        except TimeoutError:
            message = f"{received} bytes of the body have come in {PATIENCE_S + received / LEAST_BYTES_A_S:.0f} s"
            raise BodyTimeout(message, code="body_timeout") from None
        except ClientDisconnect:
            raise ClientDisconnected("the client has closed the connection") from None


class _FormReader:
    """A form on its way. The parser calls while it is fed; what is to be awaited is done after that."""

    def __init__(self, boundary: bytes, file_field: str, new_upload: Callable[[], Awaitable[Upload]]) -> None:
        """Raises InvalidRequest."""
        self.form = Form()
        self._file_field = file_field
        self._new_upload = new_upload
        self._ended = False
        self._header = [b"", b""]
        self._disposition: dict[bytes, bytes] = {}
        self._name = ""
        self._is_file = False
        self._file_parts: list[bytes] = []
        self._texts: dict[str, bytearray] = {}
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._add_to_header(0, data[start:end]),
                    "on_header_value": lambda data, start, end: self._add_to_header(1, data[start:end]),
                    "on_header_end": self._header_ended,
                    "on_headers_finished": self._headers_ended,
                    "on_part_data": lambda data, start, end: self._take_data(data[start:end]),
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _no_form(str(error)) from None

    async def take(self, chunk: bytes) -> None:
        """Raises InvalidRequest."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _no_form(str(error)) from None
        if self._file_parts:
            if self.form.upload is None:
                self.form.upload = await self._new_upload()
            parts, self._file_parts = self._file_parts, []
            await self.form.upload.write(b"".join(parts))

    async def end(self) -> Form:
        """Raises InvalidRequest."""
        if not self._ended:
            raise _no_form("it breaks off")
        for name, text in self._texts.items():
            try:
                self.form.fields[name] = text.decode()
            except UnicodeDecodeError:
                raise InvalidRequest(f"{name} is not UTF-8", param=name, code="invalid_value") from None
        if self.form.upload is not None:
            await self.form.upload.end()
        return self.form

    def _begin(self) -> None:
        self._disposition, self._name, self._is_file = {}, "", False

    def _add_to_header(self, part: int, data: bytes) -> None:
        self._header[part] += data

    def _header_ended(self) -> None:
        name, value = self._header
        self._header = [b"", b""]
        if name.lower() == b"content-disposition":
            _, self._disposition = parse_options_header(value)

    def _headers_ended(self) -> None:
        self._name = self._disposition.get(b"name", b"").decode(errors="replace")
        self._is_file = b"filename" in self._disposition
        if not self._is_file:
            if self._name in self._texts or len(self._texts) >= _MOST_FIELDS:
                raise InvalidRequest(f"{self._name!r} is there twice, or there are too many fields", param=self._name, code="invalid_form")
            self._texts[self._name] = bytearray()
            return
        if self._name != self._file_field or self.form.filename:
            message = f"{self._name!r} is a file; one file is wanted, in the field {self._file_field!r}"
            raise InvalidRequest(message, param=self._name, code="invalid_form")
        self.form.filename = self._disposition[b"filename"].decode(errors="replace") or "file"

    def _take_data(self, data: bytes) -> None:
        if self._is_file:
            self._file_parts.append(data)
            return
        text = self._texts[self._name]
        if len(text) + len(data) > _MOST_FIELD_BYTES:
            raise InvalidRequest(f"{self._name} may have {_MOST_FIELD_BYTES} bytes", param=self._name, code="invalid_form")
        text += data

    def _end(self) -> None:
        self._ended = True


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind.lower() != b"multipart/form-data" or not boundary:
        raise _no_form("the content-type says something else")
    return boundary


def _no_form(why: str) -> InvalidRequest:
    return InvalidRequest(f"the body must be a form of the type multipart/form-data: {why}", code="invalid_form")
