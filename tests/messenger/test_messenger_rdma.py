"""The rdma transport: what needs no device, then real queue pairs on the devices of the virtual machine of `make test-rdma`, where
rxe0 and rxe1 are on networks of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from messenger_support import GRANULE, NUM_GRANULES, RDMA_OPTIONS, TIMEOUT_S, Node, PeerProcess, Workshop, fill, random_batch, until, whole

from messenger.base import Connection, Endpoint, InvalidSlice, Slice, WrongSecret
from messenger.metered import MeteredConnection
from messenger.options import RdmaOptions
from messenger.rdma import verbs
from messenger.rdma.connection import RdmaConnection
from messenger.rdma.control import ControlClient
from messenger.rdma.lane import STRIPES_IN_FLIGHT, GenerationCheck, RdmaLane
from messenger.rdma.nic import DeviceMemory, Registration
from messenger.rdma.notices import MAILBOX_BYTES, MAX_NOTIFY_BYTES
from messenger.rdma.path import PathLost, RdmaPath
from messenger.rdma.plan import make_plan
from messenger.rdma.ports import GidEntry, LinkLayer, PortAddress, choose_gid, find_ports, pair_ports
from messenger.rdma.proofs import LIFETIME_S, Nonces, proof_of
from messenger.rdma.queue_pair import Opcode, WorkCompletion, WorkRequest
from messenger.rdma.transfer import RdmaTransfer, TransferAbandoned
from messenger.rdma.transport import RdmaTransport
from messenger.rdma.verbs import RdmaUnavailable
from messenger.router import Messenger
from messenger.tcp.transport import TcpTransport
from springtide.errors import ConfigError, PeerLost, SpringtideError
from springtide.rpc import rdma_pb2 as pb

IPV4, GLOBAL, LOCAL = "0000:0000:0000:0000:0000:ffff:0a63:0001", "2001:0db8:" + "0000:" * 5 + "0001", "fe80:" + "0000:" * 6 + "0001"


def address(link: LinkLayer) -> PortAddress:
    return PortAddress(link, IPV4, 0, 5)


# ---- what needs no device


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([GidEntry(0, True, LOCAL), GidEntry(1, False, IPV4), GidEntry(2, True, IPV4)], 2),
        ([GidEntry(0, True, LOCAL), GidEntry(5, True, GLOBAL)], 5),
        ([GidEntry(0, False, LOCAL), GidEntry(1, True, LOCAL)], 1),
        ([GidEntry(0, False, IPV4)], None),
        ([], None),
    ],
)
def test_a_roce_port_is_reached_at_its_most_routable_version_2_address(rows: list[GidEntry], chosen: int | None) -> None:
    row = choose_gid(rows, LinkLayer.ETHERNET)
    assert (row.index if row else None) == chosen


def test_an_infiniband_port_is_reached_at_its_first_address() -> None:
    row = choose_gid([GidEntry(1, False, GLOBAL), GidEntry(0, False, LOCAL)], LinkLayer.INFINIBAND)
    assert row is not None and row.index == 0


def test_ports_are_paired_in_order_and_by_kind_of_link() -> None:
    ethernet, infiniband = address(LinkLayer.ETHERNET), address(LinkLayer.INFINIBAND)
    assert pair_ports([ethernet] * 2, [ethernet] * 2) == [(0, 0), (1, 1)]
    assert pair_ports([ethernet], [ethernet] * 3) == [(0, 0), (0, 1), (0, 2)]
    assert pair_ports([ethernet, infiniband, ethernet], [infiniband, ethernet]) == [(1, 0), (0, 1), (2, 1)]
    assert pair_ports([ethernet], [infiniband]) == []


@pytest.mark.parametrize("seed", range(20))
def test_generations_are_compared_however_they_are_scattered(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(50):
        count = int(rng.integers(1, 129))
        granules = rng.integers(0, int(rng.integers(1, 2000)), count)
        generations = rng.integers(0, 1000, 2000).astype(np.uint64)
        wanted, wrong = generations[granules], rng.random(count) < 0.2
        wanted[wrong] += np.uint64(1)
        check = GenerationCheck(granules, wanted)
        answer = np.full(GenerationCheck.most_words(count), 5000, np.uint64)
        for first, place, number in check.runs:
            answer[place : place + number] = generations[first : first + number]
        assert np.array_equal(check.stale(answer), wrong)


def test_a_proof_fits_one_message_one_direction_and_one_connection() -> None:
    proofs = {
        proof_of(secret, role, caller, server, message)
        for secret in (b"a" * 16, b"b" * 16)
        for role in ("offer", "answer")
        for caller, server in ((b"1", b"22"), (b"12", b"2"), (b"22", b"1"))
        for message in (b"", b"x")
    }
    assert len(proofs) == 24
    assert proof_of(None, "offer", b"1", b"2", b"x") == b""


def test_nonces_are_good_for_one_proof_each_and_for_a_while() -> None:
    nonces, others = Nonces(), Nonces()
    first, *crowd = [nonces.make(100.0) for _ in range(5000)]
    assert nonces.use(first, 100.0 + LIFETIME_S)
    assert not nonces.use(first, 100.0 + LIFETIME_S)
    assert not nonces.use(crowd[0], 100.1 + LIFETIME_S)
    assert not nonces.use(first, 1000.0)
    for forged in (b"", bytes(len(first)), others.make(100.0), first[:-1] + bytes([first[-1] ^ 1])):
        assert not nonces.use(forged, 100.0)


class NicWithoutDevice:
    def register(self, memory: np.ndarray, *, peers_read: bool, peers_write: bool) -> Registration:
        return Registration(0, memory.nbytes, 0, 0)


async def test_a_batch_that_is_given_up_does_not_wait_for_its_turn() -> None:
    lane = RdmaLane(None, NicWithoutDevice(), Registration(0, 0, 0, 0), None)  # type: ignore[arg-type]
    transfer = RdmaTransfer(Opcode.READ, make_plan((), 0, 0, 1, 1))
    async with contextlib.AsyncExitStack() as busy:
        for _ in range(STRIPES_IN_FLIGHT):
            await busy.enter_async_context(lane.turn(transfer.unless_abandoned))

        async def take_turn() -> None:
            async with lane.turn(transfer.unless_abandoned):
                raise AssertionError("there was none to be had")

        waiting = asyncio.create_task(take_turn())
        await asyncio.sleep(0)
        transfer.abandon()
        with pytest.raises(TransferAbandoned):
            await waiting


class PairWithoutDevice:
    """One of which nothing comes back but what the test says."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0)
        self.done: list[WorkCompletion] = []
        self.posted = 0

    def post(self, work: Sequence[WorkRequest], work_id: int) -> None:
        self.posted = work_id

    def poll(self, most: int) -> list[WorkCompletion]:
        done, self.done = self.done, []
        return done

    def close(self) -> None:
        os.close(self.fd)


async def test_a_path_is_lost_by_silence_and_not_by_a_stop_of_this_process() -> None:
    pair, lost = PairWithoutDevice(), list[SpringtideError]()
    path = RdmaPath(pair, "a path", lambda *message: None, lambda path, error: lost.append(error), silence_s=0.4)  # type: ignore[arg-type]
    working = path.post([WorkRequest(Opcode.WRITE)])
    asyncio.get_running_loop().call_soon(time.sleep, 0.6)  # nothing of this process runs
    await asyncio.sleep(0.7)
    pair.done.append(WorkCompletion(pair.posted, None, False, 0, 0, False))
    await working
    assert path.is_open
    await until(lambda: not path.is_open)
    assert [type(error) for error in lost] == [PathLost]


class PairOfADeviceThatIsGone(PairWithoutDevice):
    """Of which the driver answers nothing but errors."""

    def arm(self) -> None:
        raise SpringtideError("mlx5_0 does not announce completions")

    def poll(self, most: int) -> list[WorkCompletion]:
        raise SpringtideError("mlx5_0 does not tell what is completed")

    def take_event(self) -> None:
        os.eventfd_read(self.fd)


@pytest.mark.parametrize("how", ["an event", "a look"])
async def test_a_path_is_lost_when_its_device_is_gone(how: str) -> None:
    pair, lost = PairOfADeviceThatIsGone(), list[SpringtideError]()
    silence_s = 0.4 if how == "a look" else 3600.0
    path = RdmaPath(pair, "a path", lambda *message: None, lambda path, error: lost.append(error), silence_s)  # type: ignore[arg-type]
    working = path.post([WorkRequest(Opcode.WRITE)])
    if how == "an event":
        os.eventfd_write(pair.fd, 1)
    with pytest.raises(PathLost, match="a path: mlx5_0 does not"):
        await asyncio.wait_for(working, 20)
    assert [type(error) for error in lost] == [PathLost]


def test_a_machine_without_devices_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("messenger.rdma.ports.kernel_devices", list)
    with pytest.raises(RdmaUnavailable, match="no RDMA device"):
        RdmaTransport()


def test_a_machine_without_pyverbs_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("messenger.rdma.ports.kernel_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr("messenger.rdma.verbs.importlib.import_module", missing)
    verbs.load.cache_clear()
    with pytest.raises(RdmaUnavailable, match=r"springtide\[rdma\].*No module named 'pyverbs"):
        find_ports()


# ---- with devices


@pytest.fixture
async def rdma(tmp_path: Path) -> AsyncIterator[Workshop]:
    made = Workshop("rdma", tmp_path)
    yield made
    await made.close()


@pytest.fixture
def two_networks() -> Iterator[None]:
    if not {"rxe0", "rxe1"} <= set(os.listdir("/sys/class/infiniband")):
        pytest.skip("needs the software devices rxe0 and rxe1")
    yield
    for number in (0, 1):
        set_link(number, "up")


def set_link(number: int, state: str) -> None:
    subprocess.run(["ip", "link", "set", f"roce{number}", state], check=True)


def packets(device: str) -> int:
    return int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts").read_text())


def sessions(node: Node) -> Mapping[bytes, object]:
    assert isinstance(node.transport, RdmaTransport) and node.transport._sessions is not None
    return node.transport._sessions._sessions


async def connect(here: Node, there: Node) -> RdmaConnection:
    connection = await here.connect(there.endpoint)
    assert isinstance(connection, RdmaConnection)
    return connection


def lanes(connection: RdmaConnection) -> list[RdmaLane]:
    return [joined.lane for joined in connection._lanes.values()]


@pytest.mark.rdma
async def test_a_large_batch_goes_over_both_nics(rdma: Workshop, two_networks: None) -> None:
    here, there = await rdma.node("here"), await rdma.node("there")
    connection = await connect(here, there)
    theirs = fill(there, 1)
    before = [packets("rxe0"), packets("rxe1")]
    await connection.read([whole(there, granule) for granule in range(NUM_GRANULES)], TIMEOUT_S)
    sent = [packets("rxe0") - before[0], packets("rxe1") - before[1]]
    assert np.array_equal(here.bytes, theirs)
    assert min(sent) > sum(sent) / 10


@pytest.mark.rdma
async def test_a_device_that_is_named_is_the_only_one_used(rdma: Workshop, two_networks: None) -> None:
    here, there = (
        await rdma.node("here"),
        await rdma.node("there", transport=RdmaTransport(options=replace(RDMA_OPTIONS, devices=("rxe1:1",)))),
    )
    before = packets("rxe1")
    connection = await connect(here, there)
    await connection.read([whole(there, 0)], TIMEOUT_S)
    assert packets("rxe1") > before + GRANULE // 4096
    with pytest.raises(RdmaUnavailable, match=r"'mlx5_7'.*rxe0:1"):
        RdmaTransport(options=RdmaOptions(devices=("mlx5_7",)))


@pytest.mark.rdma
@pytest.mark.parametrize("seed", [1, 2])
async def test_thousands_of_slices_go_both_ways(rdma: Workshop, seed: int) -> None:
    here, there = await rdma.node("here"), await rdma.node("there")
    connection = await connect(here, there)
    mine, theirs = fill(here, seed), fill(there, seed + 10)
    batch = random_batch(np.random.default_rng(seed), here, there, 6000, 200)
    half = len(batch) // 2
    read, written = await asyncio.gather(connection.read(batch[:half], TIMEOUT_S), connection.write(batch[half:], TIMEOUT_S))
    assert not read.failed and not written.failed
    for piece in batch[:half]:
        mine[piece.local_offset :][: piece.length] = theirs[piece.remote_offset :][: piece.length]
    for piece in batch[half:]:
        theirs[piece.remote_offset :][: piece.length] = mine[piece.local_offset :][: piece.length]
    assert np.array_equal(here.bytes, mine) and np.array_equal(there.bytes, theirs)


@pytest.mark.rdma
@pytest.mark.parametrize("number", [0, 1])
async def test_when_a_nic_loses_its_link_its_work_is_done_by_the_other(rdma: Workshop, two_networks: None, number: int) -> None:
    """Writes with notifications and reads go on all the while: nothing fails, nothing is wrong, every notification comes once, in order."""
    here, there = await rdma.node("here"), await rdma.node("there")
    connection = await connect(here, there)
    half = NUM_GRANULES // 2
    mine, theirs = fill(here, 1), fill(there, 2)
    payloads: list[bytes] = []
    reads = 0

    async def write() -> None:
        while len(connection._lanes) == 2 or len(payloads) < 6:
            payloads.append(b"%d" % len(payloads))
            there.bytes[: half * GRANULE] = 0
            completion = await connection.write([whole(there, granule) for granule in range(half)], TIMEOUT_S, notify=payloads[-1])
            assert completion.num_bytes == half * GRANULE
            assert np.array_equal(there.bytes[: half * GRANULE], mine[: half * GRANULE])

    async def read() -> None:
        nonlocal reads
        while len(connection._lanes) == 2 or reads < 6:
            here.bytes[half * GRANULE :] = 0
            await connection.read([whole(there, granule) for granule in range(half, NUM_GRANULES)], TIMEOUT_S)
            assert np.array_equal(here.bytes[half * GRANULE :], theirs[half * GRANULE :])
            reads += 1

    moving = asyncio.gather(write(), read())
    await until(lambda: len(payloads) > 1 or moving.done())
    set_link(number, "down")
    await moving
    assert connection.is_open
    assert await there.noted(len(payloads)) == payloads


@pytest.mark.rdma
async def test_a_link_that_comes_back_is_used_again(rdma: Workshop, two_networks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("messenger.rdma.connection._RESTORE_S", 0.2)
    here, there = await rdma.node("here"), await rdma.node("there")
    connection = await connect(here, there)
    set_link(1, "down")
    await until(lambda: len(connection._lanes) == 1)
    set_link(1, "up")
    await until(lambda: len(connection._lanes) == 2)
    theirs, before = fill(there, 1), packets("rxe1")
    await connection.read([whole(there, granule) for granule in range(NUM_GRANULES)], TIMEOUT_S)
    assert np.array_equal(here.bytes, theirs)
    assert packets("rxe1") > before + GRANULE // 4096
    assert len(sessions(there)) == 1


@pytest.mark.rdma
async def test_without_any_link_the_peer_is_lost_and_the_next_connection_is_by_tcp(rdma: Workshop, two_networks: None) -> None:
    here, there = await rdma.node("here"), await rdma.node("there")
    far, near = (
        Messenger([RdmaTransport(options=RDMA_OPTIONS), TcpTransport()], node.memory.region, node.name, node.identity.incarnation, handler)
        for node, handler in ((there, there.on_notify), (here, here.on_notify))
    )
    endpoint = await far.start()
    await near.start()
    try:
        connection = await near.connect(endpoint)
        assert isinstance(connection, MeteredConnection) and connection.transport == "rdma"
        for number in (0, 1):
            set_link(number, "down")
        with pytest.raises(PeerLost, match="no path is left"):
            await connection.write([whole(there, 0)], TIMEOUT_S)
        again = await near.connect(endpoint)
        assert isinstance(again, MeteredConnection) and again.transport == "tcp"
        assert (await again.write([whole(there, 0)], TIMEOUT_S, notify=b"by tcp")).num_bytes == GRANULE
    finally:
        await near.close()
        await far.close()


@pytest.mark.rdma
async def test_a_wrong_key_ends_its_own_connection_and_no_other(rdma: Workshop) -> None:
    here, other, there = await rdma.node("here"), await rdma.node("other"), await rdma.node("there")
    connection, unharmed = await connect(here, there), await connect(other, there)
    for lane in lanes(connection):
        forged = replace(lane.remote.memory, key=lane.remote.memory.key ^ 0x5500)
        lane.remote = replace(lane.remote, memory=forged)
    theirs = fill(there, 3)
    with pytest.raises(PeerLost, match="REM_ACCESS_ERR"):
        await connection.write([whole(there, 1)], TIMEOUT_S)
    assert not connection.is_open
    assert np.array_equal(there.bytes, theirs)
    assert (await unharmed.read([whole(there, 1)], TIMEOUT_S)).num_bytes == GRANULE


@pytest.mark.rdma
async def test_a_peer_can_read_generations_and_not_write_them(rdma: Workshop) -> None:
    here, there = await rdma.node("here"), await rdma.node("there")
    connection = await connect(here, there)
    for lane in lanes(connection):
        lane.remote = replace(lane.remote, memory=lane.remote.generations)
    before = there.generations.copy()
    with pytest.raises(PeerLost, match="REM_ACCESS_ERR"):
        await connection.write([Slice(0, 0, 8, 1)], TIMEOUT_S)
    assert np.array_equal(there.generations, before)


@pytest.mark.rdma
async def test_long_notifications_come_whole_and_too_long_ones_are_refused(rdma: Workshop) -> None:
    here, there = await rdma.node("here"), await rdma.node("there")
    connection = await connect(here, there)
    sizes = [0, 1, 64, 65, MAILBOX_BYTES, MAILBOX_BYTES + 1, MAX_NOTIFY_BYTES]
    payloads = [np.random.default_rng(size).bytes(size) for size in sizes]
    await asyncio.gather(*(connection.write([], TIMEOUT_S, notify=payload) for payload in payloads))
    assert await there.noted(len(sizes)) == payloads
    with pytest.raises(InvalidSlice, match=str(MAX_NOTIFY_BYTES)):
        await connection.write([], TIMEOUT_S, notify=bytes(MAX_NOTIFY_BYTES + 1))


@pytest.mark.rdma
async def test_what_was_made_for_a_peer_goes_with_it(rdma: Workshop, tmp_path: Path) -> None:
    here, there = await rdma.node("here"), await rdma.node("there")
    connection = await connect(here, there)
    assert len(sessions(there)) == 1
    await connection.close()
    assert len(sessions(there)) == 0
    peer = await PeerProcess.start("rdma", tmp_path, connect_to=there.endpoint)
    try:
        await until(lambda: len(sessions(there)) == 1)
    finally:
        await peer.kill()
    await until(lambda: len(sessions(there)) == 0)


SECRET = b"sixteen bytes or more"


@pytest.mark.rdma
@pytest.mark.parametrize(
    ("mine", "theirs", "welcome"), [(SECRET, SECRET, True), (SECRET, b"another" * 4, False), (None, SECRET, False), (SECRET, None, False)]
)
async def test_only_who_knows_the_secret_gets_a_queue_pair(rdma: Workshop, mine: bytes | None, theirs: bytes | None, welcome: bool) -> None:
    there = await rdma.node("there", transport=RdmaTransport(options=replace(RDMA_OPTIONS, secret=theirs)))
    here = await rdma.node("here", transport=RdmaTransport(options=replace(RDMA_OPTIONS, secret=mine)))
    if welcome:
        assert (await (await connect(here, there)).read([whole(there, 0)], TIMEOUT_S)).num_bytes == GRANULE
    else:
        with pytest.raises(WrongSecret, match="cluster_secret"):
            await connect(here, there)
        assert len(sessions(there)) == 0


@pytest.mark.rdma
async def test_a_recorded_offer_is_worthless(rdma: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    there = await rdma.node("there", transport=RdmaTransport(options=replace(RDMA_OPTIONS, secret=SECRET)))
    here = await rdma.node("here", transport=RdmaTransport(options=replace(RDMA_OPTIONS, secret=SECRET)))
    recorded: list[pb.SignedRdmaOffer] = []
    call = ControlClient._call

    async def record(self: ControlClient, method: object, message: object, timeout_s: float, wait_for_ready: bool = False) -> object:
        if isinstance(message, pb.SignedRdmaOffer):
            recorded.append(message)
        return await call(self, method, message, timeout_s, wait_for_ready)

    monkeypatch.setattr(ControlClient, "_call", record)
    await (await connect(here, there)).close()
    client = ControlClient(there.endpoint.addresses["rdma"], RdmaOptions())
    with pytest.raises(WrongSecret):
        await call(client, client._stub.Connect, recorded[0], 1.0)
    await client.close()
    assert len(sessions(there)) == 0


@pytest.mark.rdma
async def test_other_hosts_are_not_spoken_with_without_a_secret(rdma: Workshop) -> None:
    here = await rdma.node("here")
    transport = RdmaTransport("0.0.0.0")
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0.*cluster_secret"):
        await transport.listen(here.memory.region, here.identity, here.on_notify)
    await transport.close()
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7.*cluster_secret"):
        await here.connect(Endpoint("elsewhere", 1, {"rdma": "192.0.2.7:1"}))


@pytest.mark.rdma
async def test_device_memory_that_a_nic_cannot_reach_is_refused_by_name(rdma: Workshop) -> None:
    """Software devices have no dma-buf: that a driver does is not to be seen here."""
    there, here = await rdma.node("there"), await rdma.node("here")
    exported = os.memfd_create("not-a-dma-buf")
    transport = RdmaTransport(device_memory=DeviceMemory(exported, 0))
    with pytest.raises(ValueError, match="device memory"):
        await transport.listen(here.memory.region, here.identity, here.on_notify)
    with pytest.raises(PeerLost, match=r"rxe0:1 cannot register \d+ bytes of device memory.*pinned arena"):
        await transport.connect(there.endpoint, here.memory.region, here.identity)
    await transport.close()
    os.close(exported)
    assert len(sessions(there)) == 0


@pytest.mark.rdma
async def test_closing_in_the_middle_of_everything_leaves_no_task_behind(rdma: Workshop) -> None:
    here, there = await rdma.node("here"), await rdma.node("there")
    connection: Connection = await connect(here, there)
    moving = [asyncio.create_task(connection.write([whole(there, n)], TIMEOUT_S, notify=b"x")) for n in range(NUM_GRANULES)]
    await until(lambda: bool(there.notes))
    await there.transport.close()
    await connection.close()
    results = await asyncio.gather(*moving, return_exceptions=True)
    assert all(isinstance(result, PeerLost) or not isinstance(result, BaseException) for result in results)
    await until(lambda: not any(task.get_name().startswith(("notification", "leave a path", "release")) for task in asyncio.all_tasks()))
