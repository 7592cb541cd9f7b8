"""What a batch is, as it is remembered, and what may become of it. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Literal

MAX_ERRORS = 100
"""Of a batch's input that are told."""

Ending = Literal["completed", "expired", "cancelled"]


class BatchStatus(StrEnum):
    """How far a batch is."""

    VALIDATING = "validating"
    FAILED = "failed"
    """Its input was not valid: nothing of it was run."""
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    """All its lines have their results, which are being made into files."""
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self in (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class InputError:
    """What is wrong with a batch's input. Raises nothing."""

    code: str
    message: str
    line: int | None = None
    """From 1; None: with all of it."""
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as it is remembered. Times are in seconds since 1970, 0 for never."""

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    key_id: str = ""
    """Of the API key that it was made with, if there was one."""
    most_lines: int = 0
    """That it and the tenant's other batches that are not over may have together; 0: any number."""
    tokens_per_minute: int = 0
    """That the lines of the key's batches may take together; 0: any number."""
    status: BatchStatus = BatchStatus.VALIDATING
    epoch: int = 0
    """Of its latest holder: what an earlier one says counts no more."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    """Lines, with `completed` those that have an answer."""
    in_progress_at: int = 0
    finalizing_at: int = 0
    completed_at: int = 0
    failed_at: int = 0
    expired_at: int = 0
    cancelling_at: int = 0
    cancelled_at: int = 0
    output_file_id: str = ""
    error_file_id: str = ""
    errors: tuple[InputError, ...] = field(default=())

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Batch:
        values = {one.name: record[one.name] for one in fields(cls)}
        values["status"] = BatchStatus(values["status"])
        values["errors"] = tuple(InputError(**error) for error in values["errors"])
        return cls(**values)

    # ---- what becomes of it: None where it is too late for that ----

    def taken(self) -> Batch | None:
        """Somebody new looks after it."""
        return None if self.status.over else replace(self, epoch=self.epoch + 1)

    def validated(self, epoch: int, total: int, now: int) -> Batch | None:
        if not self._of(epoch, BatchStatus.VALIDATING):
            return None
        return replace(self, status=BatchStatus.IN_PROGRESS, total=total, in_progress_at=now)

    def refused(self, epoch: int, errors: tuple[InputError, ...], now: int) -> Batch | None:
        """Its input is not valid."""
        if not self._of(epoch, BatchStatus.VALIDATING, BatchStatus.CANCELLING):
            return None
        return replace(self, status=BatchStatus.FAILED, errors=errors[:MAX_ERRORS], failed_at=now)

    def advanced(self, epoch: int, completed: int, failed: int) -> Batch | None:
        """So many of its lines have an answer."""
        if not self._of(epoch, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING) or (completed, failed) == (self.completed, self.failed):
            return None
        return replace(self, completed=completed, failed=failed)

    def finalizing(self, epoch: int, now: int) -> Batch | None:
        return replace(self, status=BatchStatus.FINALIZING, finalizing_at=now) if self._of(epoch, BatchStatus.IN_PROGRESS) else None

    def ended(
        self, epoch: int, how: Ending, completed: int, failed: int, output_file_id: str, error_file_id: str, now: int
    ) -> Batch | None:
        """Its files are there; an empty id is none."""
        if not self._of(epoch, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING, BatchStatus.VALIDATING):
            return None
        ended = replace(self, completed=completed, failed=failed, output_file_id=output_file_id, error_file_id=error_file_id)
        match how:
            case "completed":
                return replace(ended, status=BatchStatus.COMPLETED, completed_at=now)
            case "expired":
                return replace(ended, status=BatchStatus.EXPIRED, expired_at=now)
            case "cancelled":
                return replace(ended, status=BatchStatus.CANCELLED, cancelled_at=now)

    def cancelling(self, now: int) -> Batch | None:
        """Its client wants no more of it."""
        if self.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            return None
        return replace(self, status=BatchStatus.CANCELLING, cancelling_at=now)

    def _of(self, epoch: int, *statuses: BatchStatus) -> bool:
        return self.epoch == epoch and self.status in statuses
