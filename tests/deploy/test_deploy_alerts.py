"""The alerts and recording rules: each fires on what it is for and on nothing else, and has its page."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.prometheus import ALERTMANAGER, REPOSITORY, RULES, accepts, alerts, faster, rules

RUNBOOKS = REPOSITORY / "docs/runbooks"
HEADINGS = ("## What it means", "## What to look at", "## What to do")
CLUSTER = {"cluster": "moon", "namespace": "models"}
DAY = 86400


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    said = ",".join(f'{label}="{value}"' for label, value in {**CLUSTER, **labels}.items())
    return {"series": f"{name}{{{said}}}", "values": values}


def up(role: str, instance: str, values: str) -> dict[str, str]:
    return series("up", values, springtide_role=role, instance=instance, job="springtide")


def started(role: str, instance: str, values: str) -> dict[str, str]:
    return series("process_start_time_seconds", values, springtide_role=role, instance=instance, job="springtide")


def generations(met: str, missed: str) -> list[dict[str, str]]:
    name = "springtide_gateway_slo_generations_total"
    return [
        series(name, met, instance="gateway-0", tenant="acme", objective="goodput", result="met"),
        series(name, missed, instance="gateway-0", tenant="acme", objective="goodput", result="missed"),
    ]


def leader(values: str = "1x1440", instance: str = "conductor-0") -> dict[str, str]:
    return series("springtide_conductor_is_leader", values, instance=instance)


def instances(role: str, values: str, ready: str = "true") -> dict[str, str]:
    return series("springtide_conductor_instances", values, instance="conductor-0", role=role, ready=ready)


def decisions(scheduled: str, rejected: str, reason: str = "ttft") -> list[dict[str, str]]:
    return [
        series("springtide_conductor_decisions_total", scheduled, instance="conductor-0", outcome="scheduled"),
        series("springtide_conductor_decisions_total", rejected, instance="conductor-0", outcome="rejected"),
        series("springtide_conductor_rejections_total", rejected, instance="conductor-0", reason=reason),
    ]


def ratios(bucket: str, rise: int = 10) -> list[dict[str, str]]:
    """Predictions that all come to lie below `bucket` and above the one before it."""
    bounds = ("0.1", "0.2", "0.4", "0.6", "0.8", "0.9", "1.0", "1.1", "1.25", "1.67", "2.5", "5.0", "10.0", "+Inf")
    name, labels = "springtide_conductor_prediction_ratio", {"instance": "conductor-0", "quantity": "ttft"}
    above = [bound for bound in bounds if float(bound) >= float(bucket)]
    found = [series(f"{name}_bucket", f"0+{rise if bound in above else 0}x60", le=bound, **labels) for bound in bounds]
    return [*found, series(f"{name}_count", f"0+{rise}x60", **labels)]


@dataclass(frozen=True)
class Case:
    """Series, a sample a minute, and what is to be firing after some minutes: labels beyond severity and kind, and the summary."""

    alert: str
    fires: list[dict[str, str]]
    minutes: int
    summary: str
    labels: dict[str, str]
    quiet: list[dict[str, str]]
    """What is like it, and is nothing to be told of."""
    cluster: dict[str, str] = field(default_factory=lambda: dict(CLUSTER))


PROCESS = {"job": "springtide"}
CASES = [
    Case(
        "SpringtideErrorBudgetBurnsFast",
        generations("0+8x120", "0+2x120"),
        90,
        "moon: 20% of the generations miss their objectives",
        {"objective": "goodput"},
        generations("0+99x120", "0+1x120"),
    ),
    Case(
        "SpringtideErrorBudgetBurnsFast",
        generations("0+93x120", "0+7x120"),
        90,
        "moon: 7% of the generations miss their objectives",
        {"objective": "goodput"},
        generations("0+8x80 640+10x40", "0+2x80 160x40"),
    ),
    Case(
        "SpringtideErrorBudgetBurnsSlowly",
        generations("0+95x1440", "0+5x1440"),
        1200,
        "moon: 5% of the generations miss their objectives",
        {"objective": "goodput"},
        generations("0+995x1440", "0+5x1440"),
    ),
    Case(
        "SpringtideMetricsMissing",
        [series("up", "1x30", instance="other", job="node")],
        10,
        "Prometheus knows no process of Springtide",
        {},
        [up("decode", "decode-0", "0x30")],
        {},
    ),
    Case(
        "SpringtideProcessDown",
        [up("decode", "decode-0", "1x5 0x20"), up("decode", "decode-1", "1x30")],
        10,
        "moon: decode decode-0 does not answer",
        {**PROCESS, "springtide_role": "decode", "instance": "decode-0"},
        [up("decode", "decode-0", "1x5 0 1x20")],
    ),
    Case(
        "SpringtideTargetMissing",
        [
            leader(),
            instances("prefill", "1x30"),
            instances("decode", "2x30"),
            up("prefill", "prefill-0", "1x30"),
            up("decode", "decode-0", "1x30"),
        ],
        20,
        "moon: engines serve that Prometheus does not scrape",
        {"role": "decode"},
        [
            leader(),
            instances("prefill", "2x30"),
            instances("decode", "2x30"),
            up("prefill", "prefill-0", "1x30"),
            up("decode", "decode-0", "0x30"),
            up("instance", "instance-0", "1x30"),
        ],
    ),
    Case(
        "SpringtideTargetMissing",
        [
            leader(),
            instances("prefill", "3x30"),
            instances("decode", "2x30"),
            up("instance", "instance-0", "1x30"),
            up("decode", "a", "1x30"),
        ],
        20,
        "moon: engines serve that Prometheus does not scrape",
        {"role": "prefill"},
        [leader(), instances("prefill", "1x30"), instances("decode", "1x30"), up("instance", "instance-0", "1x30")],
    ),
    Case(
        "SpringtideStoreLost",
        [started("store", "decode-0-store", "100x5 _ 460x20")],
        10,
        "moon: the store decode-0-store was started anew",
        {**PROCESS, "springtide_role": "store", "instance": "decode-0-store"},
        [started("store", "decode-0-store", "100x30"), started("decode", "decode-0", "100x5 _ 460x20")],
    ),
    Case(
        "SpringtideProcessRestarted",
        [started("decode", "decode-0", "100x5 _ 460x20")],
        10,
        "moon: decode decode-0 was started anew",
        {**PROCESS, "springtide_role": "decode", "instance": "decode-0"},
        [started("decode", "decode-0", "100x5 _ _ 100x20"), started("decode", "decode-1", "_x6 460x20")],
    ),
    Case(
        "SpringtideProcessFlapping",
        [started("prefill", "prefill-0", "100x2 200x2 300x2 400x20")],
        10,
        "moon: prefill prefill-0 ends again and again",
        {**PROCESS, "springtide_role": "prefill", "instance": "prefill-0"},
        [started("prefill", "prefill-0", "100x2 200x2 300x20")],
    ),
    Case(
        "SpringtideHung",
        [leader(), series("springtide_conductor_hung_instances", "0x5 1x20", instance="conductor-0")],
        8,
        "moon: 1 engines hang",
        {},
        [leader("0x30"), series("springtide_conductor_hung_instances", "0x5 1x20", instance="conductor-0")],
    ),
    Case(
        "SpringtideNoLeader",
        [up("conductor", "conductor-0", "1x5 0x20"), leader("1x5 stale")],
        8,
        "moon: no Conductor leads",
        {},
        [leader("0x20"), leader("1x20", "conductor-1"), up("conductor", "conductor-0", "1x20"), up("conductor", "conductor-1", "1x20")],
    ),
    Case(
        "SpringtideValkeyAway",
        [
            series("springtide_valkey_up", "1x5 0x20", client="membership", instance=name)
            for name in ("conductor-0", "decode-0", "prefill-0")
        ],
        8,
        "moon: Valkey does not answer",
        {},
        [
            series("springtide_valkey_up", values, client="membership", instance=name)
            for name, values in (("a", "1x5 0x20"), ("b", "1x25"), ("c", "1x25"))
        ],
    ),
    Case(
        "SpringtideNoInstances",
        [leader(), instances("prefill", "1x30"), instances("decode", "1x5 0x20"), instances("decode", "0x5 1x20", "false")],
        10,
        "moon: there is no decode instance",
        {"role": "decode"},
        [leader("0x30"), leader("1x30", "conductor-1"), instances("decode", "0x30")],
    ),
    Case(
        "SpringtideCertificateExpiring",
        [series("springtide_certificate_expiry_timestamp_seconds", f"{10 * DAY}x60", instance="decode-0", certificate="cluster")],
        30,
        "moon: the certificate of decode-0 ends in 9d 23h 30m 0s",
        {"instance": "decode-0", "certificate": "cluster"},
        [series("springtide_certificate_expiry_timestamp_seconds", f"{31 * DAY}x60", instance="decode-0", certificate="cluster")],
    ),
    Case(
        "SpringtideCertificateAlmostExpired",
        [series("springtide_certificate_expiry_timestamp_seconds", f"{DAY}x60", instance="gateway-0", certificate="public")],
        30,
        "moon: the certificate of gateway-0 ends in 23h 30m 0s",
        {"instance": "gateway-0", "certificate": "public"},
        [series("springtide_certificate_expiry_timestamp_seconds", f"{10 * DAY}x60", instance="gateway-0", certificate="public")],
    ),
    Case(
        "SpringtideOverloaded",
        decisions("0+90x30", "0+10x30"),
        20,
        "moon: 10% of the requests are refused for load",
        {},
        decisions("0+90x30", "0+10x30", "too_large"),
    ),
    Case(
        "SpringtidePoolFull",
        [leader(), series("springtide_conductor_kv_used_ratio", "0.5x5 0.98x20", instance="conductor-0", role="decode")],
        10,
        "moon: attempts hold 98% of the KV slots of the decode nodes",
        {"role": "decode"},
        [leader(), series("springtide_conductor_kv_used_ratio", "0.5x5 0.98 0.9x20", instance="conductor-0", role="decode")],
    ),
    Case(
        "SpringtideAttemptsFail",
        [series("springtide_gateway_reschedules_total", "0+20x30", instance="gateway-0"), *decisions("0+100x30", "0x30")],
        20,
        "moon: 20% of the attempts are a second try",
        {},
        [series("springtide_gateway_reschedules_total", "0+1x30", instance="gateway-0"), *decisions("0+100x30", "0x30")],
    ),
    Case(
        "SpringtidePredictionsOff",
        ratios("5.0"),
        30,
        "moon: ttft is predicted 3.8 times as long as it takes",
        {"quantity": "ttft"},
        ratios("1.25"),
    ),
    Case(
        "SpringtidePredictionsOff",
        ratios("0.4"),
        30,
        "moon: ttft is predicted 0.3 times as long as it takes",
        {"quantity": "ttft"},
        ratios("0.4", 1),
    ),
    Case(
        "SpringtideDiskFull",
        [series("springtide_store_ssd_state", "0x5 1x20", instance="decode-0-store", state="disk_full")],
        10,
        "moon: the disk of decode-0-store is full",
        {"instance": "decode-0-store", "state": "disk_full"},
        [
            series("springtide_store_ssd_state", values, instance="decode-0-store", state=state)
            for state, values in (("disk_full", "0x20"), ("taking", "1x20"))
        ],
    ),
    Case(
        "SpringtideDiskFailing",
        [series("springtide_store_ssd_state", "0x5 1x20", instance="decode-0-store", state="failing")],
        10,
        "moon: the disk of decode-0-store cannot be written",
        {"instance": "decode-0-store", "state": "failing"},
        [series("springtide_store_ssd_state", "0x20", instance="decode-0-store", state="failing")],
    ),
]


def unit_test(case: Case, given: list[dict[str, str]], expected: list[dict[str, Any]]) -> dict[str, Any]:
    asked = {"eval_time": f"{case.minutes}m", "alertname": case.alert, "exp_alerts": expected}
    return {"interval": "1m", "input_series": given, "alert_rule_test": [asked]}


@pytest.mark.parametrize("case", CASES, ids=[f"{case.alert}-{number}" for number, case in enumerate(CASES)])
def test_an_alert_fires_on_what_it_is_for_and_is_quiet_else(case: Case, tmp_path: Path) -> None:
    with_summaries = rules()
    for rule in alerts(with_summaries):
        rule["annotations"] = {"summary": rule["annotations"]["summary"]}
    (rule,) = [rule for rule in alerts(with_summaries) if rule["alert"] == case.alert]
    fires = {"exp_labels": {**rule["labels"], **case.cluster, **case.labels}, "exp_annotations": {"summary": case.summary}}
    tests = [unit_test(case, case.fires, [fires]), unit_test(case, case.quiet, [])]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(with_summaries))
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}))
    accepts("promtool", "test", "rules", tmp_path / "test.yaml")


# ---- each pair of windows of the error budget's ----

HOUR = 60
FAST, SLOWLY = "SpringtideErrorBudgetBurnsFast", "SpringtideErrorBudgetBurnsSlowly"


@dataclass(frozen=True)
class Time:
    """So many minutes, with so many generations in each, of which this share misses."""

    minutes: int
    missed: float = 0.0
    generations: int = 100


@dataclass(frozen=True)
class Burn:
    """What an alert says at the end of it all."""

    name: str
    alert: str
    fires: bool
    times: tuple[Time, ...]

    @property
    def step(self) -> int:
        """Minutes from one sample to the next: days of them are read for each of the long windows."""
        return 1 if self.alert == FAST else 5

    @property
    def ends_at(self) -> int:
        """In minutes, when the last sample is taken."""
        return sum(time.minutes for time in self.times) - self.step

    def series(self) -> list[dict[str, str]]:
        """Both counters."""
        met, missed = [], []
        counts = [0, 0]
        for time in self.times:
            rises = round(time.generations * (1 - time.missed)) * self.step, round(time.generations * time.missed) * self.step
            times = time.minutes // self.step
            for sequence, count, rise in zip((met, missed), counts, rises, strict=True):
                sequence.append(f"{count + rise}+{rise}x{times - 1}")
            counts = [count + rise * times for count, rise in zip(counts, rises, strict=True)]
        return generations(" ".join(met), " ".join(missed))


CLEAN_6H, CLEAN_DAY, CLEAN_3D = Time(6 * HOUR), Time(24 * HOUR), Time(72 * HOUR)
BUSY_2D = Time(48 * HOUR, generations=1000)
"""Beside which what a quiet day misses is little: three days' share stays within the budget."""
BURNS = (
    Burn("1 h and 5 min", FAST, True, (CLEAN_6H, Time(65, 0.2))),
    Burn("1 h and 5 min, over by now", FAST, False, (CLEAN_6H, Time(HOUR, 0.2), Time(8))),
    Burn("1 h and 5 min, for minutes alone", FAST, False, (CLEAN_6H, Time(20, 0.2))),
    Burn("6 h, 30 min and 5 min", FAST, True, (Time(7 * HOUR, 0.08),)),
    Burn("6 h, 30 min and 5 min, once more for minutes", FAST, False, (Time(7 * HOUR, 0.08), Time(40), Time(7, 0.08))),
    Burn("6 h, 30 min and 5 min, over for minutes", FAST, False, (Time(7 * HOUR, 0.12), Time(8))),
    Burn("6 h, 30 min and 5 min, for an hour alone", FAST, False, (CLEAN_6H, Time(HOUR, 0.1))),
    Burn("1 d and 2 h", SLOWLY, True, (BUSY_2D, Time(25 * HOUR, 0.04))),
    Burn("1 d and 2 h, over by now", SLOWLY, False, (BUSY_2D, Time(24 * HOUR, 0.05), Time(150))),
    Burn("1 d and 2 h, for hours alone", SLOWLY, False, (BUSY_2D, CLEAN_DAY, Time(4 * HOUR, 0.1))),
    Burn("3 d and 6 h", SLOWLY, True, (Time(74 * HOUR, 0.02),)),
    Burn("3 d and 6 h, over by now", SLOWLY, False, (Time(72 * HOUR, 0.02), Time(7 * HOUR))),
    Burn("3 d and 6 h, for a day's part alone", SLOWLY, False, (CLEAN_3D, Time(8 * HOUR, 0.04))),
)
"""Where one fires, the shares of all other pairs are below what these fire at."""
PAIRS = {
    "1 h and 5 min": (FAST, ("1h", "5m"), 14.4),
    "6 h, 30 min and 5 min": (FAST, ("6h", "30m", "5m"), 6),
    "1 d and 2 h": (SLOWLY, ("1d", "2h"), 3),
    "3 d and 6 h": (SLOWLY, ("3d", "6h"), 1),
}


@pytest.mark.parametrize("burn", BURNS, ids=[burn.name for burn in BURNS])
def test_each_pair_of_windows_fires_by_itself_and_is_quiet_once_it_is_over(burn: Burn, tmp_path: Path) -> None:
    bare = rules()
    for rule in alerts(bare):
        rule["annotations"] = {}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(bare))
    (rule,) = [rule for rule in alerts(bare) if rule["alert"] == burn.alert]
    told = [{"exp_labels": {**rule["labels"], **CLUSTER, "objective": "goodput"}}] if burn.fires else []
    asked = {"eval_time": f"{burn.ends_at}m", "alertname": burn.alert, "exp_alerts": told}
    # By which pair, and by none besides: each condition as it stands by then.
    over = [
        {"expr": f"count({_over(pair)}) or vector(0)", "eval_time": f"{burn.ends_at}m", "exp_samples": [{"labels": "{}", "value": met}]}
        for pair, met in ((pair, int(burn.fires and pair == burn.name)) for pair in PAIRS)
        if PAIRS[pair][0] == burn.alert
    ]
    test = {"interval": f"{burn.step}m", "input_series": burn.series(), "alert_rule_test": [asked], "promql_expr_test": over}
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": f"{burn.step}m", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(tests))
    accepts("promtool", "test", "rules", tmp_path / "test.yaml")


def _over(pair: str) -> str:
    _, windows, times = PAIRS[pair]
    return " and ".join(f'springtide:slo_errors:ratio_rate{window}{{objective="goodput"}} > {times} * 0.01' for window in windows)


def test_every_window_of_an_alert_is_of_a_pair() -> None:
    for alert in (FAST, SLOWLY):
        (rule,) = [rule for rule in alerts(rules()) if rule["alert"] == alert]
        windows = [window for of, windows, _ in PAIRS.values() if of == alert for window in windows]
        assert re.findall(r"ratio_rate(\w+)", rule["expr"]) == windows


def test_every_alert_has_a_case() -> None:
    assert {case.alert for case in CASES} == {rule["alert"] for rule in alerts(rules())}


@pytest.mark.parametrize("times", [1, 30])
def test_promtool_finds_nothing_to_complain_about(times: int, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RULES.read_text() if times == 1 else yaml.safe_dump(faster(rules(), times)))
    accepts("promtool", "check", "rules", "--lint=all", "--lint-fatal", tmp_path / "rules.yaml")


def test_alertmanager_takes_its_configuration() -> None:
    accepts("amtool", "check-config", ALERTMANAGER)


def test_every_alert_says_what_it_is_and_what_to_do() -> None:
    pages = set()
    for rule in alerts(rules()):
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["labels"]["kind"] in ("cause", "symptom"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url", "dashboard"}, rule["alert"]
        page = REPOSITORY / rule["annotations"]["runbook_url"]
        text = page.read_text()
        assert page.parent == RUNBOOKS and rule["alert"] in text, page
        assert [line for line in text.splitlines() if line.startswith("## ")] == list(HEADINGS), page
        pages.add(page.name)
    assert pages == {page.name for page in RUNBOOKS.glob("*.md")} - {"README.md"}


def test_inhibitions_are_between_alerts_that_there_are() -> None:
    known = {rule["alert"] for rule in alerts(rules())}
    for inhibition in yaml.safe_load(ALERTMANAGER.read_text())["inhibit_rules"]:
        for matcher in (*inhibition["source_matchers"], *inhibition["target_matchers"]):
            if matcher.startswith("alertname"):
                assert set(re.findall(r"Springtide\w+", matcher)) <= known, matcher
