"""What has to hold of every run, whatever was injected. Pure: from a history to its violations."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.history import (
    Answer,
    Choice,
    Exchange,
    History,
    ProcessState,
    absences,
    absent,
    disconnected,
)
from tests.chaos.plan import Fault
from tests.support.intervals import Interval, merged, overlap_s

LOGPROB_TOLERANCE = 2e-3
"""Sums of float32 come in another order with other splits."""
CONDUCTOR_PATIENCE_S = 8.0
"""A request that has not been accepted is refused with 503 when no Conductor answers for some 10 s, or answers only to say that no node is
ready."""
GATEWAY_START_S = 30.0
"""How long before a request its gateway may have been killed or held up for it not to know the Conductor yet, or told to end."""
VALKEY_ASKED_S = 5.0
"""How long after Valkey is back a gateway may still not have asked it."""
REPLACEMENT_S = 5.0
"""How long after a node's fault its streams may still have to be placed elsewhere."""
NODE_PATIENCE_S = 25.0
"""And when there is no node for some 30 s."""
FIRST_EVENTS_S = 0.2
"""A choice's first token may come in several events: its role, then its text."""
DEADLINE_ANSWER_S = 10.0
"""How much later than its deadline a request may be told that it cannot be kept."""
FD_GROWTH, THREAD_GROWTH = 40, 24
MEMORY_GROWTH_BYTES, MEMORY_GROWTH_SHARE = 96 << 20, 0.3
"""Of one process: what is above both is a leak."""
ENGINE_GROWTH_BYTES = 256 << 20
"""Of an engine's process: its temporaries for prompts of all lengths come to some 330 MiB with the model of these runs, after a thousand
prompts, which few of them compute; six thousand come to no more."""
_HOLDS_UP_CLIENTS = ("kill", "end", "stop", "suspend", "narrow", "slow")


@dataclass(frozen=True, slots=True)
class Violation:
    kind: str
    what: str
    at_s: float
    exchange: int | None = None
    """Its number."""


Check = Callable[[History], Iterator[Violation]]


def violations(history: History) -> list[Violation]:
    """In order of time."""
    found = [violation for check in CHECKS for violation in check(history)]
    return sorted(found, key=lambda violation: (violation.at_s, violation.exchange or 0))


# ---- what clients see ----


def references_are_answers(history: History) -> Iterator[Violation]:
    """A calm cluster answers what is valid, and refuses what is not."""
    for item in history.items:
        answer = history.reference[item.key]
        if not (answer.status == 200 if item.valid else 400 <= answer.status < 500):
            yield Violation("calm", f"{item.key} was answered {answer.status} ({answer.code}) by a calm cluster", 0.0)


def tokens_are_the_references(history: History) -> Iterator[Violation]:
    """But for what rounding decides: where two tokens are as likely as each other but for that, either is right."""
    for exchange, difference in differing(history):
        if not drawn(history, exchange):
            yield Violation("wrong output", difference, exchange.sent_s, exchange.number)


def differing(history: History) -> Iterator[tuple[Exchange, str]]:
    """The exchanges with another answer than the reference, and what is another."""
    for exchange in history.exchanges:
        wanted = history.reference.get(exchange.item.key)
        if wanted is None or wanted.status != 200 or not exchange.accepted:
            continue
        difference = _difference(exchange.answer, wanted, whole=bool(exchange.dones))
        if difference is not None:
            yield exchange, difference


def drawn(history: History, exchange: Exchange) -> bool:
    """Whether its answer parts from the reference just where that of a model does whose weights are off by little more than rounding."""
    choices, wanted = exchange.answer.choices, history.reference[exchange.item.key].choices
    nudged = [answer.choices for answer in history.nudged.get(exchange.item.key, ())]

    def parts_likewise(index: int) -> bool:
        texts = [other[index].text for other in nudged if index in other]
        at = _num_common(choices[index].text, wanted[index].text)
        return any(text != wanted[index].text and _num_common(text, wanted[index].text) == at for text in texts)

    if not choices.keys() <= wanted.keys():
        return False
    off = [index for index in choices if _choice_difference(choices[index], wanted[index], whole=bool(exchange.dones)) is not None]
    return bool(off) and all(choices[index].text != wanted[index].text and parts_likewise(index) for index in off)


def one_terminal_reply(history: History) -> Iterator[Violation]:
    """Of what was accepted: each choice finishes once, then [DONE] once, or there is an error, and nothing after it."""
    for exchange in history.exchanges:
        if not exchange.accepted or exchange.ended_s is None:
            continue
        finishes = Counter(piece.index for piece in exchange.pieces if piece.finish)
        if doubled := sorted(index for index, count in finishes.items() if count > 1):
            yield Violation("terminal replies", f"choices {doubled} finished more than once", exchange.ended_s, exchange.number)
        late = _after_finish(exchange)
        if late is not None:
            yield Violation("terminal replies", f"choice {late} went on after it had finished", exchange.ended_s, exchange.number)
        if exchange.dones > 1 or (exchange.dones and exchange.errors) or len(exchange.errors) > 1 or exchange.after_the_end:
            what = f"{exchange.dones} times [DONE], {len(exchange.errors)} errors, {exchange.after_the_end} events after the end"
            yield Violation("terminal replies", what, exchange.ended_s, exchange.number)
        if exchange.dones and len(finishes) != exchange.item.num_choices:
            what = f"{len(finishes)} of {exchange.item.num_choices} choices finished before [DONE]"
            yield Violation("terminal replies", what, exchange.ended_s, exchange.number)
        if not exchange.dones and not exchange.errors and not exchange.broken and not exchange.aborted:
            yield Violation("terminal replies", "the answer ended without [DONE] and without an error", exchange.ended_s, exchange.number)


def none_is_lost(history: History) -> Iterator[Violation]:
    """What was accepted is completed, unless its gateway was killed or told to end, or its deadline has passed."""
    for exchange in history.exchanges:
        if exchange.ended_s is None:
            what = f"has not ended: {exchange.broken or 'nothing more came'}"
            yield Violation("not ended", what, exchange.sent_s, exchange.number)
        elif exchange.accepted and not exchange.dones and not exchange.aborted:
            if _gateway_died(history, exchange) or _deadline_passed(exchange):
                continue
            how = exchange.broken or "; ".join(str(error.get("message")) for error in exchange.errors) or "nothing more came"
            yield Violation("lost", f"accepted, then: {how}", exchange.ended_s, exchange.number)


def what_is_stored_is_kept(history: History) -> Iterator[Violation]:
    """Valkey may lose it; nobody may have something else."""
    for exchange in history.exchanges:
        if exchange.not_kept is None or exchange.looked_up_s is None:
            continue
        near = history.near((exchange.sent_s, exchange.looked_up_s))
        if exchange.not_kept == "nothing" and any(injection.fault.target in ("valkey", "all") for injection in near):
            continue
        yield Violation("stored", f"stored, then there was {exchange.not_kept}", exchange.looked_up_s, exchange.number)


def refusals_have_reasons(history: History) -> Iterator[Violation]:
    for exchange in history.exchanges:
        if exchange.ended_s is None or exchange.accepted:
            continue
        if exchange.status is None:
            if not _gateway_away(history, exchange):
                yield Violation("unreachable", f"no answer: {exchange.broken}", exchange.ended_s, exchange.number)
            continue
        reason = _why_refused_wrongly(history, exchange)
        if reason is not None:
            said = "; ".join(str(error.get("message")) for error in exchange.errors)
            yield Violation("refused", f"{exchange.status} ({exchange.code}): {reason}: {said}", exchange.ended_s, exchange.number)


def refusals_have_ids(history: History) -> Iterator[Violation]:
    """So that they are found in the log."""
    for exchange in history.exchanges:
        if exchange.status in (429, 503, 504) and exchange.request_id is None and exchange.ended_s is not None:
            yield Violation("no id", f"a refusal with {exchange.status} has no request id", exchange.ended_s, exchange.number)


def gaps_are_short(history: History) -> Iterator[Violation]:
    """Between two pieces of a choice, not counting the time in which nobody could have served it. One a request, its longest."""
    if history.limits.gap_s == float("inf"):
        return
    excused = excuses(history)
    for exchange in (exchange for exchange in history.exchanges if not exchange.item.has_time):
        (begin, end), unexcused = max(excused[exchange.gateway].gaps(exchange), key=lambda gap: gap[1], default=((0.0, 0.0), 0.0))
        if unexcused > history.limits.gap_s:
            what = f"{end - begin:.1f} s without a token, {unexcused:.1f} s of it while others could have served"
            yield Violation("gap", what, begin, exchange.number)


def first_tokens_come(history: History) -> Iterator[Violation]:
    excused, undecided = excuses(history), absent(history, "conductor")
    for exchange in history.exchanges:
        end = exchange.first_at_s
        if end is None or not exchange.item.stream or exchange.item.has_time:
            continue
        waited = end - exchange.sent_s
        could_have = unexcused_s((exchange.sent_s, end), merged([*excused[exchange.gateway].of_prompts, *undecided]))
        if could_have > history.limits.first_token_s:
            what = f"the first token came after {waited:.1f} s, {could_have:.1f} s of them while the cluster could have served"
            yield Violation("first token", what, exchange.sent_s, exchange.number)


# ---- what is left ----


def nothing_is_held(history: History) -> Iterator[Violation]:
    for point in history.calm_points:
        for name, value in sorted(point.leaks.items()):
            yield Violation("leak", f"{name} is {value:g} while nothing runs", point.at_s)


def cluster_becomes_whole(history: History) -> Iterator[Violation]:
    """And is seen: of who never is, every fault would be taken for its absence."""
    if history.died is not None:
        yield Violation("cluster", history.died, history.samples[-1].at_s if history.samples else 0.0)
    for point in history.calm_points:
        if point.not_whole is not None:
            yield Violation("cluster", point.not_whole, point.at_s)
    topology, seen = history.topology, {name for sample in history.samples for name in sample.ready}
    for name in (*topology.engines, *topology.gateways, "valkey"):
        if history.calm_points and name not in seen:
            yield Violation("cluster", f"{name} was never seen to be ready", history.calm_points[-1].at_s)
    if history.calm_points and not seen.intersection(topology.conductors):
        yield Violation("cluster", "no Conductor was ever seen to lead", history.calm_points[-1].at_s)


def stores_are_sound(history: History) -> Iterator[Violation]:
    stores = history.topology.engines
    for point in history.calm_points:
        for store, verdict in sorted({**dict.fromkeys(stores, "not verified"), **point.verdicts}.items()):
            if verdict != "sound":
                yield Violation("verify", f"{store}: {verdict}", point.at_s)


def processes_do_not_grow(history: History) -> Iterator[Violation]:
    """Each from its second calm point to its last: until the first, and from there to the second, it warms up."""
    engines = history.topology.engines
    seen: dict[int, list[tuple[float, ProcessState]]] = {}
    for point in history.calm_points:
        for state in point.processes:
            seen.setdefault(state.pid, []).append((point.at_s, state))
    for states in seen.values():
        if len(states) < 3:
            continue
        (_, was), (at_s, now) = states[1], states[-1]
        grown = []
        if now.fds - was.fds > FD_GROWTH:
            grown.append(f"file descriptors {was.fds} -> {now.fds}")
        if now.threads - was.threads > THREAD_GROWTH:
            grown.append(f"threads {was.threads} -> {now.threads}")
        margin = ENGINE_GROWTH_BYTES if now.name.partition("/")[0] in engines else MEMORY_GROWTH_BYTES
        if now.private_bytes - was.private_bytes > max(margin, MEMORY_GROWTH_SHARE * was.private_bytes):
            grown.append(f"private memory {was.private_bytes >> 20} -> {now.private_bytes >> 20} MiB")
        if grown:
            yield Violation("growth", f"{now.name}: {', '.join(grown)}", at_s)


def nothing_is_left(history: History) -> Iterator[Violation]:
    after, at_s = history.aftermath, history.samples[-1].at_s if history.samples else 0.0
    if after is None:
        return
    if after.problem is not None:
        yield Violation("stop", after.problem, at_s)
    for process in after.left_processes:
        yield Violation("left over", f"{process} outlives the cluster", at_s)
    for name in after.left_shared_memory:
        yield Violation("left over", f"/dev/shm/{name} outlives the cluster", at_s)


CHECKS: tuple[Check, ...] = (
    references_are_answers,
    tokens_are_the_references,
    one_terminal_reply,
    none_is_lost,
    what_is_stored_is_kept,
    refusals_have_reasons,
    refusals_have_ids,
    gaps_are_short,
    first_tokens_come,
    nothing_is_held,
    cluster_becomes_whole,
    stores_are_sound,
    processes_do_not_grow,
    nothing_is_left,
)


def _difference(answer: Answer, wanted: Answer, whole: bool) -> str | None:
    """In words; None: the answer is the wanted one, or the beginning of it unless it has to be whole."""
    if whole and answer.choices.keys() != wanted.choices.keys():
        return f"{len(answer.choices)} choices, not {len(wanted.choices)}"
    if whole and len({answer.completion_tokens, wanted.completion_tokens} - {None}) > 1:
        return f"{answer.completion_tokens} tokens, not {wanted.completion_tokens}"
    for index, choice in answer.choices.items():
        if index not in wanted.choices:
            return f"there is no choice {index}"
        if (difference := _choice_difference(choice, wanted.choices[index], whole)) is not None:
            return f"choice {index}: {difference}"
    return None


def _num_common(text: str, other: str) -> int:
    """How many characters both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def _choice_difference(choice: Choice, wanted: Choice, whole: bool) -> str | None:
    if not wanted.text.startswith(choice.text) or ((whole or choice.finish) and choice.text != wanted.text):
        at = _num_common(choice.text, wanted.text)
        return f"from character {at} on {choice.text[at : at + 30]!r}, not {wanted.text[at : at + 30]!r}"
    if choice.finish is not None and choice.finish != wanted.finish:
        return f"finished by {choice.finish}, not by {wanted.finish}"
    if whole and len(choice.tokens) != len(wanted.tokens):
        return f"log-probabilities of {len(choice.tokens)} tokens, not of {len(wanted.tokens)}"
    for at, ((token, logprob), (other, other_logprob)) in enumerate(zip(choice.tokens, wanted.tokens, strict=False)):
        if token != other:
            return f"token {at} is {token!r}, not {other!r}"
        if (logprob is None) != (other_logprob is None) or (
            logprob is not None and other_logprob is not None and abs(logprob - other_logprob) > LOGPROB_TOLERANCE
        ):
            return f"token {at} ({token!r}) has log-probability {logprob}, not {other_logprob}"
    return None


def _after_finish(exchange: Exchange) -> int | None:
    finished: set[int] = set()
    for piece in exchange.pieces:
        if piece.index in finished and not piece.finish:
            return piece.index
        if piece.finish:
            finished.add(piece.index)
    return None


def why(history: History, exchange: Exchange) -> str:
    """Why it came to what it did, in a word or two: what the gateway said, or what befell the gateway."""
    match exchange.outcome:
        case "refused":
            return f"{exchange.status} {exchange.code or ''}".strip()
        case "failed":
            return exchange.code or "no code"
        case "broken off" | "no answer":
            if _gateway_hit(history, exchange, _kills):
                return "gateway killed"
            if _gateway_hit(history, exchange, lambda fault: fault.kind == "end"):
                return "gateway told to end"
            return "gateway away" if _gateway_away(history, exchange) else "unexplained"
    return ""


def _gateway_died(history: History, exchange: Exchange) -> bool:
    """By what was injected. Who is told to end is given no time for it: `drain_s` is 0."""
    return _gateway_hit(history, exchange, lambda fault: _kills(fault) or fault.kind == "end")


def _kills(fault: Fault) -> bool:
    return fault.kind == "kill" or fault.then_kill


def _gateway_away(history: History, exchange: Exchange) -> bool:
    """It could not be reached at some time, for whatever reason."""
    begin, end = exchange.lifetime
    unhealthy = absent(history, "gateway", exchange.gateway)
    return overlap_s((begin - 1.0, end + 1.0), unhealthy) > 0 or _gateway_hit(
        history, exchange, lambda fault: fault.kind in _HOLDS_UP_CLIENTS
    )


def _gateway_hit(history: History, exchange: Exchange, how: Callable[[Fault], bool], before_s: float = 1.0) -> bool:
    begin, end = exchange.lifetime
    hosts = {exchange.gateway, "all", *(("conductor-0",) if history.topology.gateway_in_conductor else ())}
    return any(
        injection.not_injected is None
        and how(injection.fault)
        and injection.fault.target in hosts
        and overlap_s((begin - before_s, end + 1.0), [_widened(injection.interval)]) > 0
        for injection in history.injections
    )


def _widened(interval: Interval) -> Interval:
    return interval[0] - 0.5, interval[1] + 0.5


def _deadline_passed(exchange: Exchange) -> bool:
    deadline_s = exchange.item.deadline_s
    return (
        deadline_s is not None
        and exchange.code == "deadline"
        and exchange.ended_s is not None
        and exchange.ended_s - exchange.sent_s >= 0.9 * deadline_s
    )


def _why_refused_wrongly(history: History, exchange: Exchange) -> str | None:
    """None: the refusal is explained, by the request itself or by what was injected."""
    assert exchange.status is not None and exchange.ended_s is not None
    lifetime = exchange.lifetime
    wanted = history.reference.get(exchange.item.key)
    if wanted is not None and wanted.status != 200 and exchange.code != "not_ready":
        if (exchange.status, exchange.code) != (wanted.status, wanted.code):
            return f"a calm cluster says {wanted.status} ({wanted.code})"
        return None
    deadline_s = exchange.item.deadline_s
    if exchange.status in (429, 504) and deadline_s is not None and exchange.code == "deadline":
        late_s = unexcused_s(lifetime, absent(history, "gateway", exchange.gateway)) - deadline_s
        return f"told {late_s:.1f} s after the deadline" if late_s > DEADLINE_ANSWER_S else None
    if exchange.status == 429:
        if not history.limits.sheds_load:
            return "nothing is refused for load here"
        return None if exchange.retry_after else "without Retry-After"
    if exchange.code == "shutting_down":
        ended = _gateway_hit(history, exchange, lambda fault: fault.kind == "end", before_s=GATEWAY_START_S)
        return None if ended else "nobody told its gateway to end"
    if exchange.code == "not_ready":
        begin, end = lifetime
        unasked = overlap_s((begin - VALKEY_ASKED_S, end), _unmet(history, exchange.gateway))
        return None if unasked > 0 else "its gateway had asked Valkey since it started"
    if exchange.status == 503:
        undecided, unserved = _undecided(history, exchange.gateway), merged([*absent(history, "prefill"), *absent(history, "decode")])
        nobody_decides, nobody_serves = overlap_s(lifetime, undecided), overlap_s(lifetime, unserved)
        neither = overlap_s(lifetime, [*undecided, *unserved])
        if (nobody_decides and neither >= CONDUCTOR_PATIENCE_S) or nobody_serves >= NODE_PATIENCE_S or _gateway_died(history, exchange):
            return None
        return (
            f"nobody to decide for {nobody_decides:.1f} s, nobody to serve for {nobody_serves:.1f} s of {lifetime[1] - lifetime[0]:.1f} s"
        )
    return "no such refusal is foreseen"


def _undecided(history: History, gateway: str) -> list[Interval]:
    """When it knew no Conductor that decides: a gateway that has just been started or woken looks for it in Valkey."""
    return merged([*absent(history, "conductor"), *_unmet(history, gateway)])


def _unmet(history: History, gateway: str) -> list[Interval]:
    """When Valkey was away of which the gateway, just started or woken, wanted to know something."""
    hit = absent(history, "gateway", gateway)
    return [(a, b) for a, b in absent(history, "valkey") if any(begin <= b and end + GATEWAY_START_S >= a for begin, end in hit)]


def unexcused_s(gap: Interval, excused: Sequence[Interval]) -> float:
    """What is left of it without the time in which nobody could have served, in order and apart from each other."""
    begin, end = gap
    first = bisect_right(excused, begin, key=lambda interval: interval[1])
    return end - begin - overlap_s(gap, itertools.takewhile(lambda interval: interval[0] < end, excused[first:]))


@dataclass(frozen=True, slots=True)
class Excuses:
    """When a gateway's requests could not have been served, by whoever."""

    of_prompts: Sequence[Interval]
    """Until they have been computed and handed over, for which it takes a prefill node."""
    of_streams: Sequence[Interval]
    """Afterwards, when it does so only for what the decode node has lost."""

    def gaps(self, exchange: Exchange) -> Iterator[tuple[Interval, float]]:
        """Each gap, and how much of it is not excused. The prompt may still be handed over until after a choice's first token."""
        first: dict[int, float] = {}
        for piece in exchange.pieces:
            first.setdefault(piece.index, piece.at_s)
        for gap, index in exchange.gaps():
            handed_over = gap[0] > first[index] + FIRST_EVENTS_S
            yield gap, unexcused_s(gap, self.of_streams if handed_over else self.of_prompts)


def excuses(history: History) -> dict[str, Excuses]:
    """By gateway."""
    result = {}
    for name in history.topology.gateways:
        nobody = [*absent(history, "decode"), *absent(history, "gateway", name), *history.own_stalls]
        decode, nodes = history.topology.decode, history.topology.engines
        of_prompts, of_streams = (merged([*nobody, *_unplaced(history, name, lost_by)]) for lost_by in (nodes, decode))
        result[name] = Excuses(of_prompts, of_streams)
    return result


def _unplaced(history: History, gateway: str, nodes: Sequence[str]) -> Iterator[Interval]:
    """While nobody decides or computes prompts, from when one of these nodes, or the gateway, may have lost what it had: that is computed
    anew, which may be interrupted by the next absence. Other streams need neither."""
    lost = [interval for name in nodes for interval in (*absences(history, name), *disconnected(history, name))]
    lost += absences(history, gateway)
    for begin, end in merged([*_undecided(history, gateway), *absent(history, "gateway", gateway), *absent(history, "prefill")]):
        since = [max(begin, a) for a, b in lost if a <= end and b + REPLACEMENT_S >= begin]
        if since:
            lost.append((min(since), end))
            yield min(since), end
