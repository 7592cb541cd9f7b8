"""Huge pages of this machine, reserved for as long as a test wants them."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HUGEPAGE_BYTES = 2 << 20
_NUMBER = Path(f"/sys/kernel/mm/hugepages/hugepages-{HUGEPAGE_BYTES >> 10}kB/nr_hugepages")


@contextmanager
def reserved(num_pages: int) -> Iterator[None]:
    """So many more than there are. Skips the test where the machine does not give them to this user."""
    try:
        got = _added(num_pages)
    except OSError as error:
        pytest.skip(f"this machine reserves no huge pages: {error}")
    try:
        if got < num_pages:
            pytest.skip(f"this machine has {got} of {num_pages} huge pages")
        yield
    finally:
        _added(-got)


def _added(num_pages: int) -> int:
    """How many more there are than before."""
    with _NUMBER.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = int(_NUMBER.read_text())
        _NUMBER.write_text(str(before + num_pages))
        return int(_NUMBER.read_text()) - before
