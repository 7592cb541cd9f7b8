"""What a run was and came to, for people and as JSON."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.chaos.apis import DIALECTS
from tests.chaos.checks import Excuses, Violation, differing, drawn, excuses, why
from tests.chaos.history import OUTCOMES, Exchange, History, Injection, Outcome

DECIDED_BY_ROUNDING = "decided by rounding"
"""Answers that part from the reference where that of a model does whose weights are a little off."""
SHOWN_OF_A_KIND = 6
SHOWN_FAULTS = 6
LAST_EVENTS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """How it is repeated, and where its logs are."""

    seed: int
    shape: str
    minutes: float
    command: str
    logs: str
    commit: str


@dataclass(frozen=True, slots=True)
class Row:
    """What was done to one sort of target in one way, and what came of it while it lasted and shortly after."""

    fault: str
    target: str
    injected: int
    not_injected: int
    requests: int
    """That ran at that time."""
    tokens: int
    """Pieces that came."""
    longest_gap_s: float
    unexcused_gap_s: float
    """The longest without the time in which nobody could have served: what `gap` bounds."""
    failed: int
    wrong: int


def commit() -> str:
    """That is checked out here, `-dirty` where files are others."""
    result = subprocess.run(("git", "describe", "--always", "--dirty"), capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def rows(history: History, violations: Sequence[Violation]) -> list[Row]:
    wrong = {violation.exchange for violation in violations if violation.kind == "wrong output"}
    failed = {
        violation.exchange
        for violation in violations
        if violation.kind in ("lost", "not ended", "refused", "unreachable", "terminal replies")
    }
    groups: dict[tuple[str, str], list[Injection]] = {}
    for injection in history.injections:
        groups.setdefault((_kind(injection), _sort(injection.fault.target)), []).append(injection)
    excused = excuses(history)
    return [_row(history, excused, key, group, wrong, failed) for key, group in sorted(groups.items())]


def table(rows: Sequence[Row]) -> str:
    header = ("fault", "of", "times", "requests", "pieces", "longest gap", "of it unexcused", "failed", "wrong")
    lines = [header]
    for row in rows:
        times = f"{row.injected}" + (f" (+{row.not_injected} not)" if row.not_injected else "")
        gaps = (f"{row.longest_gap_s:.1f} s", f"{row.unexcused_gap_s:.1f} s")
        lines.append((row.fault, row.target, times, str(row.requests), str(row.tokens), *gaps, str(row.failed), str(row.wrong)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def text(run: Run, history: History, violations: Sequence[Violation]) -> str:
    return "\n".join(_text(run, history, violations))


def document(run: Run, history: History, violations: Sequence[Violation]) -> dict[str, Any]:
    """For a file."""
    return {
        "run": asdict(run),
        "totals": _totals(history),
        "reasons": {outcome: dict(reasons) for outcome, reasons in _reasons(history).items()},
        "rows": [asdict(row) for row in rows(history, violations)],
        "violations": [{**asdict(violation), "explanation": list(explanation(history, violation))} for violation in violations],
        "injections": [
            {**asdict(injection.fault), "at_s": injection.at_s, "until_s": injection.until_s, "not_injected": injection.not_injected}
            for injection in history.injections
        ],
        "calm_points": [asdict(point) for point in history.calm_points],
        "own_stalls": history.own_stalls,
    }


def explanation(history: History, violation: Violation) -> Iterator[str]:
    """The request's timeline and the faults near it."""
    exchange = next((exchange for exchange in history.exchanges if exchange.number == violation.exchange), None)
    if exchange is not None:
        yield from _timeline(exchange)
        lifetime = exchange.lifetime if exchange.ended_s is not None else (exchange.sent_s, exchange.sent_s + history.limits.end_s)
        near = history.near(lifetime)
    else:
        near = history.near((violation.at_s - 30.0, violation.at_s))
    near = sorted(near, key=lambda injection: abs(injection.at_s - violation.at_s))[:SHOWN_FAULTS]
    for injection in sorted(near, key=lambda injection: injection.at_s):
        begin, end = injection.interval
        yield f"fault {begin:7.1f} to {end:.1f} s: {_kind(injection)} {injection.fault.target}"


def _text(run: Run, history: History, violations: Sequence[Violation]) -> Iterator[str]:
    totals = _totals(history)
    yield f"shape {run.shape}, seed {run.seed}, {run.minutes:g} minutes, commit {run.commit}"
    yield table(rows(history, violations))
    yield ""
    for reason, count in Counter(
        f"{_kind(one)} {one.fault.target}: {one.not_injected}" for one in history.injections if one.not_injected
    ).items():
        yield f"not injected, {count} times: {reason}"
    yield "; ".join(f"{name} {value}" for name, value in totals.items())
    for outcome, reasons in _reasons(history).items():
        yield f"{outcome}: " + ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    stalls = [end - begin for begin, end in history.own_stalls]
    longest_s = max(stalls, default=0.0)
    yield f"the clients themselves stood still {len(stalls)} times, {longest_s:.2f} s at most, {sum(stalls):.2f} s in all (not counted)"
    if violations:
        yield ""
        yield from _listed(history, violations)
        yield f"logs: {run.logs}"
    else:
        yield "no violations"
    yield f"repeat: {run.command}"


def _listed(history: History, violations: Sequence[Violation]) -> Iterator[str]:
    kinds = Counter(violation.kind for violation in violations)
    yield f"{len(violations)} VIOLATIONS: " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    shown = Counter[str]()
    for violation in violations:
        shown[violation.kind] += 1
        if shown[violation.kind] > SHOWN_OF_A_KIND:
            continue
        who = "" if violation.exchange is None else f" request {violation.exchange}"
        yield f"- {violation.at_s:7.1f} s [{violation.kind}]{who}: {violation.what}"
        for line in explanation(history, violation):
            yield f"      {line}"
    if (left_out := sum((shown - Counter(dict.fromkeys(shown, SHOWN_OF_A_KIND))).values())) > 0:
        yield f"… and {left_out} more; --report FILE has them all"


def _timeline(exchange: Exchange) -> Iterator[str]:
    item = exchange.item
    body = {name: value if len(str(value)) < 60 else f"{str(value)[:40]}… ({len(value)})" for name, value in item.body.items()}
    yield f"{item.key} by {exchange.client} through {exchange.gateway}: POST {DIALECTS[item.api].path} {body}"
    said = "no answer" if exchange.status is None else f"{exchange.status} {exchange.request_id or ''}".strip()
    ended = "not ended" if exchange.ended_s is None else f"ended {exchange.ended_s:.1f} s"
    yield f"sent {exchange.sent_s:.1f} s, {said}, {len(exchange.pieces)} pieces, {ended}{', aborted' if exchange.aborted else ''}"
    last = [
        f"{piece.at_s:.1f} #{piece.index} {piece.text!r}{f' {piece.finish}' if piece.finish else ''}"
        for piece in exchange.pieces[-LAST_EVENTS:]
    ]
    if last:
        yield f"last pieces: {', '.join(last)}"


def _row(
    history: History,
    excused: dict[str, Excuses],
    key: tuple[str, str],
    group: list[Injection],
    wrong: set[int | None],
    failed: set[int | None],
) -> Row:
    done = [injection for injection in group if injection.not_injected is None]
    spans = [(one.interval[0], one.interval[1] + history.limits.aftereffect_s) for one in done]
    touched = {
        exchange.number: exchange
        for exchange in history.exchanges
        for begin, end in spans
        if exchange.sent_s <= end and exchange.lifetime[1] >= begin
    }
    tokens, longest, unexcused = 0, 0.0, 0.0
    for exchange in touched.values():
        tokens += sum(any(begin <= piece.at_s <= end for begin, end in spans) for piece in exchange.pieces)
        if exchange.item.has_time:
            continue
        for (begin, end), unexcused_s in excused[exchange.gateway].gaps(exchange):
            if any(begin <= b and end >= a for a, b in spans):
                longest, unexcused = max(longest, end - begin), max(unexcused, unexcused_s)
    return Row(
        *key,
        injected=len(done),
        not_injected=len(group) - len(done),
        requests=len(touched),
        tokens=tokens,
        longest_gap_s=longest,
        unexcused_gap_s=unexcused,
        failed=len(failed & touched.keys()),
        wrong=len(wrong & touched.keys()),
    )


def _totals(history: History) -> dict[str, Any]:
    exchanges = history.exchanges
    outcomes = Counter(exchange.outcome for exchange in exchanges)
    return {
        "requests": len(exchanges),
        **{outcome: outcomes[outcome] for outcome in OUTCOMES},
        DECIDED_BY_ROUNDING: sum(drawn(history, exchange) for exchange, _ in differing(history)),
        "pieces": sum(len(exchange.pieces) for exchange in exchanges),
        "faults": sum(injection.not_injected is None for injection in history.injections),
        "minutes of rounds": round(sum(end - begin for begin, end in history.rounds) / 60, 2),
        "calm points": len(history.calm_points),
    }


def _reasons(history: History) -> dict[Outcome, Counter[str]]:
    """Of what was neither completed nor aborted, in order of the outcomes."""
    reasons: dict[Outcome, Counter[str]] = {outcome: Counter() for outcome in OUTCOMES}
    for exchange in history.exchanges:
        if reason := why(history, exchange):
            reasons[exchange.outcome][reason] += 1
    return {outcome: counts for outcome, counts in reasons.items() if counts}


def _kind(injection: Injection) -> str:
    fault = injection.fault
    if fault.kind == "stop":
        return "stop, kill" if fault.then_kill else "stop, wake"
    return fault.kind


def _sort(target: str) -> str:
    """Of process: `prefill-1-store` is a store, `prefill-0/1` a stage or rank."""
    if target.endswith("-store"):
        return "store"
    if "/" in target:
        return "stage or rank"
    return target.partition("-")[0]
