"""What the tests of the mixed core share: an engine that both prefills and decodes, in a world in which everything answers in any order."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

from hypothesis import strategies as st

from decode_node.core.events import StepDone, StepFailed
from decode_node.core.settings import DecodeSettings
from mixed_node.core import MixedCore
from mixed_node.core import events as ev
from mixed_node.core.actions import Action, RunMixed
from node_runtime import events
from node_runtime.events import SendUpdate
from prefill_node.core.actions import GiveWay, RunPass
from prefill_node.core.events import PassDone, PassEnded, PassFailed, PassGaveWay
from prefill_node.core.layer_stream import LayerGroups
from prefill_node.core.settings import PrefillSettings
from springtide.chunking import Chunking
from springtide.cost import DecodeCost, PrefillCost
from springtide.ids import AttemptId, NodeId
from springtide.protocol import storage
from springtide.protocol.outputs import AttemptFailed, DecodeUpdate, HandedOver, PrefillDone, SampledToken
from springtide.protocol.scheduling import PrefixSource
from springtide.protocol.starts import DecodeStart, PrefillStart
from springtide.protocol.storage import Acquire, Acquired, Commit, FetchProgress, FetchTruncated, Release, Reserved
from tests.support.any_order import POOL_FULL, OutputsInAnyOrder
from tests.support.decode_core import MOST_DRAFTED
from tests.support.node_core import BLOCK_TOKENS, EOS, INFO, make_request

CHUNK_TOKENS = 16
MAX_BATCH = 3
NUM_SLOTS = 16
PREFILL_COST, DECODE_COST = PrefillCost(1.0, 0.1, 0.0), DecodeCost(1.0, 1.0, 0.01)


def new_core(overlap: bool = False, most_drafted: int = 0, most_foretold: int = 0) -> MixedCore:
    """Blocks of 8 tokens, 4 layers, slabs of 100 bytes. A token of a prompt takes .1 ms, a step 1 ms and 1 ms for each sequence."""
    prefill = PrefillSettings(Chunking(PREFILL_COST, CHUNK_TOKENS), LayerGroups(INFO.layers, 100, 150), BLOCK_TOKENS, {EOS})
    decode = DecodeSettings(
        cost=DECODE_COST,
        block_tokens=BLOCK_TOKENS,
        max_batch=MAX_BATCH,
        eos_token_ids={EOS},
        ingest_lease_s=300.0,
        slot_wait_s=30.0,
        overlap=overlap,
        most_drafted=most_drafted,
        most_foretold=most_foretold,
    )
    return MixedCore(prefill, decode)


def own(
    name: str,
    num_tokens: int,
    *,
    session: int = 1,
    sent: int = 0,
    max_tokens: int = 40,
    tbt_slo_ms: float = 0.0,
    inlined: bool = True,
    waits: bool = False,
    idle: bool = False,
    source_blocks: int = 0,
    age_s: float = 0.0,
    refusable: bool = False,
    expected_tokens: float = 0.0,
    text: int | None = None,
) -> events.Start[DecodeStart]:
    """An output that is wanted here; `inlined`: its prompt is computed here, too."""
    request = make_request(name, num_tokens, num_prompt_tokens=num_tokens - sent, max_tokens=max_tokens, text=text)
    request = replace(request, idle=idle, age_s=age_s)
    sources = _sources(source_blocks)
    begin = DecodeStart(request, tbt_slo_ms, inlined, waits, refusable=refusable, expected_tokens=expected_tokens, sources=sources)
    return events.Start(session, begin)


def others(
    name: str,
    num_tokens: int,
    *,
    session: int = 2,
    max_tokens: int = 8,
    idle: bool = False,
    source_blocks: int = 0,
    text: int | None = None,
) -> events.Start[PrefillStart]:
    """A prompt that is wanted here; what continues it, another node decodes."""
    request = replace(make_request(name, num_tokens, max_tokens=max_tokens, text=text), idle=idle)
    return events.Start(session, PrefillStart(request, "decode:1", NodeId("decode-1"), 0.0, _sources(source_blocks)))


def _sources(num_blocks: int) -> tuple[PrefixSource, ...]:
    return (PrefixSource(NodeId("source"), "source:1", num_blocks),) if num_blocks else ()


def names_of(mixed: RunMixed) -> list[str]:
    """The attempts of its rows."""
    steps = () if mixed.step is None else mixed.step.rows
    return [*(row.attempt_id for row in steps), *(() if mixed.run is None else (row.attempt_id for row in mixed.run.rows))]


def slots_of(mixed: RunMixed) -> set[int]:
    """What its rows use."""
    steps = () if mixed.step is None else mixed.step.rows
    chunks = () if mixed.run is None else mixed.run.rows
    return {slot for row in steps for slot in row.slots} | {slot for row in chunks for slot in row.chunk.slots}


class World(OutputsInAnyOrder):
    """A store, an engine, gateways and other nodes around a core, answering in the order that hypothesis draws. What the engine computes
    lies in the slots: what is committed, or handed over, is what the keys say."""

    num_sessions = 4

    def __init__(self, data: st.DataObject, *, overlap: bool) -> None:
        super().__init__(data, new_core(overlap, data.draw(MOST_DRAFTED), data.draw(MOST_DRAFTED)), NUM_SLOTS)
        self.most = 2 if overlap else 1
        self.launched: deque[RunMixed] = deque()
        self.ended_runs: deque[ev.MixedDone] = deque()
        self.lost_runs: list[RunMixed] = []
        self.giving_way: set[int] = set()
        self.fetching: dict[str, tuple[int, int]] = {}
        """Local and reused blocks."""
        self.handing_over: list[str] = []
        self.computed: Counter[str] = Counter()
        self.leave: dict[str, int] = {}
        self.pages = data.draw(st.sampled_from([None, None, 10]), label="pages")
        self.connect()

    def connect(self) -> None:
        self.tell(events.StoreConnected(min(NUM_SLOTS, self.pages or NUM_SLOTS), self.pages))

    # ---- the core and what it does ----

    def perform(self, action: Action) -> None:
        match action:
            case RunMixed():
                names = names_of(action)
                assert names and len(set(names)) == len(names)
                assert self.pages is None or len(slots_of(action)) <= self.pages
                self.launched.append(action)
                assert len(self.launched) + len(self.ended_runs) <= self.most
            case GiveWay(pass_id):
                self.giving_way.add(pass_id)
            case SendUpdate(session, DecodeUpdate() as update):
                for done in update.prefilled:
                    self.receive(session, done.output)
                for output in update.outputs:
                    self.receive(session, output)
                for one in update.failed:
                    self.end(session, one.attempt_id)
            case SendUpdate(session, PrefillDone() as done):
                self.receive(session, done.output)
                self.computed[done.output.attempt_id] += 1
            case SendUpdate(session, AttemptFailed(name)):
                self.end(session, name)
            case SendUpdate():
                raise AssertionError(f"{action} is for nobody")
            case _:
                self.order(action)

    def order(self, order: storage.Order) -> None:
        name = order.attempt_id
        if isinstance(order, Acquire | storage.Reserve):
            self.leave[name] = order.leave_available
        if isinstance(order, Release):
            assert not any(name in names_of(run) for run in self.launched if run not in self.lost_runs)
            self.ingesting = [one for one in self.ingesting if one != name]
            self.fetching.pop(name, None)
            if order.finish_hand_over:
                self.handing_over.append(name)
            elif name in self.handing_over:
                self.handing_over.remove(name)
        if isinstance(order, storage.OpenHandOver):
            assert isinstance(self.begun[name].start, PrefillStart), "what is decoded here is handed over to nobody"
        if isinstance(order, Commit):
            self.check_committed(order)
        self.store.order(order)

    # ---- what may happen ----

    def possible(self) -> list[str]:
        choices = ["answer"] * bool(self.store.unanswered) + ["grow"] * bool(self.store.growing) + ["ingest"] * bool(self.ingesting)
        choices += ["fetch"] * bool(self.fetching) + ["hand_over"] * bool(self.handing_over)
        return choices + ["run"] * bool(self.launched) + ["end_run"] * bool(self.ended_runs)

    def start(self) -> None:
        name = f"a{len(self.begun)}"
        num_tokens = self.data.draw(st.integers(2, 60), label="num_tokens")
        idle = self.data.draw(st.integers(0, 3), label="idle") == 0
        source_blocks = self.data.draw(st.sampled_from([0, 0, 3]), label="source_blocks")
        session = self.data.draw(st.integers(0, 1), label="session")
        text = self.data.draw(st.sampled_from([1, 1, 2]), label="text")
        if self.data.draw(st.integers(0, 2), label="kind") == 0:
            max_tokens = self.data.draw(st.sampled_from([1, 8]), label="max_tokens")
            begin = others(
                name, num_tokens, session=2 + 2 * session, max_tokens=max_tokens, idle=idle, source_blocks=source_blocks, text=text
            )
            self.positions[name] = 0
        else:
            sent = self.data.draw(st.integers(0, 1), label="sent")
            inlined = self.data.draw(st.booleans(), label="inlined")
            begin = own(  # type: ignore[assignment]
                name,
                num_tokens,
                session=1 + 2 * session,
                sent=sent,
                max_tokens=self.data.draw(st.sampled_from([sent + 1, sent + 3, 30]), label="max_tokens"),
                tbt_slo_ms=self.data.draw(st.sampled_from([0.0, 5.0]), label="tbt_slo_ms"),
                inlined=inlined,
                waits=not inlined and not idle and self.data.draw(st.booleans(), label="waits"),
                idle=idle,
                source_blocks=source_blocks if inlined else 0,
                age_s=self.data.draw(st.sampled_from([0.0, 0.0, 60.0]), label="age_s"),
                refusable=not sent,
                expected_tokens=self.data.draw(st.sampled_from([0.0, 25.0]), label="expected_tokens"),
                text=text,
            )
            self.positions[name] = sent if inlined else sent + 1
        self.begun[name] = begin
        self.tell(begin)

    def lose_store(self) -> None:
        self.store.lost()
        self.ingesting.clear()
        self.fetching.clear()
        self.handing_over.clear()
        self.memory.clear()
        self.lost_runs = list(self.launched)
        self.tell(events.StoreLost("lost"))
        self.connect()

    def answer(self) -> None:
        name = self.pick(self.store.unanswered)
        order = self.store.unanswered[name]
        if len(self.store.free) < order.num_blocks + self.leave.pop(name):
            del self.store.unanswered[name]
            self.tell(AttemptFailed(name, POOL_FULL))
            return
        slots = self.store.give(name)
        if slots is None:
            self.tell(AttemptFailed(name, POOL_FULL))
        elif isinstance(order, Acquire):
            local = self.data.draw(st.integers(0, order.max_reused_blocks), label="local")
            at_source = max((source.num_blocks for source in order.sources), default=0)
            remote = max(min(at_source, order.max_reused_blocks) - local, 0)
            self.write_prompt(name, slots, (local + remote) * BLOCK_TOKENS)
            self.store.committed[name] = local + remote
            if remote:
                self.fetching[name] = local, local + remote
            self.tell(Acquired(name, slots, local, remote))
        else:
            self.ingesting.append(name)
            self.tell(Reserved(name, slots, 0))

    def fetch(self) -> None:
        name = self.pick(self.fetching)
        local, reused = self.fetching.pop(name)
        if self.data.draw(st.integers(0, 2), label="arrives"):
            self.tell(FetchProgress(name, INFO.layers))
            return
        valid = self.data.draw(st.integers(local, reused), label="valid")
        self.store.committed[name] = valid
        for slot in self.store.held[name][valid:]:
            self.memory[slot] = {}
        self.tell(FetchTruncated(name, valid))

    def hand_over(self) -> None:
        name = AttemptId(self.handing_over.pop(0))
        self.store.handing_over.discard(name)
        self.tell(HandedOver(name, 1))

    def run(self) -> None:
        """The engine does; the core does not hear of it yet."""
        mixed = self.launched.popleft()
        gone = mixed in self.lost_runs
        if self.data.draw(st.integers(0, 19), label="fails") == 19:
            step = None if mixed.step is None else StepFailed(mixed.step.step_id, "by the test")
            self.ended_runs.append(ev.MixedDone(step, None if mixed.run is None else PassFailed(mixed.run.pass_id, "by the test")))
            return
        ran: PassEnded | None = None
        if mixed.run is not None:
            ran = self.run_pass(mixed.run, gone, alone=mixed.step is None)
        stepped: StepDone | None = None
        if mixed.step is not None:
            sampled, drafted = zip(*(self.compute(row, gone) for row in mixed.step.rows), strict=True)
            stepped = StepDone(mixed.step.step_id, sampled, self.data.draw(st.sampled_from([1.0, 30.0]), label="ms"), drafted=drafted)
        self.ended_runs.append(ev.MixedDone(stepped, ran))

    def run_pass(self, run: RunPass, gone: bool, *, alone: bool) -> PassEnded:
        if run.pass_id in self.giving_way and self.data.draw(st.booleans(), label="gives way"):
            assert alone
            return PassGaveWay(run.pass_id)
        assert run.awaits is None, "nobody's step waits for a prefix"
        sampled: list[SampledToken | None] = []
        for row in run.rows:
            if not gone:
                assert self.store.may_use(row.attempt_id, row.chunk.slots)
                for place, token_id in enumerate(row.chunk.token_ids):
                    self.write(row.chunk.slots, row.chunk.start + place, token_id)
            sampled.append(None if row.sampling is None else SampledToken(self.token(row.attempt_id)))
        return PassDone(run.pass_id, sampled, 2.0)

    def end_run(self) -> None:
        self.tell(self.ended_runs.popleft())
