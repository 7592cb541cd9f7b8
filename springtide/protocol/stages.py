"""Words between the engine of a prefill group, which is its first stage, and the processes of the further stages."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from springtide.ids import AttemptId, Incarnation, InstanceId
from springtide.protocol.outputs import AttemptFailed, Failure, PromptLogprobs, SampledToken
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.storage import Acquired, FetchProgress, FetchTruncated
from springtide.values import value_class


@value_class(frozen=True, slots=True)
class LoadLayers:
    """The model's layers [layer_begin, layer_end) are the stage's: it is to load them, before all else."""

    layer_begin: int
    layer_end: int
    stages: int
    """How many the group has."""


# ---- orders: engine to stage ----


@value_class(frozen=True, slots=True)
class JoinGroup:
    """The first order of a session: where the stage computes while that lasts, and how it gets at the next one."""

    instance_id: InstanceId
    """The group's engine, as the stores know it: slots come back when nobody of this name has the arena any more."""
    num_slots: int
    incarnation: Incarnation | None = None
    """The engine's, by which it has the arena of its node's store, and the stage that of its own; None: the stage computes in scratch
    memory of its own."""
    next_endpoint: str = ""
    """Messenger endpoint (JSON) of the next stage; empty at the last."""
    next_device_buffers: bytes = b""
    """What the next stage has said of its own when it joined."""


@value_class(frozen=True, slots=True)
class StageSampling:
    """What the sampler needs to know for a row that ends its prompt."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


@value_class(frozen=True, slots=True)
class StageScoring:
    """What is wanted to know of a row's tokens: as of engine.batch.Scoring."""

    next_ids: Sequence[int]
    num_top: int


@value_class(frozen=True, slots=True)
class StageRow:
    """One sequence's share of a pass, without its tokens, which only the first stage embeds."""

    num_tokens: int
    start: int
    slots: Sequence[int]
    sampling: StageSampling | None = None
    """Set at the last stage, when the chunk ends its prompt."""
    scoring: StageScoring | None = None
    """Set at the last stage, when log-probabilities of the prompt are wanted."""


@value_class(frozen=True, slots=True)
class StagePass:
    """A pass, ordered from all stages at once, which take passes in the order of these."""

    pass_id: int
    rows: tuple[StageRow, ...]
    report_layers: frozenset[int] = frozenset()
    """Ends of some of the stage's layers, counted from the model's first: LayersComputed is to be sent when one is reached."""
    awaits: AttemptId | None = None
    """The attempt whose prefix still arrives."""


@value_class(frozen=True, slots=True)
class ForgetAttempt:
    """The attempt's slots were given back: nothing is fetched for it any more."""

    attempt_id: AttemptId


@value_class(frozen=True, slots=True)
class SlotsGivenBack:
    """What a stage keeps of these slots elsewhere is worth nothing any more. Sent before the passes that use them again."""

    slots: Sequence[int]


FetchNotice = Acquired | FetchProgress | FetchTruncated | AttemptFailed
"""What the store says of fetches, relayed before the passes that wait for them."""
StageOrder = JoinGroup | StagePass | FetchNotice | ForgetAttempt | SlotsGivenBack

# ---- reports: stage to engine ----


@value_class(frozen=True, slots=True)
class GroupJoined:
    """The answer to JoinGroup: how the stage before gets at this one."""

    endpoint: str
    """Messenger endpoint (JSON)."""
    device_buffers: bytes = b""
    """Where activations may be left on this stage's device: a tensor as torch shares it between processes (CUDA IPC). Empty: nowhere."""


@value_class(frozen=True, slots=True)
class LayersComputed:
    """The stage has computed the layers of a pass up to, not including, `layer_end`, counted from the model's first."""

    pass_id: int
    layer_end: int


class StageOutcome(Enum):
    """What came of a pass in one stage."""

    DONE = "done"
    VOID = "void"
    """A stage before has not done it, or it gave way to others."""
    PREFIX_MISSING = "prefix_missing"
    """The prefix was truncated."""
    PREFIX_OVERDUE = "prefix_overdue"
    FAILED = "failed"


@value_class(frozen=True, slots=True)
class RefusedToken:
    """Why a row that ends its prompt has no token."""

    place: int
    """Its index in `tokens`, where 0 stands for it."""
    failure: Failure


@value_class(frozen=True, slots=True)
class StagePassEnded:
    """The stage is not at the pass any more. Its LayersComputed have gone before."""

    pass_id: int
    outcome: StageOutcome
    message: str = ""
    """Why it failed."""
    tokens: tuple[SampledToken, ...] = ()
    """The sampled ones, at the last stage: one for each row that ends its prompt."""
    busy_ms: float = 0.0
    """What the layers took: of the thread that ran them, or of its device. Without waiting for the prefix."""
    waited_ms: float = 0.0
    """What was waited for the prefix."""
    scores: tuple[PromptLogprobs, ...] = ()
    """At the last stage: one for each row with a `scoring`."""
    refused: tuple[RefusedToken, ...] = ()


StageReport = GroupJoined | LayersComputed | StagePassEnded
