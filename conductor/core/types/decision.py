"""What a scheduling decision rests on, and what it comes to. Both survive JSON, so a decision can be replayed from its log line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from conductor.core.types.estimates import DecodeEstimate, DecodeEstimates, InlineEstimate, PrefillEstimate, PrefillEstimates
from conductor.core.types.outlook import Outlook
from springtide.choices import AdmissionName, PolicyName
from springtide.ids import AttemptId, InstanceId, NodeId
from springtide.protocol.scheduling import Rejection, Terms


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One request and every instance that could serve it. All that `scheduler.decide` looks at."""

    attempt_id: AttemptId
    policy: PolicyName
    admission: AdmissionName
    turn: int
    """Decisions made before this one."""
    num_blocks: int
    """Slots that the prompt and the first output token need."""
    expected_blocks: int
    """Slots that the prompt and its predicted output need."""
    most_blocks: int
    """Slots that it can come to need."""
    accepted: bool
    terms: Terms
    avoid: tuple[InstanceId, ...]
    ttft_slo_ms: float
    tbt_slo_ms: float
    mean_output_tokens: float
    """Of recent requests: how soon places become free."""
    rejoin_s: float
    """When to come back if there is no instance at all."""
    prefills: PrefillEstimates
    decodes: DecodeEstimates
    holders: tuple[tuple[NodeId, int], ...]
    """Some of the stores that hold a prefix of the prompt, and how many blocks of it: the longest first, then the least congested."""
    outlook: Outlook | None = None
    """Of the request where it would be placed; None when it cannot be."""
    inlines: Sequence[InlineEstimate] = ()
    """Decode nodes that could compute the prompt themselves, the soonest first."""

    def drain_ms(self, share: float, tbt_ms: float) -> float:
        """When `share` of a decode node's load will be gone: in steady state all of it is replaced in the time of one mean output."""
        return share * max(self.mean_output_tokens, 1.0) * max(tbt_ms, 1e-3)

    def to_json(self) -> str:
        """The alternatives as one line. Its length, and the time to write it, grow with the instances: some 40 to 150 bytes and 1 us
        each."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["prefills"], values["decodes"] = self.prefills.plain(), self.decodes.plain()
        values["outlook"] = self.outlook.to_fields() if self.outlook is not None else None
        values["terms"] = asdict(self.terms)
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Alternatives:
        values: dict[str, Any] = json.loads(line)
        values["terms"] = Terms(**values["terms"])
        values["avoid"] = tuple(values["avoid"])
        values["prefills"] = PrefillEstimates.of_plain(values["prefills"])
        values["decodes"] = DecodeEstimates.of_plain(values["decodes"])
        values["holders"] = tuple((node_id, blocks) for node_id, blocks in values["holders"])
        values["inlines"] = tuple(InlineEstimate(*figures) for figures in values["inlines"])
        values["outlook"] = Outlook.from_fields(values["outlook"]) if values["outlook"] is not None else None
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Placement:
    """The pair of instances for a request: the same one twice where the decode node computes the prompt itself."""

    prefill: PrefillEstimate
    decode: DecodeEstimate

    @property
    def inlined(self) -> bool:
        return self.prefill.instance_id == self.decode.instance_id

    @property
    def waits(self) -> bool:
        """The decode node has no room now, and prefill begins when it has."""
        return self.decode.wait_ms > 0

    @property
    def wait_ms(self) -> float:
        """The time until prefill begins: for room at the decode node, while the queue at the prefill side gets shorter too."""
        return max(self.prefill.queue_ms, self.decode.wait_ms)

    @property
    def ttft_ms(self) -> float:
        return self.wait_ms + self.prefill.transfer_ms + self.prefill.prefill_ms


Decision = Placement | Rejection
