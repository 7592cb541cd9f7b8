"""The simulator's model of this machine: a profile, with what the profile does not know learnt from runs of the cluster."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.driven import console
from simulator.cluster import Cluster, ClusterOptions
from simulator.hardware import Hardware, PassTimes, StepTimes
from simulator.run import Plan, options_of
from simulator.workload import Workload
from springtide.config import ClusterConfig

CORES = 2.0
FITS = 3
"""Of the two figures of the runs under load, which depend on each other."""
MOST_CONTENTION = 3.0
RPCS = 2
"""Between a client's sending and its first token, in the simulator."""


@dataclass(frozen=True, slots=True)
class Played:
    """Milliseconds of each request; TBT is the mean of its tokens'."""

    ttft_ms: Sequence[float]
    tbt_ms: Sequence[float]

    @classmethod
    def of_all(cls, several: Iterable[Played]) -> Played:
        several = list(several)
        return cls([ms for played in several for ms in played.ttft_ms], [ms for played in several for ms in played.tbt_ms])


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds in passes and in steps, of all engines."""

    passes: float
    steps: float

    def since(self, earlier: Busy) -> Busy:
        return Busy(self.passes - earlier.passes, self.steps - earlier.steps)


@dataclass(frozen=True, slots=True)
class Seen:
    """Some requests, what became of them in the cluster, and what its engines had to do."""

    load: Workload
    played: Played
    busy: Busy


@dataclass(frozen=True, slots=True)
class Model:
    hardware: Hardware
    rpc_s: float = 0.0
    pass_contention: float = 0.0
    """See Processor."""
    step_contention: float = 0.0

    def options(self, load: Workload, prefill: int, decode: int) -> ClusterOptions:
        config = ClusterConfig()
        settings = {
            "conductor.admission": "baseline",
            "prefill_node.chunk_tokens": config.prefill_node.chunk_tokens,
            "slo.ttft_ms": config.slo.ttft_ms,
            "slo.tbt_ms": config.slo.tbt_ms,
            "conductor.transfer_bytes_per_s": config.conductor.transfer_bytes_per_s,
        }
        return replace(
            options_of(Plan(load, self.hardware, prefill, decode, config=settings)),
            cores=CORES,
            rpc_s=self.rpc_s,
            pass_contention=self.pass_contention,
            step_contention=self.step_contention,
        )

    def play(self, load: Workload, prefill: int, decode: int) -> tuple[Played, Busy]:
        cluster = Cluster(load, self.options(load, prefill, decode))
        cluster.run()
        assert cluster.records.completed == len(load.requests), cluster.records.num_rejected()
        busy = Busy(*(sum(engine.busy_s for engine in engines.values()) for engines in (cluster.prefills, cluster.decodes)))
        return Played(cluster.records.ttft_ms, cluster.records.tbt_ms), busy

    def scaled(self, prefill: float, decode: float) -> Model:
        passes, steps = self.hardware.passes, self.hardware.steps
        assert isinstance(passes, PassTimes) and isinstance(steps, StepTimes)
        hardware = replace(
            self.hardware,
            passes=PassTimes(tuple(prefill * ms for ms in passes.by_tokens_ms), prefill * passes.per_pair_ms, 0.0),
            steps=StepTimes(tuple(decode * ms for ms in steps.by_batch_ms), decode * steps.per_context_token_ms),
            prefill_cost=self.hardware.prefill_cost.scaled(prefill),
            decode_cost=self.hardware.decode_cost.scaled(decode),
        )
        return replace(self, hardware=hardware)

    def with_step_overhead(self, step_ms: float) -> Model:
        """`step_ms`: between two steps."""
        steps = self.hardware.steps
        assert isinstance(steps, StepTimes)
        by_batch_ms = (0.0, *(ms + step_ms for ms in steps.by_batch_ms[1:]))
        return replace(self, hardware=replace(self.hardware, steps=replace(steps, by_batch_ms=by_batch_ms)))


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a profile does not know of a cluster of so many engines, learnt from its runs."""

    prefill: int
    decode: int
    alone: Sequence[Seen]
    """Requests one after another."""
    loaded: Sequence[Seen]
    """Other requests than those that are compared."""

    def fit(self, model: Model) -> Model:
        simulated, real = self._busy(model, self.alone), _sum(seen.busy for seen in self.alone)
        scales = real.passes / simulated.passes, real.steps / simulated.steps
        gaps = sum(request.output_tokens - 1 for seen in self.alone for request in seen.load.requests)
        step_overhead_ms = max(0.0, (_waited_ms(self.alone) - 1000 * real.steps) / gaps)
        model = model.scaled(*scales).with_step_overhead(step_overhead_ms)
        again = Played.of_all(self._play(model, self.alone)).ttft_ms
        seen = Played.of_all(seen.played for seen in self.alone).ttft_ms
        around_ms = statistics.median(ours - theirs for ours, theirs in zip(seen, again, strict=True))
        model = replace(model, rpc_s=max(0.0, around_ms / 1000 / RPCS))

        passes_s = _sum(seen.busy for seen in self.loaded).passes
        tbt_ms = statistics.fmean(Played.of_all(seen.played for seen in self.loaded).tbt_ms)
        for _ in range(FITS):
            model = _fitted(model, "pass_contention", lambda tried: self._busy(tried, self.loaded).passes, passes_s)
            model = _fitted(
                model, "step_contention", lambda tried: statistics.fmean(Played.of_all(self._play(tried, self.loaded)).tbt_ms), tbt_ms
            )
        console.print(
            f"alone, passes take {scales[0]:.2f} times as long as in the profile, steps {scales[1]:.2f} times; {step_overhead_ms:.1f} ms "
            f"between steps, {around_ms:.1f} ms around a prefill; another engine at work makes passes {model.pass_contention:.0%} longer "
            f"and steps {model.step_contention:.0%}"
        )
        return model

    def _busy(self, model: Model, runs: Sequence[Seen]) -> Busy:
        return _sum(model.play(seen.load, self.prefill, self.decode)[1] for seen in runs)

    def _play(self, model: Model, runs: Sequence[Seen]) -> list[Played]:
        return [model.play(seen.load, self.prefill, self.decode)[0] for seen in runs]


def _waited_ms(runs: Sequence[Seen]) -> float:
    """The time that was waited for tokens after the first, over all requests."""
    return sum(
        tbt * (request.output_tokens - 1) for seen in runs for tbt, request in zip(seen.played.tbt_ms, seen.load.requests, strict=True)
    )


def _fitted(model: Model, name: str, simulate: Callable[[Model], float], real: float) -> Model:
    """The model with the share `name` at which the simulation comes to `real`; it grows with the share."""
    low, high = 0.0, MOST_CONTENTION
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if simulate(replace(model, **{name: middle})) > real else (middle, high)
    return replace(model, **{name: low})


def _sum(several: Iterable[Busy]) -> Busy:
    passes, steps = zip(*((busy.passes, busy.steps) for busy in several), strict=True)
    return Busy(sum(passes), sum(steps))
