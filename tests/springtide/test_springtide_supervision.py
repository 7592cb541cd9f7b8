from __future__ import annotations

import asyncio

import pytest

from springtide import supervision
from springtide.supervision import supervised


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "AGAIN_AFTER_S", 0.0)


async def test_work_that_dies_is_told_of_and_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    begun, ended = 0, asyncio.Event()

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise KeyError("what nobody thought of")
        ended.set()

    async with asyncio.timeout(5):
        await supervised(work, "the ticker")
    assert begun == 3 and ended.is_set()
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 2 and "the ticker" in told[0].getMessage() and "what nobody thought of" in str(told[0].exc_info)


async def test_work_that_is_cancelled_ends() -> None:
    running = asyncio.Event()

    async def work() -> None:
        running.set()
        await asyncio.Event().wait()

    task = supervised(work, "the ticker")
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
