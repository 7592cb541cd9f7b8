"""The codec of each word. `X.encode(word)` is its message, `X.decode(message)` the word."""

from __future__ import annotations

from springtide.cost import DecodeCost, PrefillCost
from springtide.protocol import (
    attempts,
    instances,
    layer_stores,
    observation,
    outputs,
    sampling,
    scheduling,
    stages,
    starts,
    status,
    storage,
    timings,
    usage,
)
from springtide.protocol.codec import Codec, OneOf
from springtide.rpc import common_pb2, conductor_pb2, inference_pb2, layer_store_pb2, node_pb2, observation_pb2, stage_pb2, store_pb2

# ---- attempts ----

PREDICTION = Codec(attempts.Prediction, conductor_pb2.Prediction)
PROGRESS = Codec(attempts.Progress, conductor_pb2.Progress)
LIVE_ATTEMPT = Codec(attempts.LiveAttempt, conductor_pb2.LiveAttempt)
ATTEMPT_REPORT: OneOf[attempts.AttemptReport, conductor_pb2.AttemptReport] = OneOf(
    conductor_pb2.AttemptReport, progress=PROGRESS, placed=LIVE_ATTEMPT
)
RENEW = Codec(attempts.Renew, conductor_pb2.RenewRequest)

# ---- instances ----

INSTANCE_REF = Codec(instances.InstanceRef, conductor_pb2.InstanceRef)
ROLE_SWITCH = Codec(instances.RoleSwitch, node_pb2.SwitchRoleRequest)
PREFILL_COST = Codec(PrefillCost, node_pb2.PrefillCost)
DECODE_COST = Codec(DecodeCost, node_pb2.DecodeCost)
IDLE_LOAD = Codec(instances.IdleLoad, node_pb2.IdleLoad)
LOAD = Codec(instances.Load, node_pb2.Load)
LOAD_REPORT = Codec(instances.LoadReport, node_pb2.LoadReport)

# ---- scheduling ----

GATEWAY_ORDERS = Codec(scheduling.GatewayOrders, conductor_pb2.GatewayOrders)
PREFIX_SOURCE = Codec(scheduling.PrefixSource, common_pb2.PrefixSource)
ASSIGNMENT = Codec(scheduling.Assignment, conductor_pb2.Assignment)
REJECTION = Codec(scheduling.Rejection, conductor_pb2.Rejection)
NOT_LEADER = Codec(scheduling.NotLeader, conductor_pb2.NotLeader)
ESTIMATE = Codec(scheduling.Estimate, conductor_pb2.Estimate)
TERMS = Codec(scheduling.Terms, common_pb2.Terms)
SCHEDULE = Codec(scheduling.Schedule, conductor_pb2.ScheduleRequest)
SCHEDULE_REPLY = Codec(scheduling.ScheduleReply, conductor_pb2.ScheduleReply)

# ---- status ----

INSTANCE_STATUS = Codec(status.InstanceStatus, conductor_pb2.InstanceStatus)
PREDICTION_ERRORS = Codec(status.PredictionErrors, conductor_pb2.PredictionErrors)
CLUSTER_STATUS = Codec(status.ClusterStatus, conductor_pb2.ClusterStatus)

# ---- what people are shown ----

OBSERVE = Codec(observation.Observe, observation_pb2.ObserveRequest)
OBSERVED_ATTEMPT = Codec(observation.ObservedAttempt, observation_pb2.ObservedAttempt)
OBSERVED_PREFIX = Codec(observation.ObservedPrefix, observation_pb2.ObservedPrefix)
OBSERVED_DECISION = Codec(observation.ObservedDecision, observation_pb2.ObservedDecision)
TIME_BUCKET = Codec(observation.TimeBucket, observation_pb2.TimeBucket)
OBSERVED_PART: OneOf[observation.ObservedPart, observation_pb2.ObservedPart] = OneOf(
    observation_pb2.ObservedPart,
    overview=Codec(observation.Overview, observation_pb2.Overview),
    instances=Codec(observation.InstanceTable, observation_pb2.InstanceTable),
    attempts=Codec(observation.AttemptTable, observation_pb2.AttemptTable),
    stores=Codec(observation.StoreTable, observation_pb2.StoreTable),
    prefixes=Codec(observation.PrefixTable, observation_pb2.PrefixTable),
    decisions=Codec(observation.DecisionTable, observation_pb2.DecisionTable),
    history=Codec(observation.HistoryTable, observation_pb2.HistoryTable),
)
EXPLAIN = Codec(observation.Explain, observation_pb2.ExplainRequest)
EXPLAINED_DECISION = Codec(observation.ExplainedDecision, observation_pb2.ExplainedDecision)
EXPLANATION = Codec(observation.Explanation, observation_pb2.Explanation)

# ---- outputs ----

TOKEN_LOGPROB = Codec(outputs.TokenLogprob, common_pb2.TokenLogprob)
SAMPLED_TOKEN = Codec(outputs.SampledToken, common_pb2.SampledToken)
TOKEN_OUTPUT = Codec(outputs.TokenOutput, common_pb2.TokenOutput)
FAILURE = Codec(outputs.Failure, common_pb2.Failure)
ATTEMPT_FAILED = Codec(outputs.AttemptFailed, common_pb2.AttemptFailed)
ATTEMPT_SIGN = Codec(outputs.AttemptSign, node_pb2.AttemptSign)
ATTEMPT_SIGNS = Codec(outputs.AttemptSigns, node_pb2.AttemptSigns)
HANDED_OVER = Codec(outputs.HandedOver, common_pb2.HandedOver)
STAGE_TIMES = Codec(timings.StageTimes, node_pb2.StageTimes)
PASS_TIMES = Codec(timings.PassTimes, node_pb2.PassTimes)
PREFILL_TIMES = Codec(timings.PrefillTimes, node_pb2.PrefillTimes)
DECODE_TIMES = Codec(timings.DecodeTimes, node_pb2.DecodeTimes)
PROMPT_LOGPROBS = Codec(outputs.PromptLogprobs, common_pb2.PromptLogprobs)
PREFILL_DONE = Codec(outputs.PrefillDone, node_pb2.PrefillDone)
PREFILL_UPDATE: OneOf[outputs.PrefillUpdate, node_pb2.PrefillUpdate] = OneOf(
    node_pb2.PrefillUpdate, done=PREFILL_DONE, failed=ATTEMPT_FAILED, signs=ATTEMPT_SIGNS, handed_over=HANDED_OVER
)
DECODE_UPDATE = Codec(outputs.DecodeUpdate, node_pb2.DecodeUpdate)
KEPT_TOKENS = Codec(usage.KeptTokens, inference_pb2.KeptTokens)
USAGE = Codec(usage.Usage, inference_pb2.Usage)

# ---- starts ----

LOGIT_BIAS = Codec(sampling.LogitBias, common_pb2.LogitBias)
TOKEN_IDS = Codec(sampling.TokenIds, common_pb2.TokenIds)
GRAMMAR = Codec(sampling.Grammar, common_pb2.Grammar)
SAMPLING_PARAMS = Codec(sampling.SamplingParams, common_pb2.SamplingParams)
REQUEST = Codec(starts.Request, node_pb2.Request)
PREFILL_START = Codec(starts.PrefillStart, node_pb2.PrefillStart)
DECODE_START = Codec(starts.DecodeStart, node_pb2.DecodeStart)
ABORT_ATTEMPT = Codec(starts.AbortAttempt, node_pb2.AbortAttempt)
FORETELL_TOKENS = Codec(starts.ForetellTokens, node_pb2.ForetellTokens)
PREFILL_COMMAND: OneOf[starts.PrefillCommand, node_pb2.PrefillCommand] = OneOf(
    node_pb2.PrefillCommand, start=PREFILL_START, abort=ABORT_ATTEMPT
)
DECODE_COMMAND: OneOf[starts.DecodeCommand, node_pb2.DecodeCommand] = OneOf(
    node_pb2.DecodeCommand, start=DECODE_START, abort=ABORT_ATTEMPT, foretell=FORETELL_TOKENS
)

# ---- a store and its engine ----

ENGINE_COMMAND: OneOf[storage.EngineCommand, store_pb2.EngineCommand] = OneOf(
    store_pb2.EngineCommand,
    hello=Codec(storage.EngineHello, store_pb2.EngineHello),
    acquire=Codec(storage.Acquire, store_pb2.Acquire),
    reserve=Codec(storage.Reserve, store_pb2.Reserve),
    grow=Codec(storage.Grow, store_pb2.Grow),
    commit=Codec(storage.Commit, store_pb2.Commit),
    open_hand_over=Codec(storage.OpenHandOver, store_pb2.OpenHandOver),
    push=Codec(storage.Push, store_pb2.Push),
    seal=Codec(storage.Seal, store_pb2.Seal),
    release=Codec(storage.Release, store_pb2.Release),
)
ACQUIRED = Codec(storage.Acquired, store_pb2.Acquired)
FETCH_PROGRESS = Codec(storage.FetchProgress, store_pb2.FetchProgress)
FETCH_TRUNCATED = Codec(storage.FetchTruncated, store_pb2.FetchTruncated)
STORE_NOTICE: OneOf[storage.StoreNotice, store_pb2.StoreNotice] = OneOf(
    store_pb2.StoreNotice,
    hello=Codec(storage.StoreHello, store_pb2.StoreHello),
    acquired=ACQUIRED,
    fetch_progress=FETCH_PROGRESS,
    fetch_truncated=FETCH_TRUNCATED,
    reserved=Codec(storage.Reserved, store_pb2.Reserved),
    ingested=Codec(storage.Ingested, store_pb2.Ingested),
    grown=Codec(storage.Grown, store_pb2.Grown),
    handed_over=HANDED_OVER,
    hand_over_failed=Codec(storage.HandOverFailed, store_pb2.HandOverFailed),
    attempt_failed=ATTEMPT_FAILED,
    load=Codec(storage.StoreLoad, store_pb2.StoreLoad),
)

# ---- what a store holds ----

STORE_EVENT: OneOf[storage.StoreEvent, store_pb2.StoreEvent] = OneOf(
    store_pb2.StoreEvent,
    snapshot=Codec(storage.SnapshotPart, store_pb2.SnapshotPart),
    stored=Codec(storage.BlocksStored, store_pb2.BlocksStored),
    removed=Codec(storage.BlocksRemoved, store_pb2.BlocksRemoved),
    still_here=Codec(storage.StillHere, store_pb2.StillHere),
)

# ---- between stores ----

LEASE_PREFIX = Codec(storage.LeasePrefix, store_pb2.LeaseRequest)
LEASED_PREFIX = Codec(storage.LeasedPrefix, store_pb2.LeaseReply)
STORE_INCARNATION = Codec(storage.StoreIncarnation, store_pb2.StoreIncarnation)
WRITER = Codec(storage.Writer, store_pb2.Writer)
OPEN_INGEST = Codec(storage.OpenIngest, store_pb2.OpenIngestRequest)
INGEST_TARGETS = Codec(storage.IngestTargets, store_pb2.OpenIngestReply)
CLOSE_INGEST = Codec(storage.CloseIngest, store_pb2.CloseIngestRequest)
UNIT = Codec(storage.Unit, store_pb2.Unit)
INGEST_NOTICE: OneOf[storage.IngestNotice, store_pb2.IngestNotice] = OneOf(
    store_pb2.IngestNotice,
    unit=Codec(storage.IngestUnit, store_pb2.IngestUnit),
    seal=Codec(storage.IngestSeal, store_pb2.IngestSeal),
)
REPLICATE_PREFIX = Codec(storage.ReplicatePrefix, store_pb2.ReplicateRequest)
REPLICATED = Codec(storage.Replicated, store_pb2.ReplicateReply)

# ---- the stores of a bundle ----

LAYERS_AT = Codec(storage.LayersAt, store_pb2.LayersAt)
SSD_STATE = Codec(layer_stores.SsdState, layer_store_pb2.SsdState)
LAYER_ORDER: OneOf[layer_stores.LayerOrder, layer_store_pb2.LayerOrder] = OneOf(
    layer_store_pb2.LayerOrder,
    join=Codec(layer_stores.JoinBundle, layer_store_pb2.JoinBundle),
    generations=Codec(layer_stores.SetGenerations, layer_store_pb2.SetGenerations),
)
LAYER_REPORT: OneOf[layer_stores.LayerReport, layer_store_pb2.LayerReport] = OneOf(
    layer_store_pb2.LayerReport,
    joined=Codec(layer_stores.BundleJoined, layer_store_pb2.BundleJoined),
    still_there=Codec(layer_stores.StillThere, layer_store_pb2.StillThere),
)
MOVE = Codec(layer_stores.Move, layer_store_pb2.MoveRequest)
MOVED = Codec(layer_stores.Moved, layer_store_pb2.MoveReply)
KEPT_BLOCKS = Codec(layer_stores.KeptBlocks, layer_store_pb2.KeptBlocks)
PUT_COPIES = Codec(layer_stores.PutCopies, layer_store_pb2.PutCopiesRequest)
COPIES_PUT = Codec(layer_stores.CopiesPut, layer_store_pb2.PutCopiesReply)
GET_COPIES = Codec(layer_stores.GetCopies, layer_store_pb2.GetCopiesRequest)
COPIES_GOT = Codec(layer_stores.CopiesGot, layer_store_pb2.GetCopiesReply)
REMOVE_COPIES = Codec(layer_stores.RemoveCopies, layer_store_pb2.RemoveCopiesRequest)

# ---- the stages of a prefill group ----

LOAD_LAYERS = Codec(stages.LoadLayers, stage_pb2.LoadLayers)
STAGE_SAMPLING = Codec(stages.StageSampling, stage_pb2.StageSampling)
STAGE_SCORING = Codec(stages.StageScoring, stage_pb2.StageScoring)
STAGE_ROW = Codec(stages.StageRow, stage_pb2.StageRow)
STAGE_ORDER: OneOf[stages.StageOrder, stage_pb2.StageOrder] = OneOf(
    stage_pb2.StageOrder,
    join=Codec(stages.JoinGroup, stage_pb2.JoinGroup),
    run=Codec(stages.StagePass, stage_pb2.StagePass),
    acquired=ACQUIRED,
    fetch_progress=FETCH_PROGRESS,
    fetch_truncated=FETCH_TRUNCATED,
    attempt_failed=ATTEMPT_FAILED,
    forget=Codec(stages.ForgetAttempt, stage_pb2.ForgetAttempt),
    slots_given_back=Codec(stages.SlotsGivenBack, stage_pb2.SlotsGivenBack),
)
REFUSED_TOKEN = Codec(stages.RefusedToken, stage_pb2.RefusedToken)
STAGE_REPORT: OneOf[stages.StageReport, stage_pb2.StageReport] = OneOf(
    stage_pb2.StageReport,
    joined=Codec(stages.GroupJoined, stage_pb2.GroupJoined),
    layers=Codec(stages.LayersComputed, stage_pb2.LayersComputed),
    ended=Codec(stages.StagePassEnded, stage_pb2.StagePassEnded),
)
