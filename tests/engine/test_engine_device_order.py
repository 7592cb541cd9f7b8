"""With copies that take their time, as a GPU's do: nothing is read before it has come, and nobody is told of what has not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import SequenceChunk
from engine.device.base import Device
from engine.device.streams import CopyTimes, DeviceWork, SlabCopy, Streams, copy_all
from engine.formats.files import describe
from engine.kv_cache import device_cache
from engine.loader import load_model
from engine.runner import arena_tensor
from engine.shard import Ranks, Shard
from engine.tensor_parallel.steps import LeadingHooks
from tests.engine.conftest import tiny_harness
from tests.engine.sequences import Harness
from tests.engine.test_engine_runner import Recorder
from tests.support.models import make_tiny_llama
from tests.support.reference import Reference, random_prompt


class Late(SlabCopy):
    """Happens when it has been asked for so many times, or is waited for."""

    def __init__(self, happens: Callable[[], None], patience: int = 3) -> None:
        self._happens = happens
        self._patience = patience
        self.happened = False

    def happen(self) -> None:
        if not self.happened:
            self._happens()
            self.happened = True

    def done(self) -> bool:
        self._patience -= 1
        if self._patience <= 0:
            self.happen()
        return self.happened

    def wait(self) -> None:
        self.happen()


class LateStreams(Streams):
    made: list[LateStreams]

    def __init__(self, other: OtherRank | None = None) -> None:
        self.copies: list[Late] = []
        self.ahead: list[Late] = []
        """Happen only when they are waited for, or the test says so."""
        self._other = other
        LateStreams.made.append(self)

    def begin(self, ahead: Sequence[SlabCopy]) -> None:
        for loading in ahead:
            loading.wait()
        assert all(copy.happened for copy in self.copies), "the last pass has left something on its way"
        self.copies.clear()

    def load(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
        return self._late(partial(copy_all, targets, sources))

    def load_ahead(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
        before = self.ahead[-1:]

        def happens() -> None:
            for copy in before:
                copy.happen()
            with torch.inference_mode():
                copy_all(targets, sources)

        self.ahead.append(Late(happens, patience=1 << 30))
        return self.ahead[-1]

    def hold(self, loading: SlabCopy) -> None:
        loading.wait()

    def store(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> SlabCopy:
        return self._late(partial(copy_all, targets, sources))

    def launched(self) -> DeviceWork:
        assert self._other is not None, "one rank alone waits for nobody's sums"
        return self._late(partial(self._other.store, self._other.sums))

    def end(self) -> None: ...

    def times(self) -> CopyTimes:
        return CopyTimes()

    def _late(self, happens: Callable[[], None]) -> SlabCopy:
        self.copies.append(Late(happens))
        return self.copies[-1]


class OtherRank(Ranks):
    """As the first of two ranks sees it whose sums are a device's: one returns at once, and is there when the other rank has come to it,
    which has stored its heads before."""

    shard = Shard(0, 2)
    slabs: torch.Tensor
    """The arena."""

    def __init__(self) -> None:
        self.sums = 0

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return x

    def join(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        return x

    def least(self, number: int) -> int:
        return number

    def store(self, sums: int) -> None:
        """What comes before so many sums, of which there are two in a layer: the second KV head of each slab."""
        self.slabs[:, : sums // 2, ..., 1, :] = 1.0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("late") / "model", num_hidden_layers=6)


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference.from_directory(path)


@pytest.fixture
def late(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """A harness whose copies are late."""
    LateStreams.made = []
    monkeypatch.setattr(device_cache, "ImmediateStreams", LateStreams)
    info = describe(str(path))
    model = load_model(info, "float32", device=Device(torch.device("cpu"), most_pages=12))
    yield Harness(model, info.kv_spec("float32", 16), num_slots=60)
    assert all(copy.happened for streams in LateStreams.made for copy in streams.copies)


def test_tokens_are_those_of_transformers_with_prefixes_loaded_and_pages_evicted(late: Harness, path: Path, reference: Reference) -> None:
    prompts = [random_prompt(seed, 90, 10, 250) for seed in range(3)]
    elsewhere = tiny_harness(path)
    slots = [late.slots(120) for _ in prompts]
    for prompt, own in zip(prompts, slots, strict=True):
        there = elsewhere.slots(90)
        elsewhere.prefill(prompt[:64], there, 64)
        late.arena.reshape(60, -1)[own[:4]] = elsewhere.arena.reshape(elsewhere.num_slots, -1)[there[:4]]
    tokens = [[int(late.prefill(prompt, own, 16, start=64).argmax())] for prompt, own in zip(prompts, slots, strict=True)]
    for step in range(19):
        for own, output in zip(slots, tokens, strict=True):
            output.append(int(late.runner.forward([SequenceChunk(output[-1:], 90 + step, own)])[0].argmax()))
    assert tokens == [reference.greedy(prompt, 20) for prompt in prompts]


def test_layers_are_told_of_in_order_once_their_slabs_are_in_the_arena_and_without_waiting_for_them(late: Harness) -> None:
    slots = late.slots(30)
    slabs = late.arena.reshape(60, late.spec.layers, -1)
    seen: list[np.ndarray] = []

    class Snapshots(Recorder):
        def after(self, layer: int) -> None:
            super().after(layer)
            seen.append(slabs[slots, layer].copy())

    recorder = Snapshots()
    late.runner.forward([SequenceChunk(list(range(10, 40)), 0, slots)], recorder)
    assert [layer for when, layer in recorder.calls if when == "after"] == list(range(6))
    assert recorder.calls.index(("after", 0)) > recorder.calls.index(("before", 1)), (
        "the second layer did not wait for the first one's copies"
    )
    assert recorder.calls.index(("after", 0)) < recorder.calls.index(("before", 5)), "nor the first one's hook for the end"
    assert all(not (seen[layer] == 0xFF).all() and (seen[layer] == slabs[slots, layer]).all() for layer in range(6))


def test_a_hook_that_raises_leaves_nothing_on_its_way(late: Harness) -> None:
    class Stop(Exception): ...

    class Stopping(Recorder):
        def before(self, layer: int) -> None:
            if layer == 4:
                raise Stop

    slots = late.slots(30)
    with pytest.raises(Stop):
        late.runner.forward([SequenceChunk(list(range(10, 40)), 0, slots)], Stopping())
    assert all(copy.happened for copy in LateStreams.made[-1].copies)


@pytest.fixture
def beside(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Harness, OtherRank]]:
    """A harness around one of two ranks, and the other one."""
    LateStreams.made = []
    other = OtherRank()
    monkeypatch.setattr(device_cache, "ImmediateStreams", lambda: LateStreams(other))
    info = describe(str(path))
    model = load_model(info, "float32", ranks=other, device=Device(torch.device("cpu")))
    harness = Harness(model, info.kv_spec("float32", 16), num_slots=60)
    other.slabs = arena_tensor(harness.arena, harness.spec, 60)
    yield harness, other
    assert all(copy.happened for streams in LateStreams.made for copy in streams.copies)


def test_a_layer_is_told_of_when_the_other_rank_has_stored_its_heads_too(beside: tuple[Harness, OtherRank]) -> None:
    harness, other = beside
    slots, told = harness.slots(30), []

    class Looking(Recorder):
        def after(self, layer: int) -> None:
            super().after(layer)
            told.append(bool(other.slabs[slots, layer].isfinite().all()))

    recorder = Looking()
    harness.runner.forward([SequenceChunk(list(range(10, 40)), 0, slots)], recorder)
    assert told == [True] * 6
    assert recorder.calls.index(("after", 0)) > recorder.calls.index(("before", 1)), "the host goes on meanwhile"


def test_a_pass_without_hooks_returns_when_the_other_rank_has_stored_all(beside: tuple[Harness, OtherRank]) -> None:
    harness, other = beside
    slots = harness.slots(32)
    harness.runner.forward([SequenceChunk(list(range(10, 42)), 0, slots)])
    assert other.slabs[slots].isfinite().all()


def test_a_pass_that_a_hook_stops_returns_when_the_other_rank_has_stored_what_was_launched(beside: tuple[Harness, OtherRank]) -> None:
    class Stopping(Recorder):
        def before(self, layer: int) -> None:
            if layer == 4:
                raise LookupError

    harness, other = beside
    slots = harness.slots(30)
    with pytest.raises(LookupError):
        harness.runner.forward([SequenceChunk(list(range(10, 40)), 0, slots)], Stopping())
    assert [bool(other.slabs[slots, layer].isfinite().all()) for layer in range(6)] == [True] * 4 + [False] * 2


class Spread:
    """What rank 0 has said."""

    def __init__(self) -> None:
        self.said: list[int] = []

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        self.said.append(int(x))
        return x


@pytest.mark.parametrize(("begun", "said"), [(2, [1, 1, 0]), (3, [1, 1, 1])])
def test_a_hook_that_fails_late_stops_the_others_only_where_they_ask_again(begun: int, said: list[int]) -> None:
    class Failing(Recorder):
        def after(self, layer: int) -> None:
            raise LookupError

    ranks = Spread()
    hooks = LeadingHooks(ranks, Failing(), 3)  # type: ignore[arg-type]
    for layer in range(begun):
        hooks.before(layer)
    with pytest.raises(LookupError) as raised:
        hooks.after(0)
    assert ranks.said == said and hooks.announced is raised.value
