"""Files that clients send and are given: their contents on the disk, what is known of them in Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, ParamSpec, TypeVar

import redis.asyncio as redis

from gateway.batches.results import sync_directory
from gateway.records import Order, Records, RecordsFull, RecordTooLarge
from springtide.errors import InvalidRequest, Unavailable
from springtide.ids import new_id

Purpose = Literal["batch", "batch_output"]
MOST_FILES = 10_000
"""Of a tenant."""
PIECE_BYTES = 256 << 10
_LEFT_S = 24 * 3600.0
"""An upload to which nothing has been added for so long is nobody's."""
_PLACES_S = 3600.0
"""How long a list can be gone on with behind a file that has been deleted."""
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class FileNotThere(InvalidRequest):
    """There is no such file, or it is another tenant's."""

    http_status = 404


class FileTooLarge(InvalidRequest):
    http_status = 413


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file whose content is on the disk as a whole."""

    file_id: str
    filename: str
    purpose: Purpose
    num_bytes: int
    created_at: int
    """Seconds since 1970."""

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> StoredFile:
        return cls(**record)


class Upload:
    """A file that is being received. `end` or `discard` ends it."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path = path
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._file: BinaryIO | None = None

    async def write(self, data: bytes) -> None:
        """Raises FileTooLarge, and Unavailable when the disk cannot take it."""
        self.num_bytes += len(data)
        if self.num_bytes > self._most_bytes:
            raise FileTooLarge(
                f"file: a file may have {self._most_bytes} bytes (server.max_file_size)", param="file", code="file_too_large"
            )
        self._pieces.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= PIECE_BYTES:
            await self._flush()

    async def end(self) -> None:
        """Returns when all of it is on the disk for good, under its temporary name."""
        await self._flush()
        await on_disk(self._close, True)

    async def discard(self) -> None:
        await on_disk(self._close, False)

    async def _flush(self) -> None:
        pieces, self._pieces, self._held_bytes = self._pieces, [], 0
        await on_disk(self._write, pieces)

    def _write(self, pieces: list[bytes]) -> None:
        if self._file is None:
            self._file = self.path.open("xb")
        self._file.write(b"".join(pieces))

    def _close(self, keep: bool) -> None:
        if self._file is not None:
            if keep:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
        if not keep:
            self.path.unlink(missing_ok=True)


class Files:
    """All tenants' files."""

    def __init__(self, client: redis.Redis, cluster: str, directory: Path, most_file_bytes: int, most_tenant_bytes: int) -> None:
        """`directory` is shared by all gateways of the cluster."""
        self._records = Records(
            client,
            cluster,
            "file",
            most=MOST_FILES,
            most_bytes=most_tenant_bytes,
            bytes_of=lambda record: int(record["num_bytes"]),
            places_s=_PLACES_S,
        )
        self._directory = directory
        self._most_file_bytes = most_file_bytes
        self._most_tenant_bytes = most_tenant_bytes

    def prepare(self) -> None:
        """Makes the directory, and removes what uploads have left in it whose gateway died. Raises OSError."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in self._directory.glob("*.part"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _LEFT_S:
                    part.unlink()

    def path(self, file_id: str) -> Path:
        """Of the content of a file that there is."""
        return self._directory / file_id

    async def upload(self, tenant: str) -> Upload:
        """A new file's beginning. Raises FileTooLarge when the tenant has as much as it may."""
        left = await self.room(tenant)
        return Upload(self._directory / f"{new_id('upload')}.part", min(self._most_file_bytes, left))

    async def room(self, tenant: str) -> int:
        """How many bytes the tenant may still send. Raises FileTooLarge when it has as much as it may."""
        count, num_bytes = await self._records.standing(tenant)
        if count >= MOST_FILES or num_bytes >= self._most_tenant_bytes:
            raise self._no_room(tenant)
        return self._most_tenant_bytes - num_bytes

    async def keep(self, tenant: str, upload: Upload, filename: str, purpose: Purpose, now: float) -> StoredFile:
        """The file that has been received, which counts from now on (seconds since 1970). Raises FileTooLarge."""
        stored = StoredFile(new_id("file"), filename, purpose, upload.num_bytes, int(now))
        await on_disk(self._rename, upload.path, stored.file_id)
        try:
            await self._records.create(tenant, stored.file_id, asdict(stored), made_at=now)
        except (RecordTooLarge, RecordsFull):
            await on_disk(self.path(stored.file_id).unlink)
            raise self._no_room(tenant) from None
        except BaseException:
            # Whether it was written down cannot be told. If so, it is listed, and can be deleted; content of which nobody knows could not.
            await on_disk(self.path(stored.file_id).unlink)
            with contextlib.suppress(Unavailable):
                await self._records.delete(tenant, stored.file_id)
            raise
        return stored

    async def make(
        self, tenant: str, file_id: str, content: Iterable[bytes], filename: str, purpose: Purpose, now: float
    ) -> StoredFile | None:
        """A file of our own making, however many the tenant has; one that is there already, made by whoever was interrupted, is replaced.
        None where there is no content. `content` is gone through in a thread."""
        num_bytes = await on_disk(self._make, file_id, content)
        if not num_bytes:
            return None
        stored = StoredFile(file_id, filename, purpose, num_bytes, int(now))
        await self._records.create(tenant, file_id, asdict(stored), made_at=now, bounded=False)
        return stored

    async def get(self, tenant: str, file_id: str) -> StoredFile:
        """Raises FileNotThere."""
        record = await self._records.get(tenant, file_id)
        if record is None:
            raise FileNotThere(f"there is no file {file_id!r}", param="file_id", code="file_not_found")
        return StoredFile.from_record(record)

    async def page(self, tenant: str, *, order: Order, after: str, limit: int, purpose: str) -> tuple[list[StoredFile], bool]:
        """Up to `limit` of the tenant's files, or of those with this purpose, and whether there are more. Raises NotListed."""
        wanted = (lambda record: bool(record["purpose"] == purpose)) if purpose else None
        records, more = await self._records.page(tenant, order=order, after=after, limit=limit, wanted=wanted)
        return [StoredFile.from_record(record.value) for record in records], more

    async def delete(self, tenant: str, file_id: str) -> None:
        """Raises FileNotThere. A batch that reads it has a name of its own for its content."""
        await self.get(tenant, file_id)
        # In this order: what is still listed can be deleted again.
        await on_disk(self.path(file_id).unlink, True)
        await self._records.delete(tenant, file_id)

    async def content(self, stored: StoredFile) -> AsyncIterator[bytes]:
        """Its bytes, in pieces."""
        file = await on_disk(self.path(stored.file_id).open, "rb")
        try:
            while piece := await on_disk(file.read, PIECE_BYTES):
                yield piece
        finally:
            file.close()

    async def link(self, file_id: str, target: Path) -> None:
        """Gives the content of a file another name, which it keeps when the file is deleted; in a directory that is made. Raises
        Unavailable."""
        await on_disk(self._link, file_id, target)

    # ---- in threads ----

    def _rename(self, source: Path, file_id: str) -> None:
        source.rename(self.path(file_id))
        sync_directory(self._directory)

    def _make(self, file_id: str, content: Iterable[bytes]) -> int:
        part = self._directory / f"{file_id}.part"
        with part.open("wb") as file:
            for piece in content:
                file.write(piece)
            num_bytes = file.tell()
            file.flush()
            os.fsync(file.fileno())
        if num_bytes:
            self._rename(part, file_id)
        else:
            part.unlink()
        return num_bytes

    def _link(self, file_id: str, target: Path) -> None:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.link(self.path(file_id), target)
        except FileExistsError:
            return
        except OSError:  # A file system without links.
            shutil.copyfile(self.path(file_id), target)
        sync_directory(target.parent)

    def _no_room(self, tenant: str) -> FileTooLarge:
        message = (
            f"tenant {tenant!r} has all the files that it may: {MOST_FILES}, or {self._most_tenant_bytes} bytes "
            "(server.max_tenant_files_size); delete some"
        )
        return FileTooLarge(message, code="files_full")


async def on_disk(work: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
    """What `work` returns, in a thread. Raises Unavailable where the disk fails."""
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except OSError as error:
        raise Unavailable(f"the directory of files cannot be used: {error}", code="disk") from error
