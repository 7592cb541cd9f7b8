"""What the core wants done (beside the orders to the store in `node_runtime.storage`)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.base import SamplingRow, SequenceChunk
from node_runtime import storage
from springtide.rpc import common_pb2


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run the model once over `batch` (one token a sequence), sample a token for each row, and answer with StepDone or StepFailed.

    The rows' `output_ids` are the core's own lists: they do not change until the answer has been handled.
    """

    step_id: int
    attempt_ids: tuple[str, ...]
    batch: tuple[SequenceChunk, ...]
    sampling: tuple[SamplingRow, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """One message to the gateway of the session."""

    session: int
    outputs: tuple[common_pb2.TokenOutput, ...]


Action = storage.Order | RunStep | Reply
