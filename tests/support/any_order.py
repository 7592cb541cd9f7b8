"""What the worlds around the cores of engines share, in which everything answers in the order that hypothesis draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from decode_node.core.actions import StepRow
from node_runtime import events
from springtide.blocks import block_keys
from springtide.clock import Tick
from springtide.ids import AttemptId
from springtide.protocol import storage
from springtide.protocol.outputs import AttemptFailed, FailureCode, SampledToken, TokenOutput
from springtide.protocol.starts import AbortAttempt, ForetellTokens
from tests.support.node_core import BLOCK_TOKENS, EOS, NAMESPACE, StoreLedger, failure

POOL_FULL = failure(FailureCode.POOL_FULL)
WRONG = 99
"""A guess that no token turns out to be."""


class AnyOrder(ABC):
    """A core, its store, and what is done with its actions."""

    def __init__(self, data: st.DataObject, core: Any, num_slots: int) -> None:
        self.data = data
        self.core = core
        self.num_slots = num_slots
        self.store = StoreLedger(num_slots)
        self.now = 0.0

    @abstractmethod
    def perform(self, action: Any) -> None:
        """What the core wants is done, or will be when it is drawn."""

    def tell(self, event: Any) -> None:
        self.now += 0.01
        actions = self.core.handle(event, self.now)
        self.core.validate()
        for action in actions:
            self.perform(action)

    def pick(self, names: Iterable[str]) -> AttemptId:
        return AttemptId(self.data.draw(st.sampled_from(sorted(names)), label="which"))

    def quiet(self) -> None:
        self.tell(events.Quiet(self.data.draw(st.booleans(), label="quiet")))

    def tick(self) -> None:
        self.tell(Tick())
        self.tell(storage.StoreLoad(len(self.store.free), len(self.store.free)))


class OutputsInAnyOrder(AnyOrder):
    """Outputs come of it, and what is computed lies in the slots: what is committed is what the keys say."""

    num_sessions: int

    def __init__(self, data: st.DataObject, core: Any, num_slots: int) -> None:
        super().__init__(data, core, num_slots)
        self.memory: dict[int, dict[int, int]] = defaultdict(dict)
        """The tokens whose KV each slot holds, by their place in it."""
        self.ingesting: list[str] = []
        self.begun: dict[str, events.Start] = {}  # type: ignore[type-arg]
        self.positions: dict[str, int] = {}
        self.sampled: defaultdict[str, list[list[int]]] = defaultdict(list)
        """What came of each step, or prompt, of an attempt."""
        self.ended: Counter[str] = Counter()
        self.excused: set[str] = set()
        """Aborted, or over with their first token: no terminal message is due."""

    @abstractmethod
    def possible(self) -> list[str]:
        """What may happen next, of what was begun."""

    def play(self) -> None:
        """Whatever comes, in any order, until all of it has ended. Asserts that all slots are back."""
        for _ in range(self.data.draw(st.integers(1, 100), label="steps")):
            choices = [
                *self.possible() * 3,
                "start",
                "start",
                "tick",
                "quiet",
                *(["abort", "abort", "end_session", "lose_store", *["foretell"] * 3] if self.begun else []),
            ]
            getattr(self, self.data.draw(st.sampled_from(choices), label="next"))()
        self.tell(events.Quiet(False))
        for _ in range(3000):
            choices = self.possible()
            if choices:
                getattr(self, choices[0])()
            elif self.core.has_work:
                self.now += 31.0
                self.tick()
            else:
                break
        assert not self.core.has_work
        assert self.store.held == {} and len(self.store.free) == self.num_slots

    def foretell(self) -> None:
        """The gateway does, of an attempt that may have ended: tokens that may be wrong, and some may be lacking before them."""
        name, position = self.pick(self.begun), self.data.draw(st.integers(0, 40), label="position")
        self.tell(ForetellTokens(AttemptId(name), position, (7,) * self.data.draw(st.integers(1, 20), label="foretold")))

    def check_committed(self, commit: storage.Commit) -> None:
        """What is in the slots is what the keys say."""
        last_block = commit.first_block + len(commit.keys)
        slots = self.store.held[commit.attempt_id][:last_block]
        tokens = [self.memory[slot][place] for slot in slots for place in range(BLOCK_TOKENS)]
        assert tuple(block_keys(NAMESPACE, tokens, BLOCK_TOKENS))[commit.first_block :] == commit.keys

    def receive(self, session: int, output: TokenOutput) -> None:
        name = output.attempt_id
        self.due(session, name)
        if output.finish is not None:
            self.ended[name] += 1
        assert output.position == self.positions[name]
        came = self.sampled[name].pop(0)
        end = came.index(EOS) if EOS in came else min(len(came), self.begun[name].start.request.params.max_tokens - output.position)
        assert [token.token_id for token in output.tokens] == came[:end]
        self.positions[name] += len(came)

    def end(self, session: int, name: str) -> None:
        """It is over without any more of an output."""
        self.due(session, name)
        self.ended[name] += 1

    def due(self, session: int, name: str) -> None:
        assert self.begun[name].session == session and name not in self.excused and not self.ended[name]

    def abort(self) -> None:
        name = self.pick(self.begun)
        self.excused |= {name} - set(self.ended)
        self.tell(AbortAttempt(name))

    def end_session(self) -> None:
        session = self.data.draw(st.integers(1, self.num_sessions), label="session")
        self.excused |= {name for name, begun in self.begun.items() if begun.session == session} - set(self.ended)
        self.tell(events.SessionEnded(session))

    def grow(self) -> None:
        order = self.store.growing.pop(0)
        if not self.store.free:
            self.tell(AttemptFailed(order.attempt_id, POOL_FULL))
            return
        slot = self.store.free.pop()
        self.store.held[order.attempt_id].append(slot)
        self.tell(storage.Grown(order.attempt_id, (slot,)))

    def ingest(self) -> None:
        name = self.pick(self.ingesting)
        self.ingesting.remove(name)
        if self.data.draw(st.integers(0, 4), label="hand-over fails") == 0:
            self.tell(AttemptFailed(name, failure(FailureCode.PEER_LOST)))
            return
        request = self.begun[name].start.request
        self.write_prompt(name, self.store.held[name], request.num_tokens)
        token = self.data.draw(st.sampled_from([EOS, 7, 7]), label="first token")
        if token == EOS or request.params.max_tokens == self.positions[name]:
            self.excused.add(name)
        self.tell(storage.Ingested(name, token))

    def token(self, name: str) -> int:
        """One that is sampled."""
        token = self._token()
        self.sampled[name].append([token])
        return token

    def compute(self, row: StepRow, gone: bool) -> tuple[Sequence[SampledToken], int]:
        """Computes a step's row, `gone` where nobody sees what it writes any more: what is sampled, and how much of it was guessed."""
        params, output_ids, prompt = row.sampling.params, row.output_ids, len(row.sampling.prompt_ids)
        left = params.max_tokens - len(output_ids)
        if left <= 0:
            return (), 0
        drafted = self.data.draw(st.integers(0, min(row.most_drafted, left - 1)), label="drafted")
        accepted = self.data.draw(st.integers(0, drafted), label="accepted")
        begin, sampled = prompt + len(output_ids) - 1, [self._token() for _ in range(accepted + 1)]
        if not gone:
            assert self.store.may_use(row.attempt_id, row.slots)
            for i, token in enumerate([output_ids[-1], *sampled[:accepted], *[WRONG] * (drafted - accepted)]):
                self.write(row.slots, begin + i, token)
        output_ids.extend(sampled)
        self.sampled[row.attempt_id].append(sampled)
        return tuple(map(SampledToken, sampled)), drafted

    def _token(self) -> int:
        token: int = self.data.draw(st.sampled_from([6, 7, 8, EOS]), label="token")
        return token

    def write_prompt(self, name: str, slots: Sequence[int], num_tokens: int) -> None:
        for position, token_id in enumerate(self.begun[name].start.request.token_ids[:num_tokens]):
            self.write(slots, position, token_id)

    def write(self, slots: Sequence[int], position: int, token_id: int) -> None:
        self.memory[slots[position // BLOCK_TOKENS]][position % BLOCK_TOKENS] = token_id
