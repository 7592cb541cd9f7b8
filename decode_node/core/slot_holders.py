"""The attempts that hold slots at a decode node, what they are expected to grow by, and whose growth was refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from decode_node.core.attempt import DecodeAttempt
from springtide.ids import AttemptId


class SlotHolders:
    """The attempts that have slots, or have asked for them: at most a batch, in the order in which the requests arrived at their gateways,
    whatever attempts they have had since; those in idle capacity after all others."""

    def __init__(self, max_batch: int, block_tokens: int) -> None:
        self._max_batch, self._block_tokens = max_batch, block_tokens
        self._attempts: dict[AttemptId, DecodeAttempt] = {}
        self._any_refused = False
        """Whether the growth of some of them may have been refused: it has since all were last asked for again."""

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[DecodeAttempt]:
        return iter(self._attempts.values())

    def __contains__(self, attempt: object) -> bool:
        return isinstance(attempt, DecodeAttempt) and self._attempts.get(attempt.attempt_id) is attempt

    def enter(self, attempt: DecodeAttempt) -> None:
        """Takes it in at its place in the order."""
        last = next(reversed(self._attempts.values()), None)
        self._attempts[attempt.attempt_id] = attempt
        if last is not None and last.place_in_order > attempt.place_in_order:
            self._attempts = dict(sorted(self._attempts.items(), key=lambda entry: entry[1].place_in_order))

    def leave(self, attempt: DecodeAttempt) -> None:
        """It has no slots any more, and is not about to have any; one that had not before: nothing."""
        self._attempts.pop(attempt.attempt_id, None)

    def clear(self) -> None:
        """The store is gone, and every slot with it."""
        self._attempts.clear()

    @property
    def youngest(self) -> DecodeAttempt:
        """The last of them: there is one."""
        return next(reversed(self._attempts.values()))

    @property
    def has_idle(self) -> bool:
        """Whether any is in idle capacity."""
        return bool(self._attempts) and self.youngest.idle

    @property
    def idle(self) -> Sequence[DecodeAttempt]:
        """Those in idle capacity."""
        return [attempt for attempt in self if attempt.idle] if self.has_idle else ()

    @property
    def has_place(self) -> bool:
        """Whether there is a place for one more in the batch, which those take too who are yet to join it: who has no place waits before
        its prefill, not between two tokens. And nobody is taken in while another lacks a slot to go on. Those in idle capacity make
        room."""
        return sum(not attempt.idle for attempt in self) < self._max_batch and not self.num_starving

    def kept_for_growth(self, newcomer: DecodeAttempt | None = None, tenant: str | None = None) -> int:
        """Slots that have to be available still (of the tenant's quota, if one is given) once the newcomer has its own, so that preemption
        is rare: what those who hold slots, and it, are expected to grow by. Alone, an attempt may have everything. Those in idle capacity
        would give way to any but their like."""
        with_idle = newcomer is not None and newcomer.idle
        holders = [one for one in self if one is not newcomer and tenant in (None, one.request.tenant) and (with_idle or not one.idle)]
        growing = [*holders, newcomer] if holders and newcomer is not None else holders
        return sum(attempt.growth_blocks(self._block_tokens) for attempt in growing)

    # ---- whose growth was refused ----

    def refuse_growth(self, attempt: DecodeAttempt, *, quota_used: bool) -> None:
        """The store had no slot for it, or its tenant's quota had none."""
        attempt.growth, attempt.quota_used = "refused", quota_used
        self._any_refused = True

    def ask_again(self) -> Sequence[DecodeAttempt]:
        """There may be slots by now: those whose growth was refused count as not having asked. Returns them."""
        refused, self._any_refused = self.refused, False
        for attempt in refused:
            attempt.growth = "none"
        return refused

    @property
    def refused(self) -> Sequence[DecodeAttempt]:
        """Those whose growth was refused and has not been asked for again."""
        return [attempt for attempt in self if attempt.growth == "refused"] if self._any_refused else ()

    @property
    def starved(self) -> Sequence[DecodeAttempt]:
        """Those of them that sit out steps for it."""
        return [one for one in self.refused if one.phase == "running" and not one.ahead and one.lacks_slot(self._block_tokens)]

    @property
    def num_starving(self) -> int:
        """How many were refused for want of slots in the pool, those in idle capacity apart."""
        return sum(not attempt.quota_used and not attempt.idle for attempt in self.refused)

    @property
    def starving_tenants(self) -> set[str]:
        """The tenants of whom one was refused for want of quota: they take in nobody else."""
        return {attempt.request.tenant for attempt in self.refused if attempt.quota_used and not attempt.idle}

    def validate(self) -> None:
        """Asserts the invariants."""
        order = [attempt.place_in_order for attempt in self]
        assert order == sorted(order)
        assert self._any_refused or not any(attempt.growth == "refused" for attempt in self)
        assert len(self) <= self._max_batch
