"""Dashboards of what clients notice and who decides about it: overview, Conductor, one request, tenants."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.look import (
    COUNT,
    GREEN,
    PER_SECOND,
    RED,
    SECONDS,
    SHARE,
    YELLOW,
    Column,
    Query,
    graph,
    led,
    led_total,
    log_lines,
    mean,
    new_dashboard,
    number,
    objective,
    quantile,
    quantiles,
    rate,
    row,
    rows,
    share,
    total,
    trace_table,
)

BUDGET = "(1 - scalar(springtide:slo_objective:ratio))"
ENDED = '@at,objective="goodput"'
MISSED = f'{ENDED},result="missed"'
GATEWAYS = "springtide_gateway_ttft_seconds_count"
"""What every gateway has."""
RUNBOOKS = "Each alert has a page in docs/runbooks."


def overview() -> dashboard.Dashboard:
    missing = Query("springtide:slo_errors:ratio_rate5m{@in}", "{{objective}}")
    return (
        new_dashboard("overview", "overview", "Are clients well, and if not, where to look next.", GATEWAYS)
        .with_row(row("Are clients well?"))
        .with_panel(
            number(
                "Goodput",
                "Generations in a second that finished within both objectives, TTFT and TBT.",
                PER_SECOND,
                Query('sum(rate(springtide_gateway_slo_generations_total{@in,objective="goodput",result="met"}[$__rate_interval]))'),
                decimals=2,
            )
        )
        .with_panel(
            number(
                "Generations that miss",
                "Share of the last five minutes' that missed an objective, were refused or failed.",
                SHARE,
                Query('max(springtide:slo_errors:ratio_rate5m{@in,objective="goodput"})'),
                bounds=((0.01, YELLOW), (0.06, RED)),
            )
        )
        .with_panel(
            number(
                "Error budget left",
                "Of the budget of 30 days: 1 is all of it, below 0 the objective is missed.",
                SHARE,
                Query('min(springtide:error_budget:remaining_ratio{@in,objective="goodput"})'),
                bounds=((0, YELLOW), (0.25, GREEN)),
                best=RED,
            )
        )
        .with_panel(
            number(
                "Alerts",
                f"That are firing. {RUNBOOKS}",
                COUNT,
                Query('count(ALERTS{alertname=~"Springtide.*",alertstate="firing",cluster=~"$cluster"}) or vector(0)'),
                bounds=((1, RED),),
            )
        )
        .with_panel(
            number(
                "Processes that do not answer",
                "Which are known to be in the cluster, and do not answer Prometheus.",
                COUNT,
                Query('count(up{@in,springtide_role!=""} == 0) or vector(0)'),
                bounds=((1, RED),),
            )
        )
        .with_panel(
            number(
                "Requests in flight",
                "API requests that the gateways that are chosen are answering now.",
                COUNT,
                Query(total("springtide_gateway_requests_in_flight", where="@at")),
            )
        )
        .with_panel(
            graph(
                "Time to first token",
                "As clients see it, from a generation's arrival at a gateway that is chosen. Dots are requests with a trace. Above the "
                "objective: look at the Conductor's queue and the prefill pool.",
                SECONDS,
                [*quantiles("springtide_gateway_ttft_seconds", "@at"), objective("ttft")],
            )
        )
        .with_panel(
            graph(
                "Time between tokens",
                "As clients see it. Above the objective: look at the decode pool's steps and batches.",
                SECONDS,
                [*quantiles("springtide_gateway_tbt_seconds", "@at"), objective("tbt")],
            )
        )
        .with_panel(
            graph(
                "Generations that miss, by objective",
                "Share of five minutes. Where `goodput` is above both others, requests are refused or fail.",
                SHARE,
                [missing],
                bounds=((0.01, YELLOW), (0.06, RED)),
            )
        )
        .with_panel(
            graph(
                "Error budget burn",
                "How many times as fast as would just do the budget of 30 days is spent, by the windows of the alerts: somebody is woken "
                "at 14.4 over an hour, or 6 over six.",
                "none",
                [
                    Query(f'springtide:slo_errors:ratio_rate5m{{@in,objective="goodput"}} / {BUDGET}', "5 min"),
                    Query(f'springtide:slo_errors:ratio_rate1h{{@in,objective="goodput"}} / {BUDGET}', "1 h"),
                    Query(f'springtide:slo_errors:ratio_rate6h{{@in,objective="goodput"}} / {BUDGET}', "6 h"),
                ],
                bounds=((1, GREEN), (6, YELLOW), (14.4, RED)),
            )
        )
        .with_panel(
            graph(
                "Answers",
                "API requests answered in a second, by status. 429: refused for load or a limit; 503: nobody to serve them.",
                PER_SECOND,
                [Query(rate("springtide_gateway_requests_total", "status", "@at"), "{{status}}")],
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Refused, by reason",
                "By the Conductor, in a second. ttft, tbt: predicted to miss it; no_prefill, no_decode: nobody to do it; priority, "
                "tenant_share, size: under load, others come first; too_large: never fits.",
                PER_SECOND,
                [Query(rate("springtide_conductor_rejections_total", "reason"), "{{reason}}")],
                stacked=True,
            )
        )
        .with_row(row("What is done?"))
        .with_panel(
            graph(
                "Tokens",
                "In a second: of prompts, of these found in the pool, and generated.",
                PER_SECOND,
                [
                    Query(rate("springtide_gateway_prompt_tokens_total", where="@at"), "prompt"),
                    Query(rate("springtide_gateway_cached_tokens_total", where="@at"), "found in the pool"),
                    Query(rate("springtide_gateway_output_tokens_total", where="@at"), "output"),
                ],
            )
        )
        .with_panel(
            graph(
                "Load of the pools",
                "1 is as much as the objectives allow; above it requests are refused.",
                SHARE,
                [Query(led("springtide_conductor_pool_load", "role"), "{{role}}")],
                bounds=((0.8, YELLOW), (1, RED)),
            )
        )
        .with_panel(
            graph(
                "Attempts that fail or move",
                "Failed by an instance's fault or for want of room, both scheduled anew; moved to another node; failed for good.",
                PER_SECOND,
                [
                    Query(rate("springtide_gateway_failed_attempts_total", "instance_id"), "{{instance_id}}"),
                    Query(rate("springtide_gateway_crowded_out_attempts_total"), "no room"),
                    Query(rate("springtide_gateway_moves_total", "outcome"), "moves: {{outcome}}"),
                    Query(rate("springtide_gateway_failures_total", "code"), "for good: {{code}}"),
                ],
            )
        )
        .with_panel(
            graph(
                "Processes",
                "That answer, by role. A step down that does not come back is a process that is gone.",
                COUNT,
                [Query('sum by (springtide_role) (up{@in,springtide_role!=""})', "{{springtide_role}}")],
            )
        )
        .with_panel(
            graph(
                "Valkey",
                "Share of the processes that Valkey answered when they last asked. Membership, leases, keys and usage hang on it.",
                SHARE,
                [Query("avg by (client) (springtide_valkey_up{@in})", "{{client}}")],
                most=1,
            )
        )
        .with_panel(
            graph(
                "Clients that went away",
                "API requests in a second whose client left first: often a sign that answers are late.",
                PER_SECOND,
                [Query(rate("springtide_gateway_client_disconnects_total", "route", "@at"), "{{route}}")],
            )
        )
    )


def conductor() -> dashboard.Dashboard:
    ratio = "springtide_conductor_prediction_ratio"
    return (
        new_dashboard(
            "conductor", "Conductor", "What is decided, how well it is foreseen, and who decides.", "springtide_conductor_is_leader"
        )
        .with_row(row("Who decides?"))
        .with_panel(
            number(
                "Leaders",
                "Conductors that lead: one. None: requests wait.",
                COUNT,
                Query(total("springtide_conductor_is_leader")),
                bounds=((1, GREEN), (2, YELLOW)),
                best=RED,
            )
        )
        .with_panel(
            number(
                "Changes of leadership",
                "In the last hour, of all Conductors. Many: a lease that is too short for this network, or a Conductor that is too busy.",
                COUNT,
                Query("sum(increase(springtide_conductor_leadership_changes_total{@in}[1h])) or vector(0)"),
                bounds=((4, YELLOW),),
                decimals=0,
            )
        )
        .with_panel(
            number(
                "Instances that hang",
                "Silent, or without headway; others do their work.",
                COUNT,
                Query(led_total("springtide_conductor_hung_instances")),
                bounds=((1, RED),),
            )
        )
        .with_panel(
            number(
                "Silences",
                "Times in the last hour that an engine or a store was lost because it was silent or made no headway; labels say which.",
                COUNT,
                Query("sum(increase(springtide_conductor_silences_total{@in}[1h])) or vector(0)"),
                bounds=((1, YELLOW),),
                decimals=0,
            )
        )
        .with_panel(number("Attempts in flight", "As the leader counts them.", COUNT, Query(led_total("springtide_conductor_attempts"))))
        .with_panel(
            number(
                "Prompt tokens that wait",
                "Which prefill groups have still to compute.",
                COUNT,
                Query(led_total("springtide_conductor_queued_prefill_tokens")),
            )
        )
        .with_panel(
            number(
                "Entries of the index",
                "Blocks, by holder, that the leader knows.",
                COUNT,
                Query(led_total("springtide_conductor_index_blocks")),
            )
        )
        .with_row(row("What is decided?"))
        .with_panel(
            graph(
                "Decisions",
                "In a second. not_idle: a batch's request found no idle capacity, and asks again.",
                PER_SECOND,
                [Query(rate("springtide_conductor_decisions_total", "outcome"), "{{outcome}}")],
                stacked=True,
            )
        )
        .with_panel(graph("Time to decide", "On one request.", SECONDS, quantiles("springtide_conductor_decision_seconds")))
        .with_panel(
            graph(
                "Tokens that need not be computed",
                "Share of the prompts' tokens that are predicted to be reused, by where they lie: in the own store, or in another.",
                SHARE,
                [
                    Query(
                        f"{rate('springtide_conductor_matched_tokens_total', 'where')} / on () group_left () "
                        + rate("springtide_conductor_prompt_tokens_total"),
                        "{{where}}",
                    )
                ],
                stacked=True,
                most=1,
            )
        )
        .with_panel(
            graph(
                "Load of the pools",
                "1 is as much as the objectives allow.",
                SHARE,
                [Query(led("springtide_conductor_pool_load", "role"), "{{role}}")],
                bounds=((0.8, YELLOW), (1, RED)),
            )
        )
        .with_panel(
            graph(
                "Prefill to decode: wanted and there",
                "How the demand of the last minutes would divide the instances, and how they are divided.",
                COUNT,
                [
                    Query(led("springtide_conductor_pool_wanted", "role"), "{{role}} wanted"),
                    Query(led("springtide_conductor_instances", "role", '@in,ready="true"'), "{{role}} there"),
                ],
            )
        )
        .with_panel(
            graph(
                "Refused, by reason",
                "In a second, by what the Conductor foresees or lacks.",
                PER_SECOND,
                [Query(rate("springtide_conductor_rejections_total", "reason"), "{{reason}}")],
                stacked=True,
            )
        )
        .with_row(row("Does it come as foreseen?"))
        .with_panel(
            graph(
                "Predicted against actual",
                "Median of predicted over actual. 1 is right; above, requests are refused that would have made it; below, requests are "
                "taken that miss. Beyond 2.5 or below 0.4 an alert fires. Nobody knows how long an answer gets: of output_tokens the sum "
                "counts.",
                "none",
                [Query(quantile(0.5, ratio, "quantity"), "{{quantity}}")],
                bounds=((0.4, GREEN), (2.5, RED)),
            )
        )
        .with_panel(
            graph(
                "Time to first token: predicted, and actual",
                "Of all requests, refused ones included; and of those that were served.",
                SECONDS,
                [
                    Query(quantile(0.5, "springtide_conductor_predicted_ttft_seconds"), "predicted p50"),
                    Query(quantile(0.9, "springtide_conductor_predicted_ttft_seconds"), "predicted p90"),
                    Query(quantile(0.5, "springtide_gateway_ttft_seconds"), "actual p50"),
                    Query(quantile(0.9, "springtide_gateway_ttft_seconds"), "actual p90"),
                ],
            )
        )
        .with_panel(
            graph(
                "Time between tokens that is foreseen",
                "Of the decode nodes, mean over them, as the leader predicts it.",
                SECONDS,
                [Query(led("springtide_conductor_decode_tbt_seconds"), "predicted"), objective("tbt")],
            )
        )
        .with_row(row("Is the Conductor itself well?"))
        .with_panel(
            graph(
                "Lateness of the event loop",
                "How much later than wanted it has its turn. Above some 50 ms decisions wait for one another.",
                SECONDS,
                [
                    Query(
                        quantile(0.99, "springtide_event_loop_lag_seconds", "instance", '@at,springtide_role="conductor"'),
                        "{{instance}} p99",
                    )
                ],
                bounds=((0.05, YELLOW), (0.5, RED)),
            )
        )
        .with_panel(
            graph(
                "Load reports",
                "Of engines, taken in in a second. Fewer than two for each engine: it does not keep up.",
                PER_SECOND,
                [Query(rate("springtide_conductor_load_reports_total", "instance", "@at"), "{{instance}}")],
            )
        )
        .with_panel(
            graph(
                "Role switches",
                "Instances told to switch between prefill and decode, in an hour.",
                COUNT,
                [Query("sum by (to, outcome) (increase(springtide_conductor_role_switches_total{@in}[1h]))", "to {{to}}: {{outcome}}")],
            )
        )
    )


def request() -> dashboard.Dashboard:
    parts = [
        Query(mean("vllm:request_queue_time_seconds", where='@in,springtide_role=~"prefill|instance"'), "waits to be prefilled"),
        Query(mean("vllm:request_prefill_time_seconds", where='@in,springtide_role=~"prefill|instance"'), "prefill"),
        Query(mean("springtide_prefill_hand_over_tail_seconds"), "hand-over after the first token"),
        Query(mean("vllm:request_decode_time_seconds", where='@in,springtide_role=~"decode|instance"'), "decode"),
    ]
    named = dashboard.TextBoxVariable("request").label("Request").description("the id that a client got: chatcmpl-…, msg_…, resp_…")
    return (
        new_dashboard(
            "request", "a request's path", "What requests spend their time with, and one of them by its id: trace and log.", GATEWAYS
        )
        .with_variable(named)
        .with_row(row("Where the time goes"))
        .with_panel(
            graph(
                "Where the time goes",
                "Means over requests, one on top of the other: what has grown is where to look.",
                SECONDS,
                parts,
                width=12,
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "From arrival to the end",
                "Of generations that finished. Dots are requests with a trace.",
                SECONDS,
                quantiles("springtide_gateway_e2e_seconds", "@at"),
                width=12,
            )
        )
        .with_panel(
            graph(
                "Waits for KV",
                "In a second of time, seconds that transfers took: hidden behind computing, or waited for.",
                SECONDS,
                [Query(rate("springtide_prefill_transfer_seconds_total", "transfer, part"), "{{transfer}} {{part}}")],
                width=12,
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Scheduled anew",
                "Attempts beyond a generation's first, for each that was scheduled. Such a request has several attempts in its trace.",
                SHARE,
                [
                    Query(
                        f"{rate('springtide_gateway_reschedules_total')} / "
                        + rate("springtide_conductor_decisions_total", where='@in,outcome="scheduled"'),
                        "anew",
                    )
                ],
                width=12,
                bounds=((0.1, RED),),
            )
        )
        .with_row(row("One request: $request"))
        .with_panel(
            trace_table(
                "Trace", "Of the request by its id: from the gateway through both nodes.", '{span.springtide.request.id="$request"}'
            )
        )
        .with_panel(
            log_lines(
                "Log", "Lines of all processes about the request, with log.format json.", '{cluster=~"${cluster:regex}"} |= "$request"'
            )
        )
    )


def tenants() -> dashboard.Dashboard:
    tokens = "springtide_gateway_tenant_tokens_total"
    generations = "springtide_gateway_slo_generations_total"
    return (
        new_dashboard("tenants", "tenants and caches", "Who sends what, who is served how, and what is kept for whom.", GATEWAYS)
        .with_row(row("Tenants"))
        .with_panel(
            rows(
                "Tenants",
                "Of the last hour. An empty name: requests without a key.",
                {"Tenant": "tenant"},
                [
                    Column("Generations", Query(f'sum by (tenant) (increase({generations}{{@at,objective="goodput"}}[1h]))')),
                    Column(
                        "Miss",
                        Query(
                            f'1 - sum by (tenant) (increase({generations}{{@at,objective="goodput",result="met"}}[1h])) / '
                            f'sum by (tenant) (increase({generations}{{@at,objective="goodput"}}[1h]))'
                        ),
                        SHARE,
                        ((0.01, YELLOW), (0.06, RED)),
                    ),
                    Column("Prompt tokens", Query(f'sum by (tenant) (increase({tokens}{{@at,kind="prompt"}}[1h]))')),
                    Column("Output tokens", Query(f'sum by (tenant) (increase({tokens}{{@at,kind="output"}}[1h]))')),
                    Column(
                        "Found in the pool",
                        Query(
                            f'sum by (tenant) (increase({tokens}{{@at,kind="cached"}}[1h])) / '
                            f'sum by (tenant) (increase({tokens}{{@at,kind="prompt"}}[1h]))'
                        ),
                        SHARE,
                    ),
                ],
            )
        )
        .with_panel(
            graph(
                "Tokens, by tenant",
                "Of prompts and answers, in a second.",
                PER_SECOND,
                [Query(rate(tokens, "tenant", '@at,kind!="cached"'), "{{tenant}}")],
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Generations that miss, by tenant",
                "Share of those of each tenant that missed an objective, were refused or failed.",
                SHARE,
                [
                    Query(
                        f"{rate(generations, 'tenant', MISSED)} / {rate(generations, 'tenant', ENDED)}",
                        "{{tenant}}",
                    )
                ],
                bounds=((0.06, RED),),
            )
        )
        .with_panel(
            graph(
                "Refused before the Conductor",
                "In a second: over a limit of their key or tenant, by its kind; without a key that is known.",
                PER_SECOND,
                [
                    Query(rate("springtide_gateway_rate_limited_total", "kind"), "limit: {{kind}}"),
                    Query(rate("springtide_gateway_unauthenticated_total"), "no known key"),
                ],
            )
        )
        .with_row(row("Caches"))
        .with_panel(
            graph(
                "Prompt tokens found in the pool",
                "Share of all prompts' tokens that need not be computed. It falls when the pool is too small or a store was lost.",
                SHARE,
                [Query(share("springtide_gateway_cached_tokens_total", "springtide_gateway_prompt_tokens_total"), "found")],
                most=1,
            )
        )
        .with_panel(
            graph(
                "Context caches",
                "By status. Those that stay in creating find no idle capacity.",
                COUNT,
                [Query(total("springtide_gateway_context_caches", "status"), "{{status}}")],
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Tokens of context caches",
                "By status. They are pinned: what is kept for caches is not there for others' prefixes.",
                COUNT,
                [Query(total("springtide_gateway_context_cache_tokens", "status"), "{{status}}")],
                stacked=True,
            )
        )
    )
