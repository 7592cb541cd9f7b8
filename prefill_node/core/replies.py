"""Updates for the gateways."""

from __future__ import annotations

from prefill_node.core.actions import Reply
from prefill_node.core.attempt import Attempt
from springtide.rpc import common_pb2, node_pb2


def failure(code: common_pb2.FailureCode, message: str) -> common_pb2.Failure:
    return common_pb2.Failure(code=code, message=message)


def failed(session: int, attempt_id: str, why: common_pb2.Failure) -> Reply:
    return Reply(session, node_pb2.PrefillUpdate(failed=common_pb2.TokenOutput(attempt_id=attempt_id, failure=why)))


def done(attempt: Attempt, output: common_pb2.TokenOutput, block_tokens: int) -> Reply:
    """`attempt` has computed its whole prompt. Queue time lasts until the first pass, compute time is that of its passes, fetch time
    counts when something came of it; what was waited for it counts in any case."""
    assert attempt.first_pass_at is not None
    fetched = attempt.reused_blocks > attempt.local_blocks
    return Reply(
        attempt.session,
        node_pb2.PrefillUpdate(
            done=node_pb2.PrefillDone(
                output=output,
                cached_tokens=attempt.reused_blocks * block_tokens,
                remote_tokens=(attempt.reused_blocks - attempt.local_blocks) * block_tokens,
                queue_ms=(attempt.first_pass_at - attempt.arrived_at) * 1000,
                compute_ms=attempt.compute_ms,
                fetch_ms=attempt.fetch_ms if fetched else 0.0,
                fetch_wait_ms=attempt.fetch_wait_ms,
            )
        ),
    )
