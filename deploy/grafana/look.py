"""How all dashboards look: panels, variables and links, each made in one way.

In expressions `@in` stands for the cluster that is chosen, and `@at` for those of its processes that are chosen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from grafana_foundation_sdk.builders import common, dashboard, logs, loki, prometheus, stat, table, tempo, timeseries
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as of_prometheus
from grafana_foundation_sdk.models import tempo as of_tempo

METRICS = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
LOGS = models.DataSourceRef(type_val="loki", uid="${logs}")
TRACES = models.DataSourceRef(type_val="tempo", uid="${traces}")
IN = 'cluster=~"$cluster",namespace=~"$namespace"'
AT = f'{IN},springtide_role=~"$role",instance=~"$instance"'
COLUMNS = 24
HEIGHT, NUMBER_HEIGHT = 8, 4
SECONDS, SHARE, BYTES, BYTES_A_SECOND, PER_SECOND, COUNT = "s", "percentunit", "bytes", "Bps", "cps", "short"
GREEN, YELLOW, RED = "green", "yellow", "red"
QUANTILES = {"p50": GREEN, "p90": YELLOW, "p99": RED}
OBJECTIVE = "objective"
LOGS_QUERY = '{cluster=~"${cluster:regex}"}'
TRACES_QUERY = '{resource.service.name="springtide"}'


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""
    exemplars: bool = False


def rate(metric: str, by: str = "", where: str = "@in") -> str:
    """How much a counter rises in a second, summed over all but the labels named."""
    return f"{_sum(by)} (rate({metric}{{{where}}}[$__rate_interval]))"


def quantile(share: float, histogram: str, by: str = "", where: str = "@in") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, sum by ({labels}) (rate({histogram}_bucket{{{where}}}[$__rate_interval])))"


def share(part: str, whole: str, by: str = "", where: str = "@in") -> str:
    """Of what a counter rises by, that of another that counts some of the same."""
    return f"{rate(part, by, where)} / {rate(whole, by, where)}"


def mean(histogram: str, by: str = "", where: str = "@in") -> str:
    return share(f"{histogram}_sum", f"{histogram}_count", by, where)


def total(gauge: str, by: str = "", where: str = "@in") -> str:
    return f"{_sum(by)} ({gauge}{{{where}}})"


def led(gauge: str, by: str = "", where: str = "@in") -> str:
    """As the Conductor that leads has it."""
    leads = "and on (cluster, namespace, instance) springtide_conductor_is_leader{@in} == 1"
    return f"max by (cluster, namespace{', ' + by if by else ''}) ({gauge}{{{where}}} {leads})"


def led_total(gauge: str, where: str = "@in") -> str:
    return f"sum({led(gauge, where=where)})"


def _sum(by: str) -> str:
    return f"sum by ({by})" if by else "sum"


def quantiles(histogram: str, where: str = "@in") -> list[Query]:
    """The three that are shown of every latency, with the requests behind them."""
    return [Query(quantile(int(name[1:]) / 100, histogram, where=where), name, exemplars=True) for name in QUANTILES]


def objective(name: str) -> Query:
    """Of `ttft` or `tbt`, dashed."""
    return Query(f'max(springtide_gateway_slo_objective_seconds{{@in,objective="{name}"}})', OBJECTIVE)


def _target(query: Query, letter: str, *, instant: bool = False) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(_filled(query.expr)).ref_id(letter).legend_format(query.legend or "__auto").datasource(METRICS)
    if query.exemplars:
        target = target.exemplar(True)
    return target.instant().format(of_prometheus.PromQueryFormat.TABLE) if instant else target.range()


def _filled(expr: str) -> str:
    return expr.replace("@in", IN).replace("@at", AT)


def graph(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    width: int = 8,
    stacked: bool = False,
    most: float | None = None,
    bounds: Sequence[tuple[float, str]] = (),
) -> timeseries.Panel:
    """Lines over time. `bounds`: from which values on it is how bad."""
    legend = common.VizLegendOptions().display_mode(options.LegendDisplayMode.LIST).placement(options.LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI).sort(options.SortOrder.DESCENDING)
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(METRICS)
        .unit(unit)
        .min(0)
        .span(width)
        .height(HEIGHT)
        .line_width(1)
        .fill_opacity(25 if stacked else 5)
        .show_points(options.VisibilityMode.NEVER)
        .legend(legend.show_legend(True))
        .tooltip(tooltip)
        .thresholds(_thresholds(bounds))
        .links(links())
    )
    if most is not None:
        panel = panel.max(most)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL))
    if bounds:
        panel = panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(options.GraphThresholdsStyleMode.DASHED))
    for name, colour in QUANTILES.items():
        if any(query.legend == name for query in queries):
            panel = panel.override_by_name(name, [_fixed(colour)])
    if any(query.legend == OBJECTIVE for query in queries):
        dashes = {"fill": "dash", "dash": [8, 8]}
        panel = panel.override_by_name(OBJECTIVE, [_fixed(RED), models.DynamicConfigValue("custom.lineStyle", dashes)])
    return _with_targets(panel, queries)


def number(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    bounds: Sequence[tuple[float, str]] = (),
    best: str = GREEN,
    width: int = 4,
    decimals: int | None = None,
) -> stat.Panel:
    """What it is now, with its course behind it."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(METRICS)
        .unit(unit)
        .span(width)
        .height(NUMBER_HEIGHT)
        .color_mode(options.BigValueColorMode.VALUE)
        .graph_mode(options.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_thresholds(bounds, best))
        .links(links())
    )
    if decimals is not None:
        panel = panel.decimals(decimals)
    return _with_targets(panel, [query])


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    query: Query
    unit: str = COUNT
    bounds: Sequence[tuple[float, str]] = ()


def rows(title: str, description: str, keys: dict[str, str], columns: Sequence[Column]) -> table.Panel:
    """A table with a line for each value of the labels in `keys` (by the title of their columns), and a column for each query."""
    panel = table.Panel().title(title).description(description).datasource(METRICS).span(COLUMNS).height(HEIGHT + 2).links(links())
    letters = [chr(ord("A") + at) for at in range(len(columns))]
    names = {
        **{label: name for name, label in keys.items()},
        **{f"Value #{letter}": one.title for letter, one in zip(letters, columns, strict=True)},
    }
    panel = panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    organised = {"renameByName": names, "excludeByName": {"Time": True}, "indexByName": {name: at for at, name in enumerate(names)}}
    panel = panel.with_transformation(models.DataTransformerConfig(id_val="organize", options=organised))
    for letter, one in zip(letters, columns, strict=True):
        panel = panel.with_target(_target(one.query, letter, instant=True))
        changes = [models.DynamicConfigValue("unit", one.unit)]
        if one.bounds:
            steps = [{"color": GREEN, "value": None}, *({"color": colour, "value": value} for value, colour in one.bounds)]
            changes += [
                models.DynamicConfigValue("thresholds", {"mode": "absolute", "steps": steps}),
                models.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
            ]
        panel = panel.override_by_name(one.title, changes)
    return panel


def log_lines(title: str, description: str, query: str) -> logs.Panel:
    target = loki.Dataquery().expr(query).ref_id("A").datasource(LOGS).query_type("range").max_lines(500)
    panel = logs.Panel().title(title).description(description).datasource(LOGS).span(COLUMNS).height(HEIGHT + 4)
    return panel.show_time(True).wrap_log_message(True).sort_order(options.LogsSortOrder.ASCENDING).with_target(target)


def trace_table(title: str, description: str, query: str) -> table.Panel:
    target = tempo.TempoQuery().query(query).query_type("traceql").ref_id("A").limit(20).table_type(of_tempo.SearchTableType.TRACES)
    return (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(TRACES)
        .span(COLUMNS)
        .height(HEIGHT)
        .with_target(target.datasource(TRACES))
    )


def _with_targets(panel: Any, queries: Sequence[Query]) -> Any:
    for at, query in enumerate(queries):
        panel = panel.with_target(_target(query, chr(ord("A") + at)))
    return panel


def _fixed(colour: str) -> models.DynamicConfigValue:
    return models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})


def _thresholds(bounds: Sequence[tuple[float, str]], best: str = GREEN) -> dashboard.ThresholdsConfig:
    steps = [models.Threshold(color=best, value=None), *(models.Threshold(color=colour, value=value) for value, colour in bounds)]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def links() -> list[dashboard.DashboardLink]:
    """Of every panel: what was logged and traced in the time that is shown."""
    found = []
    for title, source, query in (
        ("Logs", "logs", {"expr": LOGS_QUERY}),
        ("Traces", "traces", {"query": TRACES_QUERY, "queryType": "traceql"}),
    ):
        panes = {
            "a": {"datasource": f"${{{source}}}", "queries": [{"refId": "A", **query}], "range": {"from": "${__from}", "to": "${__to}"}}
        }
        url = f"/explore?schemaVersion=1&panes={quote(json.dumps(panes), safe='${}:_')}"
        found.append(dashboard.DashboardLink(title).type(models.DashboardLinkType.LINK).url(url).target_blank(True))
    return found


def row(title: str) -> dashboard.Row:
    return dashboard.Row(title)


def _choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Of some of a label's values, or all; a label that nothing has leaves everything in."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(METRICS)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def new_dashboard(name: str, title: str, description: str, processes: str) -> dashboard.Dashboard:
    """`processes`: a metric of those that may be chosen, by their roles and by name."""
    made = (
        dashboard.Dashboard(f"Springtide: {title}")
        .uid(f"springtide-{name}")
        .description(description)
        .tags(["springtide"])
        .timezone("browser")
        .refresh("30s")
        .time("now-1h", "now")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Springtide")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["springtide"])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
    )
    for source, label, kind in (("datasource", "Metrics", "prometheus"), ("logs", "Logs", "loki"), ("traces", "Traces", "tempo")):
        made = made.with_variable(dashboard.DatasourceVariable(source).label(label).type(kind))
    made = made.with_variable(_choice("cluster", "Cluster", 'label_values(up{springtide_role!=""}, cluster)'))
    made = made.with_variable(_choice("namespace", "Namespace", 'label_values(up{springtide_role!="",cluster=~"$cluster"}, namespace)'))
    ours = f'{processes}{{springtide_role!="",{IN}'
    made = made.with_variable(_choice("role", "Role", f"label_values({ours}}}, springtide_role)"))
    made = made.with_variable(_choice("instance", "Instance", f'label_values({ours},springtide_role=~"$role"}}, instance)'))
    alerts = dashboard.AnnotationQuery().name("Alerts").datasource(METRICS).enable(True).icon_color(RED)
    return made.annotation(alerts.expr('ALERTS{alertname=~"Springtide.*",alertstate="firing",severity="critical",cluster=~"$cluster"}'))
