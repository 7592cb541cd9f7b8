"""Each check finds what it is there for, and passes over what was to be expected. A check that cannot fail is no check."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.chaos import report
from tests.chaos.checks import CHECKS, violations
from tests.chaos.history import (
    OUTCOMES,
    Aftermath,
    Answer,
    CalmPoint,
    Choice,
    Exchange,
    History,
    Injection,
    Limits,
    Piece,
    ProcessState,
    Sample,
    Topology,
    absent,
)
from tests.chaos.observe import held
from tests.chaos.plan import Fault, Kind
from tests.chaos.reference import NUDGE, nudged
from tests.chaos.shapes import MODEL
from tests.chaos.summary import summary
from tests.chaos.workload import Item
from tests.support.intervals import merged, overlap_s
from tests.support.models import make_tiny_llama

TOPOLOGY = Topology(("prefill-0", "prefill-1"), ("decode-0",), ("conductor-0",), ("gateway-0",))
EVERYBODY = frozenset({"prefill-0", "prefill-1", "decode-0", "conductor-0", "gateway-0", "valkey"})
ITEM = Item("1", "chat", "completions", {"prompt": "x", "stream": True})
LIMITED = Item("2", "deadline", "completions", {"prompt": "x", "stream": True, "deadline_ms": 4000})
IDLE = Item("1", "idle", "completions", {"prompt": "x", "stream": True, "idle": True})
WRONG = Item("3", "invalid", "completions", {"prompt": []})
REFERENCE = {
    "1": Answer(200, None, {0: Choice("one two three", (), "length")}, 3),
    "2": Answer(200, None, {0: Choice("one two three", (), "length")}, 3),
    "3": Answer(400, "invalid_value"),
}


def pieces(*texts: str, every_s: float = 1.0, finish: str | None = "length") -> list[Piece]:
    """A piece each, the first at 1 s."""
    return [
        Piece(1.0 + number * every_s, 0, text, finish=finish if number == len(texts) - 1 else None) for number, text in enumerate(texts)
    ]


def exchange(**values: Any) -> Exchange:
    """Good, unless something else is said."""
    good = {"status": 200, "pieces": pieces("one ", "two ", "three"), "dones": 1, "completion_tokens": 3, "ended_s": 5.0, "request_id": "r"}
    return Exchange(**{"number": 1, "client": "client-0", "item": ITEM, "gateway": "gateway-0", "sent_s": 0.0, **good, **values})


def refused(status: int, code: str | None = None, **values: Any) -> Exchange:
    error = {"message": "no", "code": code}
    return exchange(**{"status": status, "pieces": [], "dones": 0, "completion_tokens": None, "errors": [error], "ended_s": 1.0, **values})


def history(*exchanges: Exchange, **values: Any) -> History:
    samples = [Sample(at_s / 2, EVERYBODY) for at_s in range(400)]
    return History(
        **{"topology": TOPOLOGY, "limits": Limits(), "items": (ITEM, LIMITED, WRONG), "reference": REFERENCE, "samples": samples, **values},
        exchanges=[*exchanges],
    )


def injected(kind: Kind, target: str, at_s: float, until_s: float | None = None) -> Injection:
    return Injection(Fault(at_s, kind, target), at_s, at_s if until_s is None else until_s)


def kinds(past: History) -> list[str]:
    return [violation.kind for violation in violations(past)]


def without(name: str, begin_s: float, end_s: float) -> list[Sample]:
    return [Sample(at_s / 2, EVERYBODY - {name} if begin_s <= at_s / 2 < end_s else EVERYBODY) for at_s in range(400)]


POINT = CalmPoint(60.0, {}, (), dict.fromkeys((*TOPOLOGY.prefill, *TOPOLOGY.decode), "sound"))


def test_a_good_run_has_no_violations() -> None:
    past = history(exchange(), refused(400, "invalid_value", item=WRONG), calm_points=[POINT], aftermath=Aftermath())
    assert violations(past) == []


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (exchange(pieces=pieces("one ", "2 ", "three")), "choice 0: from character 4 on '2 three', not 'two three'"),
        (exchange(pieces=pieces("one ", "two ")), "choice 0: from character 8 on '', not 'three'"),
        (exchange(pieces=pieces("one ", "two ", "three", "four")), "choice 0: from character 13 on 'four', not ''"),
        (exchange(pieces=pieces("one two three", finish="stop")), "choice 0: finished by stop, not by length"),
        (exchange(completion_tokens=4), "4 tokens, not 3"),
        (exchange(pieces=[]), "0 choices, not 1"),
        (exchange(pieces=[*pieces("one two three"), Piece(2.0, 1, "", (), "stop")]), "2 choices, not 1"),
        (exchange(pieces=pieces("on", "x", finish=None), dones=0, aborted=True), "choice 0: from character 2 on 'x', not 'e two three'"),
    ],
)
def test_a_wrong_output_is_found(bad: Exchange, what: str) -> None:
    found = [violation for violation in violations(history(bad)) if violation.kind == "wrong output"]
    assert [violation.what for violation in found] == [what]


def other_answer(text: str) -> Answer:
    return Answer(200, None, {0: Choice(text, (), "length")}, 3)


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ((other_answer("one two three"), other_answer("one 2 tree")), []),
        ((other_answer("one twice"), other_answer("one two three")), ["wrong output"]),
        ((other_answer("one two three"), other_answer("one two three")), ["wrong output"]),
        ((), ["wrong output"]),
    ],
    ids=["there", "elsewhere", "nowhere", "not-asked"],
)
def test_where_rounding_decides_either_token_is_right(others: tuple[Answer, ...], found: list[str]) -> None:
    past = history(exchange(pieces=pieces("one ", "2 ", "three")), nudged={"1": others} if others else {})
    assert kinds(past) == found
    assert report.document(report.Run(1, "plain", 1.0, "", "", ""), past, ())["totals"][report.DECIDED_BY_ROUNDING] == 1 - len(found)


def test_rounding_decides_neither_log_probabilities_nor_how_many_tokens_there_are() -> None:
    reference = {**REFERENCE, "1": Answer(200, None, {0: Choice("ab", (("a", -1.0), ("b", -2.0)), "length")}, 2)}
    for tokens in ((("a", -1.0), ("b", -2.1)), (("a", -1.0),)):
        other = exchange(pieces=[Piece(1.0, 0, "ab", tokens, "length")], completion_tokens=2)
        assert kinds(history(other, reference=reference, nudged={"1": (other_answer("ab"), other_answer("b"))})) == ["wrong output"]


def test_weights_are_nudged_by_little_to_either_side(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model", **MODEL)
    was, up, down = (
        load_file(path / "model.safetensors") for path in (model, nudged(model, tmp_path / "up", 1), nudged(model, tmp_path / "down", -1))
    )
    for name, weight in was.items():
        assert not up[name].equal(weight)
        assert torch.allclose(up[name], weight, rtol=10 * NUDGE, atol=0) and torch.allclose((up[name] + down[name]) / 2, weight, atol=1e-6)


def test_the_beginning_of_an_aborted_output_is_enough() -> None:
    assert violations(history(exchange(pieces=pieces("one ", "tw", finish=None), dones=0, aborted=True))) == []


@pytest.mark.parametrize(
    ("tokens", "what"),
    [
        ((("a", -1.0), ("b", -2.0)), None),
        ((("a", -1.0), ("b", -2.0005)), None),
        ((("a", -1.0), ("c", -2.0)), "token 1 is 'c', not 'b'"),
        ((("a", -1.0), ("b", -2.1)), "token 1 ('b') has log-probability -2.1, not -2.0"),
        ((("a", -1.0),), "log-probabilities of 1 tokens, not of 2"),
    ],
)
def test_log_probabilities_are_compared(tokens: tuple[tuple[str, float], ...], what: str | None) -> None:
    reference = {**REFERENCE, "1": Answer(200, None, {0: Choice("ab", (("a", -1.0), ("b", -2.0)), "length")}, 2)}
    past = history(exchange(pieces=[Piece(1.0, 0, "ab", tokens, "length")], completion_tokens=2), reference=reference)
    assert [violation.what for violation in violations(past)] == ([] if what is None else [f"choice 0: {what}"])


@pytest.mark.parametrize(
    "bad",
    [
        exchange(dones=2),
        exchange(errors=[{"message": "lost"}]),
        exchange(dones=0, errors=[{"message": "lost"}, {"message": "lost"}]),
        exchange(after_the_end=1),
        exchange(pieces=[*pieces("one two three"), Piece(2.0, 0, "", finish="length")]),
        exchange(pieces=[Piece(1.0, 0, "one two ", finish="length"), Piece(2.0, 0, "three")]),
        exchange(dones=0),
        exchange(pieces=pieces("one two three", finish=None)),
        exchange(item=replace(ITEM, body={**ITEM.body, "n": 2})),
    ],
    ids=[
        "two ends",
        "end and error",
        "two errors",
        "after the end",
        "two finishes",
        "after finish",
        "no end",
        "no finish",
        "a choice short",
    ],
)
def test_anything_but_one_terminal_reply_is_found(bad: Exchange) -> None:
    assert "terminal replies" in kinds(history(bad))


def test_an_accepted_request_that_fails_is_lost() -> None:
    failed = exchange(pieces=pieces("one ", finish=None), dones=0, errors=[{"message": "nodes lost beyond retry", "code": "node_lost"}])
    assert kinds(history(failed, injections=[injected("kill", "decode-0", 2.0)])) == ["lost"]
    broken = exchange(pieces=pieces("one ", finish=None), dones=0, broken="ReadError")
    assert kinds(history(broken)) == ["lost"]
    assert kinds(history(broken, injections=[injected("kill", "gateway-0", 4.5)])) == []
    assert kinds(history(broken, injections=[injected("kill", "gateway-0", 60.0)])) == ["lost"]
    assert kinds(history(broken, injections=[injected("stop", "gateway-0", 2.0, 4.0)])) == ["lost"], "it was woken again"
    assert kinds(history(broken, injections=[injected("suspend", "all", 2.0, 4.0)])) == ["lost"]


def test_a_gateway_that_shares_its_process_dies_with_the_conductor() -> None:
    broken = exchange(pieces=pieces("one ", finish=None), dones=0, broken="ReadError")
    faults = [injected("kill", "conductor-0", 4.5)]
    assert kinds(history(broken, injections=faults)) == ["lost"]
    assert kinds(history(broken, injections=faults, topology=replace(TOPOLOGY, gateway_in_conductor=True))) == []


def test_a_request_that_never_ends_is_found() -> None:
    assert kinds(history(exchange(pieces=[], dones=0, ended_s=None, completion_tokens=None))) == ["not ended"]


def test_a_deadline_may_end_a_request_once_it_has_passed() -> None:
    def late(ended_s: float, code: str) -> Exchange:
        errors = [{"message": "too late", "code": code}]
        return exchange(item=LIMITED, pieces=pieces("one ", finish=None), dones=0, errors=errors, ended_s=ended_s)

    assert kinds(history(late(4.5, "deadline"))) == []
    assert kinds(history(late(3.0, "deadline"))) == ["lost"]
    assert kinds(history(late(4.5, "other"))) == ["lost"]


def test_what_was_stored_is_kept_unless_valkey_has_lost_it() -> None:
    flushed = [injected("flush", "valkey", 4.0)]
    gone, other = (exchange(stored_as="resp_1", looked_up_s=5.5, not_kept=what) for what in ("nothing", "'two three'"))
    assert kinds(history(gone)) == ["stored"] and kinds(history(gone, injections=flushed)) == []
    assert kinds(history(other, injections=flushed)) == ["stored"]


def test_a_refusal_has_to_have_a_reason() -> None:
    assert kinds(history(refused(503))) == ["refused"]
    assert kinds(history(refused(429))) == ["refused"]
    assert kinds(history(refused(500))) == ["refused"]
    assert kinds(history(refused(404))) == ["refused"]
    assert kinds(history(refused(503, ended_s=40.0), samples=without("decode-0", 1.0, 35.0))) == []
    assert kinds(history(refused(503, ended_s=40.0), samples=without("decode-0", 1.0, 15.0))) == ["refused"]
    assert kinds(history(refused(503, ended_s=40.0), samples=without("prefill-0", 1.0, 35.0))) == ["refused"], "there was another"
    assert kinds(history(refused(503, ended_s=12.0), samples=without("conductor-0", 1.0, 12.0))) == []
    assert kinds(history(refused(503, ended_s=60.0), injections=[injected("cut", "decode-0", 2.0, 30.0)])) == []


def test_a_gateway_that_was_just_started_needs_valkey_to_find_the_conductor() -> None:
    away, started = without("valkey", 22.0, 33.0), [injected("kill", "gateway-0", 20.0)]
    woken = [injected("stop", "gateway-0", 6.0, 20.0)]
    request = refused(503, sent_s=22.0, ended_s=34.0)
    assert kinds(history(request, samples=away, injections=started)) == kinds(history(request, samples=away, injections=woken)) == []
    assert kinds(history(request, samples=away)) == ["refused"]
    assert kinds(history(request, injections=started)) == ["refused"]


def test_a_gateway_that_was_just_started_asks_valkey_whom_it_may_serve() -> None:
    away, started = without("valkey", 22.0, 33.0), [injected("kill", "gateway-0", 20.0)]
    for item, (sent_s, expected) in itertools.product((ITEM, WRONG), ((22.0, []), (34.0, []), (60.0, ["refused"]))):
        request = refused(503, "not_ready", item=item, sent_s=sent_s, ended_s=sent_s + 0.1)
        assert kinds(history(request, samples=away, injections=started)) == expected
    assert kinds(history(refused(503, "not_ready", sent_s=22.0, ended_s=22.1), samples=away)) == ["refused"]


def test_a_gateway_shuts_down_when_it_is_told_to() -> None:
    request = refused(503, "shutting_down", sent_s=22.0, ended_s=22.1)
    assert kinds(history(request)) == ["refused"]
    assert kinds(history(request, injections=[injected("end", "gateway-0", 17.0)])) == []


def test_load_is_shed_only_where_it_is_configured_and_with_a_time_to_come_back() -> None:
    shedding = Limits(sheds_load=True)
    assert kinds(history(refused(429, retry_after="2"), limits=shedding)) == []
    assert kinds(history(refused(429), limits=shedding)) == ["refused"]


def test_an_invalid_request_is_refused_as_ever() -> None:
    assert kinds(history(refused(400, "other", item=WRONG))) == ["refused"]
    assert kinds(history(refused(503, item=WRONG))) == ["refused"]


def test_a_deadline_that_cannot_be_kept_is_told_in_time() -> None:
    assert kinds(history(refused(504, "deadline", item=LIMITED, ended_s=5.0))) == []
    assert kinds(history(refused(504, "deadline", item=LIMITED, ended_s=100.0))) == ["refused"]
    assert kinds(history(refused(504, "deadline"))) == ["refused"], "it had none"
    frozen = [injected("stop", "gateway-0", 1.0, 99.0)]
    assert kinds(history(refused(504, "deadline", item=LIMITED, ended_s=100.0), injections=frozen)) == [], "its gateway could not"


def test_a_refusal_has_an_id() -> None:
    assert kinds(history(refused(504, "deadline", item=LIMITED, request_id=None))) == ["no id"]


def test_nobody_answering_is_explained_by_the_gateway_alone() -> None:
    unanswered = exchange(status=None, pieces=[], dones=0, completion_tokens=None, broken="ConnectError")
    assert kinds(history(unanswered)) == ["unreachable"]
    assert kinds(history(unanswered, injections=[injected("kill", "decode-0", 1.0)])) == ["unreachable"]
    assert kinds(history(unanswered, injections=[injected("stop", "gateway-0", 1.0, 3.0)])) == []
    assert kinds(history(unanswered, samples=without("gateway-0", 1.0, 4.0))) == []


def test_a_long_gap_is_found_unless_nobody_could_have_served() -> None:
    slow = exchange(pieces=pieces("one ", "two ", "three", every_s=9.0), ended_s=20.0)
    assert kinds(history(slow)) == ["gap"]
    assert kinds(history(slow, limits=Limits(gap_s=9.5))) == []
    assert kinds(history(slow, limits=Limits(gap_s=inf))) == []
    assert kinds(history(replace(slow, item=IDLE, sent_s=-99.0))) == [], "it has time"
    assert kinds(history(slow, injections=[injected("stop", "decode-0", 1.0, 19.0)])) == []
    assert kinds(history(slow, injections=[injected("stop", "decode-0-store", 1.0, 19.0)])) == [], "an engine needs its store"
    assert kinds(history(slow, injections=[injected("suspend", "all", 1.0, 19.0)])) == []
    assert kinds(history(slow, samples=without("decode-0", 3.0, 17.0))) == []
    assert kinds(history(slow, own_stalls=[(2.0, 6.5), (11.0, 15.5)])) == [], "nobody looked"
    assert kinds(history(slow, own_stalls=[(2.0, 6.5)])) == ["gap"], "the second gap was seen"
    refrained = Injection(Fault(1.0, "stop", "decode-0"), 1.0, 19.0, not_injected="needs root")
    assert kinds(history(slow, injections=[refrained])) == ["gap"]


def test_a_stream_needs_a_prefill_node_for_what_its_decode_node_may_have_lost() -> None:
    decodes = exchange(pieces=[Piece(at_s, 0, text) for at_s, text in ((1.0, "one "), (2.0, "two "))], dones=0, aborted=True)
    decodes.pieces.append(Piece(11.0, 0, "three", finish="length"))
    hung = [injected("stop", f"prefill-{number}", 1.5, 11.0) for number in range(2)]
    assert kinds(history(decodes, injections=hung)) == ["gap"], "its decode node was well"
    for loss in (injected("stop", "decode-0", 2.5, 3.0), injected("reset", "decode-0", 2.5), injected("narrow", "all", 2.5, 3.0)):
        assert kinds(history(decodes, injections=[*hung, loss])) == []
    assert kinds(history(decodes, injections=[*hung, injected("stop", "gateway-0", 2.5, 3.0)])) == [], "it may have lost its connections"
    assert kinds(history(decodes, injections=[*hung, injected("kill", "decode-0", 8.5)])) == ["gap"], "not yet"
    assert kinds(history(decodes, injections=[hung[0], injected("kill", "decode-0", 2.5)])) == ["gap"], "there was another"
    again = [
        injected("kill", "decode-0", 1.5),
        *(injected("stop", name, a, b) for name in TOPOLOGY.prefill for a, b in ((2, 6.5), (7, 11))),
    ]
    assert kinds(history(decodes, injections=again)) == [], "what was lost is lost until it has been computed"
    handed_over = exchange(pieces=[Piece(2.0, 0, ""), Piece(2.1, 0, "one two "), Piece(11.0, 0, "three", finish="length")], ended_s=12.0)
    assert kinds(history(handed_over, injections=hung)) == [], "its prompt may not have been handed over"


def test_who_is_slowed_is_absent_while_it_stands() -> None:
    slow = exchange(pieces=pieces("one ", "two ", "three", every_s=11.0), ended_s=24.0)
    for share, expected in ((50, ["gap"]), (10, [])):
        slowed = Injection(Fault(1.0, "slow", "decode-0", 22.0, amount=share), 1.0, 23.0)
        assert sum(end - begin for begin, end in absent(history(injections=[slowed]), "decode")) == pytest.approx(22 * (1 - share / 100))
        assert kinds(history(slow, injections=[slowed])) == expected


def test_who_has_lost_its_node_waits_for_a_conductor_and_others_do_not() -> None:
    slow = exchange(pieces=pieces("one ", "two ", "three", every_s=9.0), ended_s=20.0)
    undecided = without("conductor-0", 0.5, 18.0)
    assert kinds(history(slow, samples=undecided)) == ["gap"], "streams need none"
    assert kinds(history(slow, samples=undecided, injections=[injected("kill", "decode-0", 1.0)])) == []
    assert kinds(history(slow, samples=undecided, injections=[injected("kill", "decode-0", 14.0)])) == ["gap"], "not yet"
    assert kinds(history(slow, samples=undecided, injections=[injected("kill", "prefill-0", 1.0)])) == ["gap"], "it was handed over"
    assert kinds(history(slow, injections=[injected("kill", "decode-0", 1.0)])) == ["gap"]
    unknown = [injected("stop", "gateway-0", 1.0, 4.0), injected("kill", "decode-0", 1.0)]
    assert kinds(history(slow, samples=without("valkey", 3.0, 18.0), injections=unknown)) == [], "its gateway looks for a new Conductor"


def test_the_gap_before_a_stream_fails_counts_too() -> None:
    hung = exchange(pieces=pieces("one ", finish=None), dones=0, broken="ReadError", ended_s=70.0)
    assert sorted(kinds(history(hung, injections=[injected("kill", "gateway-0", 70.0)]))) == ["gap"]


def test_a_late_first_token_is_found_unless_nobody_could_have_served() -> None:
    late = exchange(pieces=[Piece(70.0, 0, "one two three", finish="length")], ended_s=71.0)
    assert kinds(history(late)) == ["first token"]
    assert kinds(history(late, samples=without("conductor-0", 1.0, 60.0))) == []


def test_what_is_held_while_nothing_runs_is_a_leak() -> None:
    assert kinds(history(calm_points=[replace(POINT, leaks={"decode-0-store springtide_store_slots{in_use}": 3.0})])) == ["leak"]


def test_a_cluster_that_is_not_whole_again_is_found() -> None:
    assert kinds(history(calm_points=[replace(POINT, not_whole="waited 60 s")])) == ["cluster"]
    assert kinds(history(died="springtide up ended by itself")) == ["cluster"]


def test_who_is_never_seen_to_be_ready_is_found() -> None:
    for name in sorted(EVERYBODY):
        assert kinds(history(calm_points=[POINT], samples=without(name, 0.0, 200.0))) == ["cluster"]
    assert kinds(history(calm_points=[POINT], samples=without("conductor-0", 0.0, 100.0))) == []


GAUGES = {
    "store": "# TYPE springtide_store_slots gauge\n"
    'springtide_store_slots{state="in_use",tier="dram"} 0\n'
    'springtide_store_slots{state="quarantined",tier="dram"} 0\n'
    "springtide_store_leases 0\n"
    "springtide_store_ingests 0\n",
    "prefill": "springtide_prefill_attempts_running 0\nspringtide_prefill_attempts_waiting 0\n",
    "decode": "springtide_decode_attempts_running 0\nspringtide_decode_attempts_waiting 0\n",
    "conductor": "springtide_conductor_attempts 0\n",
    "gateway": "# TYPE springtide_gateway_requests_in_flight gauge\n",
}


def pages(topology: Topology = TOPOLOGY) -> dict[tuple[str, str], str | None]:
    engines = [(role, name) for role in ("prefill", "decode") for name in getattr(topology, role)]
    others = [*(("store", name) for _, name in engines), ("conductor", "conductor-0"), ("gateway", "gateway-0")]
    return {process: GAUGES[process[0]] for process in (*engines, *others)}


def test_what_cannot_be_seen_is_taken_for_held() -> None:
    assert held(TOPOLOGY, pages()) == {}
    for process, page in pages().items():
        assert page is not None
        without_page = {key: other for key, other in pages().items() if key != process}
        for unseen in (without_page, {**pages(), process: None}):
            assert [value for name, value in held(TOPOLOGY, unseen).items() if name.endswith(" metrics")] == [1.0]
        for line in page.splitlines(keepends=True):
            renamed = held(TOPOLOGY, {**pages(), process: page.replace(line, "")})
            assert [name.endswith("is not told") for name in renamed] == [True]


def test_what_is_seen_to_be_held_is_told() -> None:
    leases = pages()["store", "decode-0"].replace("leases 0", "leases 2")
    assert held(TOPOLOGY, {**pages(), ("store", "decode-0"): leases}) == {"decode-0-store springtide_store_leases": 2.0}
    running = GAUGES["gateway"] + 'springtide_gateway_requests_in_flight{route="chat"} 1\n'
    assert held(TOPOLOGY, {**pages(), ("gateway", "gateway-0"): running}) == {"gateway-0 springtide_gateway_requests_in_flight": 1.0}
    shared = replace(TOPOLOGY, gateway_in_conductor=True)
    both = {process: page for process, page in pages().items() if process[0] != "gateway"}
    assert list(held(shared, both)) == ["conductor-0 springtide_gateway_requests_in_flight is not told"]
    both["conductor", "conductor-0"] = GAUGES["conductor"] + running
    assert held(shared, both) == {"conductor-0 springtide_gateway_requests_in_flight": 1.0}


def test_an_instance_tells_of_both_kinds_of_work_on_one_page() -> None:
    instance = replace(TOPOLOGY, prefill=("instance-0",), decode=("instance-0",))
    seen = {process: page for process, page in pages(instance).items() if process[0] != "prefill"}
    assert {name for name in held(instance, seen) if name.endswith("is not told")} == {
        "instance-0 springtide_prefill_attempts_running is not told",
        "instance-0 springtide_prefill_attempts_waiting is not told",
    }
    seen["decode", "instance-0"] = GAUGES["decode"] + GAUGES["prefill"]
    assert held(instance, seen) == {}


def test_an_unsound_store_is_found() -> None:
    assert kinds(history(calm_points=[replace(POINT, verdicts={**POINT.verdicts, "prefill-0": "2 blocks are wrong"})])) == ["verify"]


def test_a_store_without_a_verdict_is_not_sound() -> None:
    assert kinds(history(calm_points=[replace(POINT, verdicts={})])) == ["verify"] * 3


@pytest.mark.parametrize("grown", [{"fds": 100}, {"threads": 80}, {"private_bytes": 900 << 20}])
def test_a_process_that_grows_is_found(grown: dict[str, int]) -> None:
    first = ProcessState("gateway-0", 7, 20, 10, 200 << 20)
    before, after = replace(POINT, processes=(first,)), replace(POINT, processes=(replace(first, **grown),))
    assert kinds(history(calm_points=[before, before, after])) == ["growth"]
    assert kinds(history(calm_points=[before, after, after])) == [], "it warmed up"
    assert kinds(history(calm_points=[before, before, after, before])) == [], "it gave it back"
    begun_anew = replace(POINT, processes=(replace(first, pid=8, **grown),))
    assert kinds(history(calm_points=[before, before, begun_anew])) == []


@pytest.mark.parametrize(("name", "kinds_found"), [("decode-0", []), ("prefill-0/1", []), ("decode-0-store", ["growth"])])
def test_an_engine_warms_up_for_longer(name: str, kinds_found: list[str]) -> None:
    first = ProcessState(name, 7, 20, 10, 200 << 20)
    before, after = (replace(POINT, processes=(replace(first, private_bytes=mib << 20),)) for mib in (200, 440))
    assert kinds(history(calm_points=[before, before, after])) == kinds_found
    leaked = replace(POINT, processes=(replace(first, private_bytes=470 << 20),))
    assert kinds(history(calm_points=[before, before, leaked])) == ["growth"]


def test_what_outlives_the_cluster_is_found() -> None:
    after = Aftermath(("springtide store prefill-0",), ("arena",), "springtide up did not stop within 10 s")
    assert sorted(kinds(history(aftermath=after))) == ["left over", "left over", "stop"]


def test_a_calm_cluster_that_refuses_is_found() -> None:
    assert kinds(history(reference={**REFERENCE, "1": Answer(429, "no_slots")})) == ["calm"]
    assert kinds(history(refused(400, item=WRONG), reference={**REFERENCE, "3": Answer(200)})) == ["calm", "refused"]


def test_every_check_can_fail() -> None:
    """Together the histories above violate each; this one names what a check is without."""
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS) == 14


def test_absence_of_a_role_is_the_absence_of_everybody() -> None:
    both = [injected("stop", "prefill-0", 5.0, 10.0), injected("cut", "prefill-1", 8.0, 12.0)]
    assert absent(history(injections=both), "prefill") == [(8.0, 10.0)]
    assert absent(history(injections=both[:1]), "prefill") == []


def test_intervals_are_merged_and_measured() -> None:
    assert merged([(3, 4), (1, 2), (1.5, 3)]) == [(1, 4)]
    assert overlap_s((0, 10), [(1, 3), (2, 4), (9, 20)]) == 4


def test_the_table_says_what_came_of_each_fault() -> None:
    wrong = exchange(pieces=pieces("one ", "2 ", "three", every_s=2.0))
    faults = [
        injected("kill", "decode-0", 1.0),
        injected("kill", "decode-0", 100.0),
        Injection(Fault(2.0, "cut", "x"), 2.0, 2.0, "needs root"),
    ]
    past = history(wrong, injections=faults)
    found = violations(past)
    cut, kill = report.rows(past, found)
    assert (cut.fault, cut.injected, cut.not_injected) == ("cut", 0, 1)
    assert (kill.fault, kill.target, kill.injected, kill.requests, kill.tokens) == ("kill", "decode", 2, 1, 3)
    assert (kill.longest_gap_s, kill.unexcused_gap_s, kill.failed, kill.wrong) == (2.0, 2.0, 0, 1)
    both = [injected("stop", f"decode-{number}", 1.5, 2.5) for number in range(2)]
    (stop,) = report.rows(history(exchange(pieces=pieces("one ", "2 ", every_s=2.0)), injections=both), ())
    assert (stop.longest_gap_s, stop.unexcused_gap_s) == (2.0, 1.0), "for one second of it nobody could have decoded"
    (stop,) = report.rows(history(exchange(item=IDLE, pieces=pieces("one ", "2 ", every_s=2.0)), injections=both), ())
    assert (stop.longest_gap_s, stop.unexcused_gap_s, stop.requests) == (0.0, 0.0, 1), "it may wait"
    run = report.Run(3, "plain", 1.0, 'make chaos ARGS="--seed 3"', "/logs", "abc")
    text = report.text(run, past, found)
    assert "1 VIOLATIONS: wrong output 1" in text and "fault     1.0 to 1.0 s: kill decode-0" in text
    assert "not injected, 1 times: cut x: needs root" in text and 'repeat: make chaos ARGS="--seed 3"' in text
    document = report.document(run, past, found)
    assert document["violations"][0]["exchange"] == 1
    together = summary([document, document]).splitlines()
    assert together[0] == "Commit abc."
    assert "| together |  | 2 | 2 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 6 | 4 | 0.0 | 2 |" in together
    assert together[-2:] == ["| cut | x | 0 | 0 | 0.0 | 0.0 | 0 | 0 |", "| kill | decode | 4 | 2 | 2.0 | 2.0 | 0 | 2 |"]


def test_the_table_leaves_no_request_out() -> None:
    def ended(**values: Any) -> Exchange:
        return exchange(**{"pieces": [], "dones": 0, "completion_tokens": None, **values})

    killed = {"gateway": "gateway-0", "sent_s": 40.0, "ended_s": 45.0}
    past = history(
        exchange(),
        exchange(aborted=True),
        *(refused(503, "no_capacity"), refused(503, "no_capacity"), refused(400)),
        ended(errors=[{"code": "deadline"}]),
        ended(errors=[{"message": "lost"}]),
        ended(broken="ReadError"),
        ended(broken="ReadError", **killed),
        ended(status=None, broken="ConnectError", **killed),
        ended(status=None, broken="ConnectError", sent_s=80.0, ended_s=85.0),
        ended(status=None, broken="ConnectError", sent_s=120.0, ended_s=125.0),
        ended(ended_s=None),
        injections=[injected("kill", "gateway-0", 42.0), injected("end", "gateway-0", 82.0), injected("stop", "gateway-0", 121.0, 124.0)],
        rounds=[(0.0, 45.0), (60.0, 105.0)],
    )
    document = report.document(report.Run(3, "plain", 1.0, "", "", "abc"), past, ())
    outcomes = {name: document["totals"][name] for name in OUTCOMES}
    expected = {"completed": 1, "aborted": 1, "refused": 3, "failed": 2, "broken off": 2, "no answer": 3, "not ended": 1}
    assert outcomes == expected and sum(outcomes.values()) == document["totals"]["requests"]
    assert document["totals"]["minutes of rounds"] == 1.5
    assert document["reasons"] == {
        "refused": {"503 no_capacity": 2, "400": 1},
        "failed": {"deadline": 1, "no code": 1},
        "broken off": {"unexplained": 1, "gateway killed": 1},
        "no answer": {"gateway killed": 1, "gateway told to end": 1, "gateway away": 1},
    }
    lines = summary([document, document]).splitlines()
    assert "| refused | 503 no_capacity | 2 | 2 | 4 |" in lines and "| no answer | gateway told to end | 1 | 1 | 2 |" in lines


def test_runs_of_several_commits_make_no_table() -> None:
    documents = [report.document(report.Run(3, "plain", 1.0, "", "", commit), history(), ()) for commit in ("abc", "def")]
    with pytest.raises(ValueError, match=r"runs of 2 commits.*: abc, def"):
        summary(documents)
