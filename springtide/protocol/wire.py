"""The codec of each word. `X.encode(word)` is its message, `X.decode(message)` the word."""

from __future__ import annotations

from springtide.cost import DecodeCost, PrefillCost
from springtide.protocol import attempts, instances, scheduling, status
from springtide.protocol.codec import Codec, OneOf
from springtide.rpc import common_pb2, conductor_pb2, node_pb2

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
HUNG_INSTANCES = Codec(instances.HungInstances, conductor_pb2.HungInstances)
ROLE_SWITCH = Codec(instances.RoleSwitch, node_pb2.SwitchRoleRequest)
PREFILL_COST = Codec(PrefillCost, node_pb2.PrefillCost)
DECODE_COST = Codec(DecodeCost, node_pb2.DecodeCost)
LOAD = Codec(instances.Load, node_pb2.Load)
LOAD_REPORT = Codec(instances.LoadReport, node_pb2.LoadReport)

# ---- scheduling ----

PREFIX_SOURCE = Codec(scheduling.PrefixSource, common_pb2.PrefixSource)
ASSIGNMENT = Codec(scheduling.Assignment, conductor_pb2.Assignment)
REJECTION = Codec(scheduling.Rejection, conductor_pb2.Rejection)
NOT_LEADER = Codec(scheduling.NotLeader, conductor_pb2.NotLeader)
ESTIMATE = Codec(scheduling.Estimate, conductor_pb2.Estimate)
SCHEDULE = Codec(scheduling.Schedule, conductor_pb2.ScheduleRequest)
SCHEDULE_REPLY = Codec(scheduling.ScheduleReply, conductor_pb2.ScheduleReply)

# ---- status ----

INSTANCE_STATUS = Codec(status.InstanceStatus, conductor_pb2.InstanceStatus)
PREDICTION_ERRORS = Codec(status.PredictionErrors, conductor_pb2.PredictionErrors)
CLUSTER_STATUS = Codec(status.ClusterStatus, conductor_pb2.ClusterStatus)
