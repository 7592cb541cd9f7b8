from __future__ import annotations

import asyncio

import pytest

from springtide import supervision
from springtide.errors import PeerLost
from springtide.supervision import first_of, heeds_cancellation, persevere, supervised, uninterrupted


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


async def test_work_that_fails_as_it_is_cancelled_does_not_begin_anew() -> None:
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError("in what it does at its end")

    task = supervised(work, "the ticker")
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5)
    assert task in done and task.cancelled() and begun == 1


class Works:
    """Works that note how they ended."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    async def endless(self, name: str, pauses: int = 0) -> None:
        """Takes so many turns of the event loop to end when it is cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(pauses):
                await asyncio.sleep(0)
            self.noted.append(name)


async def returning(value: str) -> str:
    return value


async def failing(error: Exception) -> None:
    raise error


@pytest.fixture
def works() -> Works:
    return Works()


async def test_the_first_that_ends_cancels_the_others_and_waits_for_them(works: Works) -> None:
    assert await first_of(works.endless("a"), returning("b"), works.endless("c", pauses=3)) == "b"
    assert sorted(works.noted) == ["a", "c"]


async def test_what_the_first_raises_is_raised_when_the_others_have_ended(works: Works) -> None:
    with pytest.raises(KeyError, match="wrong"):
        await first_of(works.endless("a", pauses=2), failing(KeyError("wrong")))
    assert works.noted == ["a"]


async def test_of_several_that_end_together_who_is_named_first_counts() -> None:
    assert await first_of(returning("a"), returning("b")) == "a"


async def test_of_several_that_end_together_an_error_counts(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="first"):
        await first_of(returning("a"), failing(KeyError("first")), failing(ValueError("second")))
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["second"], "it is not lost"


async def test_what_fails_while_it_is_cancelled_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def clumsy() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("it fell")

    assert await first_of(returning("a"), clumsy()) == "a"
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["it fell"]


async def test_a_task_that_was_given_up_says_so() -> None:
    task = asyncio.create_task(asyncio.Event().wait())
    assert await first_of(task, returning("b")) == "b"
    assert task.cancelled()


async def test_what_is_shielded_goes_on() -> None:
    end = asyncio.Event()
    task = asyncio.create_task(end.wait())
    assert await first_of(asyncio.shield(task), returning("b")) == "b"
    end.set()
    assert await task


async def test_a_cancellation_from_outside_cancels_all_and_waits_for_them(works: Works) -> None:
    task = asyncio.create_task(first_of(works.endless("a"), works.endless("b", pauses=5)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(works.noted) == ["a", "b"]


async def test_who_is_cancelled_again_still_waits(works: Works) -> None:
    async def stubborn() -> None:
        try:
            await works.endless("a")
        except asyncio.CancelledError:
            await works.endless("b", pauses=3)

    task = asyncio.create_task(first_of(stubborn(), works.endless("c")))
    for _ in range(2):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(works.noted) == ["a", "b", "c"]


@pytest.mark.parametrize("turns", range(1, 6))
async def test_a_cancellation_that_meets_the_end_of_a_work_is_not_forgotten(turns: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the moment: asyncio.wait_for of Python 3.11 returns the result then."""
    end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(first_of(end, asyncio.Event().wait()))
    for _ in range(turns):
        await asyncio.sleep(0)
    end.set_exception(ValueError("it came too late"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["it came too late"]


async def test_what_heeds_cancellation_ends_as_cancelled_though_its_answer_has_come() -> None:
    @heeds_cancellation
    async def forgetful() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "the answer"

    task = asyncio.create_task(forgetful())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_who_was_cancelled_cleans_up_by_what_heeds_cancellation() -> None:
    """Only a cancellation that comes meanwhile counts."""
    cleaned = []

    @heeds_cancellation
    async def clean(what: str) -> None:
        await asyncio.sleep(0)
        cleaned.append(what)

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await clean("first")
            await clean("second")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == ["first", "second"]


async def test_what_cannot_be_yet_is_tried_until_it_can_and_the_log_says_each_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    reasons = ["nobody there", "nobody there", "busy", "busy"]

    async def attempt() -> str:
        if reasons:
            raise PeerLost(reasons.pop(0))
        return "done"

    with caplog.at_level("INFO"):
        assert await persevere(attempt, "a friend", 0.0, PeerLost) == "done"
    assert [record.getMessage() for record in caplog.records] == ["waiting for a friend: nobody there", "waiting for a friend: busy"]


async def test_what_has_other_reasons_is_not_tried_again() -> None:
    async def attempt() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await persevere(attempt, "a friend", 0.0, PeerLost)


async def test_what_has_to_come_to_its_end_does_so_however_often_it_is_cancelled(works: Works) -> None:
    ended = asyncio.Event()

    async def work() -> str:
        await ended.wait()
        works.noted.append("ended")
        return "done"

    assert await asyncio.gather(uninterrupted(work()), _set_soon(ended)) == ["done", None]
    ended.clear()
    task = asyncio.create_task(uninterrupted(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    ended.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert works.noted == ["ended", "ended"]


async def test_what_comes_to_its_end_with_an_error_raises_it_or_logs_it_where_it_was_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(PeerLost, match="gone"):
        await uninterrupted(failing(PeerLost("gone")))
    assert not caplog.records
    task = asyncio.create_task(uninterrupted(failing(PeerLost("gone, too"))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "gone, too" in caplog.text


async def _set_soon(event: asyncio.Event) -> None:
    await asyncio.sleep(0)
    event.set()
