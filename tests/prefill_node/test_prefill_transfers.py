"""What a prefill node says of each prompt: how much of its transfers was hidden."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from messenger.tcp.transport import TcpTransport
from prefill_node.server.transfers import PromptTransfers
from springtide.ids import AttemptId
from springtide.protocol.outputs import Finish, HandedOver, PrefillDone, SampledToken, TokenOutput
from springtide.protocol.sampling import SamplingParams
from tests.support.engine_nodes import EngineNodes
from tests.support.faulty_transport import FaultyTransport
from tests.support.models import make_tiny_llama
from tests.support.node_core import make_request
from tests.support.transport_faults import FaultPlan, TransferFault
from tests.support.waiting import until

LOGGER = "prefill_node.server.transfers"
FETCH = re.compile(r"fetch (\S+) ms, (\S+) ms waited for, (\d+)% hidden")
HAND_OVER = re.compile(r"hand-over (\S+) ms .*, (\S+) ms writing (\S+) MB, (\S+) ms waited for after the first token, (\d+)% hidden")


def done(attempt_id: str, finish: Finish | None = None, **fields: float) -> PrefillDone:
    output = TokenOutput(AttemptId(attempt_id), 0, (SampledToken(7),), finish)
    counts: dict[str, Any] = {"cached_tokens": 64, "remote_tokens": 48, **fields}
    return PrefillDone(output, queue_ms=1.0, compute_ms=250.0, **counts)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    caplog.set_level(logging.INFO, LOGGER)
    handler = Lines()
    logging.getLogger(LOGGER).addHandler(handler)
    yield handler.records
    logging.getLogger(LOGGER).removeHandler(handler)


def test_the_line_of_a_prompt_says_what_of_each_transfer_was_waited_for(lines: list[logging.LogRecord]) -> None:
    transfers = PromptTransfers()
    transfers.started(make_request("a", 200))
    transfers.computed(done("a", fetch_ms=80.0, fetch_wait_ms=20.0), 5.0)
    assert lines == [], "it is said when all of it is known"
    transfers.handed_over(HandedOver("a", 3_000_000, span_ms=300.0, write_ms=50.0), 5.005)
    (line,) = lines
    assert (line.request_id, line.attempt_id) == ("req-a", "a")  # type: ignore[attr-defined]
    assert line.levelno == logging.INFO
    assert line.getMessage() == (
        "prefill: 136 tokens computed, 64 cached, 48 of them from elsewhere; 1.0 ms queued, 250.0 ms computing; "
        "fetch 80.0 ms, 20.0 ms waited for, 75% hidden; "
        "hand-over 300.0 ms from the first write to the last acknowledged, 50.0 ms writing 3.0 MB, 5.0 ms waited for after the first "
        "token, 90% hidden"
    )


def test_a_transfer_that_was_waited_for_longer_than_it_took_was_not_hidden(lines: list[logging.LogRecord]) -> None:
    transfers = PromptTransfers()
    transfers.started(make_request("a", 200))
    transfers.computed(done("a"), 5.0)
    transfers.handed_over(HandedOver("a", 1000, span_ms=1.0, write_ms=1.0), 5.004)
    assert " 0% hidden" in lines[0].getMessage()


def test_prompts_without_a_transfer_say_so(lines: list[logging.LogRecord]) -> None:
    transfers = PromptTransfers()
    for name in ("one token", "had it", "broken off", "in vain", "never computed"):
        transfers.started(make_request(name, 200))
    transfers.computed(done("one token", finish=Finish.STOP), 5.0)
    transfers.computed(done("had it"), 5.0)
    transfers.handed_over(HandedOver("had it", 0), 5.1)
    transfers.computed(done("broken off"), 5.0)
    transfers.keep({"in vain"})
    transfers.computed(done("in vain", fetch_wait_ms=12.0), 5.0)
    transfers.keep(())
    said = {line.attempt_id: line.getMessage() for line in lines}  # type: ignore[attr-defined]
    assert said["one token"].endswith("; no fetch; no hand-over, for the first token was the last")
    assert said["had it"].endswith("; no fetch; nothing to hand over, for the decode node had it")
    assert said["broken off"].endswith("; the hand-over broke off")
    assert "; a fetch of which nothing came, 12.0 ms waited for; " in said["in vain"]
    assert "never computed" not in said and not any("hidden" in message for message in said.values())


BLOCK_TOKENS = 16
SLAB_BYTES = 2 * BLOCK_TOKENS * 2 * 16 * 4
SLOW = SLAB_BYTES * 20 / 0.05
"""Bytes a second: a layer of 20 blocks in a twentieth of a second."""
PROMPT = [10 + i % 200 for i in range(333)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("stages", [1, 2])
async def test_what_a_slow_network_takes_is_in_the_line_whatever_the_stages(
    tmp_path: Path, stages: int, lines: list[logging.LogRecord]
) -> None:
    """First nothing is slow, then a fetch that there is no other work to hide behind, then a hand-over."""
    model = make_tiny_llama(tmp_path / "tiny", num_hidden_layers=4)
    read = FaultPlan([TransferFault("slow", "read", bytes_per_s=SLOW)])
    write = FaultPlan([TransferFault("slow", "write", bytes_per_s=SLOW)])
    read.armed = write.armed = False
    kv = {"block_tokens": BLOCK_TOKENS, "arena_size": "8MiB", "layer_group_size": 4 << 10, "transports": ["tcp"]}
    settings = {"chunk_tokens": 64, "stages": stages}

    def network(name: str, arena: object) -> FaultyTransport:
        return FaultyTransport(FaultyTransport(TcpTransport(), read), write)

    def figures(pattern: re.Pattern[str]) -> list[float]:
        found = pattern.search(lines[-1].getMessage())
        assert found is not None, lines[-1].getMessage()
        return [float(figure) for figure in found.groups()]

    async with EngineNodes(tmp_path, model, make_transport=network, kv=kv, decode=2, prefill_node=settings) as nodes:
        await nodes.gateway.run(PROMPT, GREEDY)
        await until(lambda: len(lines) == 1)
        assert "333 tokens computed, 0 cached, 0 of them" in lines[0].getMessage() and "no fetch" in lines[0].getMessage()
        span_ms, write_ms, megabytes, waited_ms, _ = figures(HAND_OVER)
        assert 0 < write_ms <= span_ms and waited_ms > 0 and megabytes == pytest.approx(21 * 4 * SLAB_BYTES / 1e6, abs=0.05)

        before = nodes.members["prefill-0"].incarnation
        await nodes.stores["prefill-0"].close()
        await nodes.start_store("prefill-0")
        nodes.members["prefill-0"] = await nodes.member("prefill-0", other_than=before)
        read.armed = True
        began = time.monotonic()
        outcome = await nodes.gateway.run(PROMPT, GREEDY, source="decode-0")
        run_ms = 1000 * (time.monotonic() - began)
        await until(lambda: len(lines) == 2)
        fetch_ms, waited_ms, hidden = figures(FETCH)
        assert outcome.done is not None
        assert [fetch_ms, waited_ms] == pytest.approx([outcome.done.fetch_ms, outcome.done.fetch_wait_ms], abs=0.06)
        # The wait is for the store's word too, which on a busy machine comes later than the last byte.
        assert fetch_ms >= 200 and 0 < waited_ms <= run_ms and hidden == pytest.approx(max(0.0, 100 * (1 - waited_ms / fetch_ms)), abs=1)

        read.armed, write.armed = False, True
        await nodes.gateway.run(PROMPT[::-1], GREEDY, on=("prefill-0", "decode-1"))
        await until(lambda: len(lines) == 3)
        _, write_ms, _, waited_ms, hidden = figures(HAND_OVER)
        assert write_ms >= 200 and hidden == pytest.approx(max(0.0, 100 * (1 - waited_ms / write_ms)), abs=1)
