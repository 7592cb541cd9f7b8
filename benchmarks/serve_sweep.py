"""The sweep of `make bench-serve`: under which settings vLLM serves each load best, by one short run of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks import serve_load as load
from benchmarks.driven import DriverFailed, console
from benchmarks.results import Row
from benchmarks.serve_load import InFlightLimit, Objective, Records
from benchmarks.vllm_server import ServerSettings, VllmServers

LIMITS = tuple(InFlightLimit(in_flight, refuses) for in_flight in (4, 8) for refuses in (True, False))
"""What `--max-num-queued-reqs` (others are answered 503) and `--max-num-seqs` (others wait) do inside of vLLM."""
WARM_UP_S = 3.0
RULE = (
    "the one with the most goodput in its run and, among equals, the one that used up the least of the objectives (median of its requests)"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is chosen about vLLM for a load."""

    server: ServerSettings
    limit: InFlightLimit | None = None

    def __str__(self) -> str:
        threads = f"{self.server.threads} thread{'s' if self.server.threads > 1 else ''}"
        return f"chunk {self.server.chunk_tokens}, {threads}" + (f", {self.limit}" if self.limit is not None else "")


@dataclass(frozen=True, slots=True, order=True)
class SweepScore:
    """How well a load was served: by goodput and, among equals, by the strain, of which less is better."""

    goodput_per_s: float
    relief: float
    """The strain's negative."""


@dataclass(slots=True)
class Sweep:
    """One run of each setting that is tried at a rate. All runs at a rate have the same requests and begin with an empty prefix cache."""

    servers: VllmServers
    objectives: Mapping[str, Objective]
    seconds: float
    """The length of each run."""
    seed: int
    scores: dict[float, dict[Setting, SweepScore]] = field(default_factory=dict)
    """What was tried at each rate, in the order in which it was."""
    left_out: dict[ServerSettings, str] = field(default_factory=dict)
    """Servers that did not start, and why."""

    def run(self, rates: Sequence[float], chunks: Iterable[int], threads: int) -> None:
        """First the chunk, with a thread on every core; then, with the best chunk for each rate, a core left to the scheduler; then, with
        the best of these, limits in front of the server."""
        for chunk_tokens in chunks:
            for rate in rates:
                self._try(rate, Setting(ServerSettings(chunk_tokens, threads)))
            self._drop_others()
        if threads > 1:
            for rate in rates:
                self._try(rate, Setting(replace(self.best(rate).server, threads=threads - 1)))
        self._drop_others()
        for rate in rates:
            without = self.best(rate)
            for limit in LIMITS:
                self._try(rate, replace(without, limit=limit))

    def best(self, rate: float) -> Setting:
        """The best of those that were tried at the rate, by RULE; the first one among equals."""
        scores = self.scores[rate]
        return max(scores, key=lambda setting: scores[setting])

    def rows(self) -> list[Row]:
        """The goodput of every setting at every rate at which it was tried."""
        return [
            Row(f"vLLM's goodput in the sweep: {setting}", "1/s", score.goodput_per_s, case=at_rate(rate))
            for rate, scores in self.scores.items()
            for setting, score in scores.items()
        ]

    def chosen(self) -> str:
        """The best setting for each rate, as the notes have it."""
        return "; ".join(f"{at_rate(rate)}: {self.best(rate)}" for rate in self.scores)

    def _try(self, rate: float, setting: Setting) -> None:
        scores = self.scores.setdefault(rate, {})
        if setting in scores or setting.server in self.left_out:
            return
        try:
            server = self.servers.get(setting.server)
        except DriverFailed as error:
            console.print(f"left out: {setting}: {error}", style="red", markup=False)
            self.left_out[setting.server] = f"vLLM with {setting}: {str(error).splitlines()[0]}"
            return
        with server.at_work() as url:
            warm_up(url, self.seed)
            records = load.loaded(url, rate, self.seconds, self.seed + load.SEEDS_APART, setting.limit)
        scores[setting] = score_of(records, rate, self.objectives)
        console.print(f"{at_rate(rate)}, {setting}: goodput {scores[setting].goodput_per_s:.2f}/s")

    def _drop_others(self) -> None:
        self.servers.keep({self.best(rate).server for rate in self.scores})


def score_of(records: Records, rate: float, objectives: Mapping[str, Objective]) -> SweepScore:
    return SweepScore(rate * load.good_share(records, objectives), -load.strain(records, objectives))


def warm_up(url: str, seed: int) -> None:
    """A few requests whose prompts nobody asks about again."""
    load.loaded(url, 1.0, WARM_UP_S, seed)


def at_rate(rate: float) -> str:
    return f"{rate:g} requests/s"
