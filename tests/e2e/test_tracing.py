"""One trace of a request through a real cluster, as a collector receives it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

pytest.importorskip("opentelemetry.proto", reason="needs the extra otel")

from springtide.trace_context import TraceContext
from tests.support.cluster import Cluster, cached_blocks, evict_all
from tests.support.otlp import Collector, ReceivedSpan
from tests.support.reference import random_prompt
from tests.support.traces import children, named, only, unaccounted_s

OUTPUT_TOKENS = 80
KILL_AFTER = 12
CHUNK_TOKENS = 256
STAGES = 2
CLIENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", True)
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
CLOSE = 0.05
"""Of the request's time: as much as its trace may differ from what its client has measured."""
INSTANT_S = 1e-5
"""As close as a wall clock's nanoseconds are in seconds, as a float."""


def decoding(cluster: Cluster) -> str | None:
    return next((name for name in DECODES if cluster.metric(name, "springtide_decode_attempts_running") > 0), None)


def lose_prefix_at_prefill_nodes(cluster: Cluster) -> None:
    """What a decode node was handed over is now the only copy."""
    for name in PREFILLS:
        evict_all(Path(cluster.record.run_dir, f"{name}.store.sock"))

    def known() -> bool:
        status = cluster.status()
        if len(status.instances) < len(PREFILLS + DECODES):
            return False
        return not any(cached_blocks(status, name) for name in PREFILLS) and any(cached_blocks(status, name) for name in DECODES)

    cluster.wait_until(known, "the Conductor to know")


@dataclass(frozen=True)
class Seen:
    """What a client has measured of its request."""

    first_s: float
    """Until the first token."""
    all_s: float
    killed: str
    """The decode node that was killed meanwhile."""


def hurt(cluster: Cluster, prompt: Sequence[int]) -> Seen:
    """Streams an output, and kills the decode node that makes it in the midst."""
    request = {"model": cluster.model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    killed, pieces, first_s, began = "", 0, 0.0, time.monotonic()
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=request, timeout=120, headers={"traceparent": CLIENT.header}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["traceparent"].startswith(f"00-{CLIENT.trace_id}-")
        for line in answer.iter_lines():
            pieces += line.startswith("data: {")
            first_s = first_s or (time.monotonic() - began if pieces else 0.0)
            if pieces >= KILL_AFTER and not killed and (running := decoding(cluster)) is not None:
                killed = running
                cluster.kill(killed)
    return Seen(first_s, time.monotonic() - began, killed)


@pytest.mark.alone
def test_a_long_prompt_with_a_remote_prefix_and_a_killed_decode_node_is_one_trace_that_explains_its_time() -> None:
    prefix = random_prompt(1, length=960)
    settings = {"chunk_tokens": CHUNK_TOKENS, "stages": STAGES}
    with Collector() as collector, Cluster(prefill=2, decode=2, prefill_node=settings, tracing={"endpoint": collector.url}) as cluster:
        first = {"model": cluster.model, "prompt": prefix, "max_tokens": 4, "ignore_eos": True}
        assert httpx.post(f"{cluster.url}/v1/completions", json=first, timeout=120).status_code == 200
        lose_prefix_at_prefill_nodes(cluster)
        seen = hurt(cluster, prefix + random_prompt(2, length=840))
        spans = collector.trace(CLIENT.trace_id)
        logs = {name: cluster.log(name, lines=200) for name in PREFILLS}
    assert seen.killed, "nobody was killed: the output was too short"

    root = spans[0]
    assert (root.parent_id, root.attributes["gen_ai.operation.name"]) == (CLIENT.span_id, "text_completion")
    assert root.attributes["gen_ai.usage.output_tokens"] == OUTPUT_TOKENS and not root.error
    assert [span.name for span in children(spans, root) if span.name != "wait"] == ["prepare", "attempt", "attempt"]
    lost, last = named(spans, "attempt")
    assert lost.attributes["springtide.culprit"] == seen.killed and lost.error and last.links == (lost.span_id,)
    check_attempts(spans, [lost, last])
    check_waits(spans, [lost, last])
    check_chunks(spans)
    (fetch,) = [span for span in named(spans, "fetch") if span.parent_id in {one.span_id for one in children(spans, lost)}]
    # Two of 30 layers' worth of K and V are far more than a kilobyte a token.
    assert fetch.attributes["springtide.tokens"] == 960 and fetch.attributes["springtide.bytes"] > 960 * 1024
    assert fetch.attributes["springtide.hidden_ms"] + fetch.attributes["springtide.waited_ms"] >= 0
    (over,) = [span for span in named(spans, "hand_over") if span.parent_id in {one.span_id for one in children(spans, lost)}]
    assert over.attributes["springtide.bytes"] > 0

    by_id = {span.span_id: span for span in spans}
    for span in spans[1:]:
        parent = by_id[span.parent_id]
        assert parent.begin <= span.begin <= span.end <= parent.end, (span, parent)
    check_durations(spans, [lost, last], seen)
    assert any(f"trace_id={CLIENT.trace_id}" in log for log in logs.values())


def check_attempts(spans: Sequence[ReceivedSpan], attempts: Sequence[ReceivedSpan]) -> None:
    """Each has been to the Conductor and to both sides, at instances that its decision names."""
    for attempt in attempts:
        schedule, *sides = children(spans, attempt)
        assert schedule.name == "schedule" and schedule.attributes["springtide.predicted.ttft_ms"] > 0
        assert [side.name for side in sides] == ["prefill", "decode"]
        for side in sides:
            expected = schedule.attributes[f"springtide.{side.name}.instance"]
            assert side.attributes["springtide.instance"] == expected, "an attempt is where the Conductor has placed it"
        steps = [span for span in children(spans, sides[1]) if span.name == "steps"]
        assert len(steps) == 1 and steps[0].attributes["springtide.steps"] > 0


def check_waits(spans: Sequence[ReceivedSpan], attempts: Sequence[ReceivedSpan]) -> None:
    """Of what each attempt waited for on either side there is a span, one after another, and nothing between them."""
    for attempt in attempts:
        prefill, decode = only(spans, attempt, "prefill"), only(spans, attempt, "decode")
        assert prefill.attributes["springtide.role"] == "prefill"
        queue, chunks = only(spans, prefill, "queue"), named(children(spans, prefill), "chunk")
        assert duration_s(queue) * 1000 == pytest.approx(prefill.attributes["springtide.queue_ms"], abs=1.0)
        assert 0 <= queue.attributes["springtide.slots_ms"] <= prefill.attributes["springtide.queue_ms"]
        assert chunks[0].begin == pytest.approx(queue.end, abs=CLOSE * duration_s(attempt)), "its first pass ends the queue"
        reserve, ingest, steps = children(spans, decode)
        assert [reserve.name, ingest.name, steps.name] == ["reserve", "ingest", "steps"]
        assert ingest.begin == pytest.approx(reserve.end, abs=INSTANT_S) and steps.begin == pytest.approx(ingest.end, abs=INSTANT_S)
        assert steps.end == pytest.approx(decode.end, abs=INSTANT_S)
        assert ingest.end > chunks[-1].end - CLOSE * duration_s(attempt), "the prompt is there when it has been computed"


def check_durations(spans: Sequence[ReceivedSpan], attempts: Sequence[ReceivedSpan], seen: Seen) -> None:
    """What comes one after another takes as long, together, as the client has waited; and each prompt's time is in its own spans."""
    root, most_s = spans[0], CLOSE * seen.all_s
    parts = [span for span in children(spans, root) if span.name != "attempt"]
    for attempt in attempts:
        decode = only(spans, attempt, "decode")
        parts += [only(spans, attempt, "schedule"), *(only(spans, decode, name) for name in ("reserve", "ingest", "steps"))]
    sum_s = sum(map(duration_s, parts))
    prompts_s = [unaccounted_s(spans, only(spans, attempt, "prefill")) for attempt in attempts]
    said_s = root.attributes["gen_ai.response.time_to_first_chunk"]
    computed = max(span.end for span in children(spans, only(spans, attempts[0], "prefill")) if span.name == "chunk")
    print(f"client {seen.all_s:.3f} s, request {duration_s(root):.3f} s, its parts {sum_s:.3f} s, in none {unaccounted_s(spans):.3f} s")
    print(f"first token {seen.first_s:.3f} s, said {said_s:.3f} s, computed {computed - root.begin:.3f} s; prompts in none {prompts_s}")
    print({f"{span.name} {span.begin - root.begin:.4f}": round(duration_s(span), 4) for span in spans})
    assert abs(seen.all_s - duration_s(root)) < most_s
    assert abs(seen.all_s - sum_s) < most_s
    assert unaccounted_s(spans) < most_s and max(prompts_s) < most_s
    assert abs(seen.first_s - said_s) < most_s and abs(seen.first_s - (computed - root.begin)) < most_s


def duration_s(span: ReceivedSpan) -> float:
    return span.end - span.begin


def check_chunks(spans: Sequence[ReceivedSpan]) -> None:
    """The chunks of each prompt are all of it that was not cached, and each has been through all stages, one after another."""
    for prefill in named(spans, "prefill"):
        chunks = [span for span in children(spans, prefill) if span.name == "chunk"]
        computed = prefill.attributes["springtide.prompt.tokens"] - prefill.attributes["springtide.cached_tokens"]
        if prefill.attributes["springtide.role"] == "prefill":
            assert sum(chunk.attributes["springtide.tokens"] for chunk in chunks) == computed
            for chunk in chunks:
                stages = children(spans, chunk)
                assert [stage.attributes["springtide.stage"] for stage in stages] == list(range(STAGES))
                assert all(stage.attributes["springtide.busy_ms"] > 0 for stage in stages)
                assert stages[0].begin <= stages[1].end
