"""The prefix index against a plain dictionary of sets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
from conductor_support import keys_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conductor.core.prefix_index import Matches, PrefixIndex, bits
from springtide.blocks import block_keys
from springtide.ids import BlockKey, NodeId
from springtide.protocol.storage import Tier

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
TEXTS = [keys_of(8), keys_of(8, text=1), keys_of(4) + block_keys(keys_of(4)[-1], range(100, 116), 4)]
"""The last one forks from the first after four blocks."""


def holding(**blocks: int) -> PrefixIndex:
    index = PrefixIndex()
    for node, num_blocks in blocks.items():
        index.snapshot(NodeId(node), 1, 0, keys_of(num_blocks), Tier.DRAM, complete=True)
    return index


def test_each_store_is_matched_as_far_as_it_holds_the_prompt() -> None:
    assert holding(a=3, b=5, c=0).match(keys_of(4)) == {A: 3, B: 4}


def test_a_prefix_may_lie_in_both_tiers_of_a_store() -> None:
    index = holding(a=2)
    index.stored(A, 1, 1, keys_of(4)[2:], Tier.SSD)
    assert index.match(keys_of(6)) == {A: 4}


def test_a_block_whose_ancestor_is_missing_does_not_count() -> None:
    index = holding(a=0)
    index.stored(A, 1, 1, keys_of(4)[1:], Tier.DRAM)
    assert index.match(keys_of(4)) == {}


def test_a_prompt_shorter_than_a_block_matches_nowhere() -> None:
    assert holding(a=3).match([]) == {}


def test_a_missed_event_asks_for_a_snapshot_and_keeps_serving_what_is_known() -> None:
    index = holding(a=3)
    assert not index.removed(A, 1, 2, keys_of(3), Tier.DRAM)
    assert index.match(keys_of(4)) == {A: 3}
    index.snapshot(A, 1, 7, keys_of(1), Tier.DRAM, complete=True)
    assert index.match(keys_of(4)) == {A: 1}
    assert index.stored(A, 1, 8, keys_of(2), Tier.DRAM)


def test_a_missed_event_shows_though_nothing_follows_it() -> None:
    index = holding(a=3)
    assert index.stored(A, 1, 1, keys_of(4), Tier.DRAM)
    assert index.still_at(A, 1)
    assert not index.still_at(A, 2)
    assert not index.stored(A, 1, 2, keys_of(5), Tier.DRAM), "another may have been missed before"
    assert index.match(keys_of(5)) == {A: 4}


def test_an_event_seen_before_changes_nothing() -> None:
    index = holding(a=0)
    assert index.stored(A, 1, 1, keys_of(2), Tier.DRAM)
    assert index.removed(A, 1, 2, keys_of(2), Tier.DRAM)
    assert index.stored(A, 1, 1, keys_of(2), Tier.DRAM)
    assert index.match(keys_of(2)) == {}


def test_events_of_another_incarnation_ask_for_a_snapshot() -> None:
    assert not holding(a=2).stored(A, 2, 1, keys_of(3), Tier.DRAM)


def test_a_snapshot_counts_only_once_it_is_complete() -> None:
    index = holding(a=1)
    index.snapshot(A, 2, 5, keys_of(2), Tier.DRAM, complete=False)
    assert index.match(keys_of(4)) == {A: 1}
    index.snapshot(A, 2, 5, keys_of(4)[2:], Tier.DRAM, complete=True)
    assert index.match(keys_of(4)) == {A: 4}


def test_forgetting_a_store_leaves_the_others_and_sweeping_takes_its_entries_away() -> None:
    index = holding(a=8, b=2)
    index.forget(A)
    assert index.match(keys_of(8)) == {B: 2}
    while index.sweep(3):
        index.validate()
    assert len(index) == 2
    assert index.match(keys_of(8)) == {B: 2}


def test_bits_of_forgotten_stores_are_used_again() -> None:
    index = holding(a=2)
    for incarnation in range(2, 50):
        index.snapshot(A, incarnation, 0, keys_of(2), Tier.DRAM, complete=True)
        index.sweep(10)
        index.sweep(10)
    assert index.match(keys_of(2)) == {A: 2}
    assert len(index._node_of_bit) < 5


def nodes_of(matches: Matches, holders: int) -> list[NodeId]:
    return sorted(matches.node_of_bit[bit] for bit in bits(holders))


def test_the_best_match_is_cut_at_what_can_be_reused() -> None:
    matches = holding(a=5, b=3, c=7).match(keys_of(8))
    best, holders = matches.longest(at_most=5)
    assert (best, nodes_of(matches, holders)) == (5, [A, C])
    assert matches.longest(at_most=0) == (0, 0)
    assert holding(a=0).match(keys_of(8)).longest(at_most=5) == (0, 0)


def walked(masks: list[set[int]]) -> dict[int, int]:
    """Holder -> blocks from the first on, found by a plain walk."""
    return {holder: next((i for i, mask in enumerate(masks) if holder not in mask), len(masks)) for holder in masks[0]} if masks else {}


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(1, 300))
def test_the_search_finds_what_a_walk_finds(depths: list[int], num_keys: int) -> None:
    """`depths`: how many blocks each holder has."""
    index = PrefixIndex()
    keys = keys_of(300)
    for holder, depth in enumerate(depths):
        index.snapshot(NodeId(str(holder)), 1, 0, keys[:depth], Tier.DRAM, complete=True)
    masks = [{holder for holder, depth in enumerate(depths) if depth > block} for block in range(num_keys)]
    assert index.match(keys[:num_keys]) == {NodeId(str(holder)): blocks for holder, blocks in walked(masks).items()}


class CountingKeys(Sequence[BlockKey]):
    """A prompt that counts how many of its keys are looked at."""

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self.keys, self.looks = keys, 0

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, block):  # type: ignore[no-untyped-def]
        self.looks += 1
        return self.keys[block]


@pytest.mark.parametrize(("held", "looks"), [(0, 1), (15_625, 2), (1, 3), (8_000, 28)])
def test_a_prompt_of_a_million_tokens_costs_few_looks(held: int, looks: int) -> None:
    keys = keys_of(15_625)
    index = PrefixIndex()
    index.snapshot(A, 1, 0, keys[:held], Tier.DRAM, complete=True)
    prompt = CountingKeys(keys)
    assert index.match(prompt) == ({A: held} if held else {})
    assert prompt.looks <= looks


def test_blocks_with_equal_holders_share_one_mask() -> None:
    index = holding(a=0, b=0)
    for block, key in enumerate(keys_of(8)):
        index.stored(A, 1, block + 1, [key], Tier.DRAM)
        index.stored(B, 1, block + 1, [key], Tier.DRAM)
    assert len({id(holders) for _, holders in index._holders[Tier.DRAM].items()}) == 1


def test_a_store_that_is_not_prefix_closed_for_once_is_still_counted_once() -> None:
    keys = keys_of(9)
    index = holding(a=9, b=9)
    index.removed(A, 1, 1, keys[2:6], Tier.DRAM)
    matches = index.match(keys)
    assert len(matches) == 2
    assert sum(holders.bit_count() for _, holders in matches.ends) == 2


class IndexAgainstSets(RuleBasedStateMachine):
    """Random events of four stores, prefix-closed in each tier; the model is a set of keys for each (store, tier)."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[NodeId, dict[Tier, set[BlockKey]]] = {}
        self.sequences: dict[NodeId, tuple[int, int]] = {}
        self.snapshots = 0

    nodes = st.sampled_from([NodeId(f"node-{number}") for number in range(4)])
    tiers = st.sampled_from(list(Tier))
    some_keys = st.lists(st.tuples(st.sampled_from(TEXTS), st.integers(0, 8)), max_size=4).map(
        lambda prefixes: list(dict.fromkeys(key for text, blocks in prefixes for key in text[:blocks]))
    )
    """Prefixes, parents first."""

    @rule(node=nodes, incarnation=st.integers(1, 3), dram=some_keys, ssd=some_keys, complete=st.booleans())
    def snapshot(self, node: NodeId, incarnation: int, dram: list[BlockKey], ssd: list[BlockKey], complete: bool) -> None:
        # Two snapshots of one incarnation at one sequence number would be the same: here each has its own.
        self.snapshots += 1
        sequence = 100 * self.snapshots
        self.index.snapshot(node, incarnation, sequence, dram, Tier.DRAM, complete=False)
        self.index.snapshot(node, incarnation, sequence, ssd, Tier.SSD, complete=complete)
        if complete:
            self.held[node] = {Tier.DRAM: set(dram), Tier.SSD: set(ssd)}
            self.sequences[node] = (incarnation, sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tier=tiers, keys=some_keys, add=st.booleans(), again=st.booleans())
    def event(self, data: st.DataObject, tier: Tier, keys: list[BlockKey], add: bool, again: bool) -> None:
        node = data.draw(st.sampled_from(sorted(self.sequences)))
        incarnation, sequence = self.sequences[node]
        tell = self.index.stored if add else self.index.removed
        if not add:
            # With a block goes whatever continues it, children first.
            below = [key for text in TEXTS for depth, key in enumerate(text) if not set(keys[:1]).isdisjoint(text[: depth + 1])]
            keys = list(dict.fromkeys(reversed([key for key in below if key in self.held[node][tier]])))
        if again:
            assert tell(node, incarnation, sequence, keys, tier)
            return
        self.sequences[node] = (incarnation, sequence + 1)
        assert tell(node, incarnation, sequence + 1, keys, tier)
        self.held[node][tier] = self.held[node][tier] | set(keys) if add else self.held[node][tier] - set(keys)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), keys=some_keys)
    def missed_event(self, data: st.DataObject, keys: list[BlockKey]) -> None:
        node = data.draw(st.sampled_from(sorted(self.sequences)))
        incarnation, sequence = self.sequences.pop(node)
        assert not self.index.stored(node, incarnation, sequence + 2, keys, Tier.DRAM)
        assert not self.index.removed(node, incarnation, sequence + 1, keys, Tier.DRAM)

    @rule(node=nodes, missed=st.booleans())
    def still_here(self, node: NodeId, missed: bool) -> None:
        if node in self.sequences and node not in self.index._gathering:
            assert self.index.still_at(node, self.sequences[node][1] + missed) is not missed
            if missed:
                del self.sequences[node]

    @rule(node=nodes)
    def forget(self, node: NodeId) -> None:
        self.index.forget(node)
        self.held.pop(node, None)
        self.sequences.pop(node, None)

    @rule(max_blocks=st.integers(1, 20))
    def sweep(self, max_blocks: int) -> None:
        self.index.sweep(max_blocks)

    @invariant()
    def agrees(self) -> None:
        self.index.validate()
        for text in TEXTS:
            expected: dict[NodeId, int] = defaultdict(int)
            for node, tiers in self.held.items():
                for key in text:
                    if not any(key in keys for keys in tiers.values()):
                        break
                    expected[node] += 1
            assert self.index.match(text) == expected
        for node, tiers in self.held.items():
            assert self.index.blocks_of(node) == sum(map(len, tiers.values()))


IndexAgainstSets.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndexAgainstSets = IndexAgainstSets.TestCase
