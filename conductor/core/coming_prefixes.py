"""The prompts that instances are computing, or are about to: who comes with the same beginning finds it there, or waits until it is there
(prefill_node.core.shared_prefixes)."""

from __future__ import annotations

from collections.abc import Sequence, Set

from springtide.ids import AttemptId, BlockKey, InstanceId
from springtide.values import value_class

MARK_TOKENS = 512
"""What is shared is known to so many tokens: a block in so many is looked at. It is about the least that is worth being waited for."""
MOST_MATCHED = 32
"""Instances that a decision looks at. Where more have what is asked for on its way, it is popular enough to be in their stores soon."""


@value_class(frozen=True, slots=True)
class Coming:
    """Of a prompt, at one instance."""

    blocks: int
    """That it will have, without anybody's computing them twice."""
    at: float
    """When it is predicted to have them (s)."""


class ComingPrefixes:
    """A block's key stands for all that comes before it, so a prompt's beginning is found by its last block alone."""

    def __init__(self, block_tokens: int) -> None:
        self._every = max(1, MARK_TOKENS // block_tokens)
        self._at: dict[BlockKey, dict[InstanceId, dict[AttemptId, float]]] = {}
        """When which attempts are predicted to have computed the block (s)."""
        self._marks: dict[AttemptId, tuple[InstanceId, Sequence[BlockKey]]] = {}

    def begin(self, attempt_id: AttemptId, instance_id: InstanceId, keys: Sequence[BlockKey], begins: float, ends: float) -> None:
        """The attempt, which is not known here yet, is placed there, and predicted to compute these blocks, one as quickly as the other,
        between these times (s)."""
        marks = keys[self._every - 1 :: self._every]
        if not marks:
            return
        self._marks[attempt_id] = instance_id, marks
        at, each = begins, (ends - begins) * self._every / len(keys)
        for key in marks:
            at += each
            self._at.setdefault(key, {}).setdefault(instance_id, {})[attempt_id] = at

    def end(self, attempt_id: AttemptId) -> None:
        """Its blocks are committed, or will not be; of one that is not known: nothing."""
        instance_id, marks = self._marks.pop(attempt_id, (None, ()))
        for key in marks:
            assert instance_id is not None
            instances = self._at[key]
            attempts = instances[instance_id]
            del attempts[attempt_id]
            if not attempts:
                del instances[instance_id]
                if not instances:
                    del self._at[key]

    def match(self, keys: Sequence[BlockKey]) -> dict[InstanceId, Coming]:
        """How much of a prompt with these keys an instance will have: of the MOST_MATCHED that will have most, without those that will have
        none."""
        found: dict[InstanceId, Coming] = {}
        depths: list[tuple[int, dict[InstanceId, dict[AttemptId, float]]]] = []
        if not self._at:
            return found
        for place in range(self._every - 1, len(keys), self._every):
            instances = self._at.get(keys[place])
            if instances is None:
                break
            depths.append((place + 1, instances))
        for blocks, instances in reversed(depths):
            # Whoever will have more will have this, too.
            if len(instances) == len(found):
                continue
            for instance_id, attempts in instances.items():
                if instance_id not in found:
                    found[instance_id] = Coming(blocks, min(attempts.values()))
                    if len(found) == MOST_MATCHED:
                        return found
        return found

    @property
    def attempt_ids(self) -> Set[AttemptId]:
        """Those that have begun and not ended."""
        return self._marks.keys()

    def validate(self) -> None:
        """Asserts the invariants."""
        listed = {(key, name, attempt_id) for attempt_id, (name, marks) in self._marks.items() for key in marks}
        assert listed == {(key, name, one) for key, at in self._at.items() for name, attempts in at.items() for one in attempts}
