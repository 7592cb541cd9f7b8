"""Dashboards of those who compute and keep: the two pools, the KV pool."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.look import (
    BYTES_A_SECOND,
    COUNT,
    GREEN,
    PER_SECOND,
    RED,
    SECONDS,
    SHARE,
    YELLOW,
    Query,
    graph,
    led,
    led_total,
    mean,
    new_dashboard,
    number,
    objective,
    quantile,
    quantiles,
    rate,
    row,
    share,
    total,
)


def _of_pool(role: str) -> str:
    return f'@in,role="{role}"'


def _numbers(made: dashboard.Dashboard, role: str) -> dashboard.Dashboard:
    """What both pools are asked first."""
    return (
        made.with_panel(
            number(
                "Ready",
                "Instances that take requests.",
                COUNT,
                Query(led_total("springtide_conductor_instances", f'{_of_pool(role)},ready="true"')),
                bounds=((1, GREEN),),
                best=RED,
            )
        )
        .with_panel(
            number(
                "Load",
                "1 is as much as the objectives allow.",
                SHARE,
                Query(f"max({led('springtide_conductor_pool_load', '', _of_pool(role))})"),
                bounds=((0.8, YELLOW), (1, RED)),
            )
        )
        .with_panel(
            number(
                "Running",
                "Attempts that are computed.",
                COUNT,
                Query(led_total("springtide_conductor_pool_attempts_running", _of_pool(role))),
            )
        )
        .with_panel(
            number(
                "Waiting",
                "Attempts that wait for slots or their turn.",
                COUNT,
                Query(led_total("springtide_conductor_pool_attempts_waiting", _of_pool(role))),
            )
        )
        .with_panel(
            number(
                "KV slots in use",
                "Share that attempts hold or are promised; above 0.95 next to nothing is kept.",
                SHARE,
                Query(f"max({led('springtide_conductor_kv_used_ratio', '', _of_pool(role))})"),
                bounds=((0.8, YELLOW), (0.95, RED)),
            )
        )
    )


def prefill() -> dashboard.Dashboard:
    made = new_dashboard("prefill", "prefill pool", "Do prompts wait, and what for?", "springtide_prefill_queue_seconds").with_row(
        row("The pool")
    )
    return (
        _numbers(made, "prefill")
        .with_panel(
            number(
                "Prompt tokens that wait",
                "Which have still to be computed.",
                COUNT,
                Query(led_total("springtide_conductor_queued_prefill_tokens")),
            )
        )
        .with_row(row("Do prompts wait?"))
        .with_panel(
            graph(
                "Work ahead",
                "Predicted time until all that a group has accepted is computed. One far above the others: its prefixes are popular.",
                SECONDS,
                [Query("springtide_prefill_queue_seconds{@at}", "{{instance}}")],
            )
        )
        .with_panel(
            graph(
                "From an attempt's start to its first pass",
                "The wait for slots and for its turn.",
                SECONDS,
                quantiles("springtide_prefill_queue_wait_seconds", "@at"),
            )
        )
        .with_panel(
            graph(
                "Attempts",
                "That run, wait for slots, or have idle capacity.",
                COUNT,
                [
                    Query(total("springtide_prefill_attempts_running", where="@at"), "running"),
                    Query(total("springtide_prefill_attempts_waiting", where="@at"), "waiting"),
                    Query(total("springtide_prefill_attempts_idle", where="@at"), "idle capacity"),
                ],
                stacked=True,
            )
        )
        .with_row(row("What is computed?"))
        .with_panel(
            graph(
                "Prompt tokens",
                "In a second: computed, and reused from the pool by where they came from.",
                PER_SECOND,
                [
                    Query(rate("springtide_prefill_tokens_total", where="@at"), "computed"),
                    Query(rate("springtide_prefill_cached_tokens_total", "source", "@at"), "reused: {{source}}"),
                ],
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Time of a pass",
                "Over the model, with a chunk of each of some prompts.",
                SECONDS,
                quantiles("springtide_prefill_pass_seconds", "@at"),
            )
        )
        .with_panel(
            graph(
                "Tokens of a pass",
                "Mean, by group. Few: prompts are short, or chunks are cut to keep a time budget.",
                COUNT,
                [Query(mean("springtide_prefill_pass_tokens", "instance", "@at"), "{{instance}}")],
            )
        )
        .with_panel(
            graph(
                "How busy the stages are",
                "Share of the time that each stage computes. They should be alike; prefill_node.stage_layers sets what each has.",
                SHARE,
                [Query(rate("springtide_prefill_stage_busy_seconds_total", "instance, stage", "@at"), "{{instance}} stage {{stage}}")],
                most=1,
            )
        )
        .with_row(row("Is KV waited for?"))
        .with_panel(
            graph(
                "Transfers: hidden and waited for",
                "Seconds in a second. What is hidden costs nothing; what is waited for is in the time to first token.",
                SECONDS,
                [Query(rate("springtide_prefill_transfer_seconds_total", "transfer, part", "@at"), "{{transfer}} {{part}}")],
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Hand-over after the first token",
                "Until the decode node has the whole prompt: the pause before the second token.",
                SECONDS,
                quantiles("springtide_prefill_hand_over_tail_seconds", "@at"),
            )
        )
        .with_panel(
            graph(
                "Failures",
                "Attempts that failed here, in a second, by code.",
                PER_SECOND,
                [Query(rate("springtide_prefill_failures_total", "instance, code", "@at"), "{{instance}} {{code}}")],
            )
        )
    )


def decode() -> dashboard.Dashboard:
    made = new_dashboard(
        "decode", "decode pool", "Are tokens on time, and what holds them up?", "springtide_decode_attempts_running"
    ).with_row(row("The pool"))
    return (
        _numbers(made, "decode")
        .with_panel(
            number("Context", "Tokens in the batches of all nodes.", COUNT, Query(led_total("springtide_conductor_decode_context_tokens")))
        )
        .with_row(row("Are tokens on time?"))
        .with_panel(
            graph(
                "Time of a step",
                "A token for each running sequence. Above the objective the batch or its context is too large for this node.",
                SECONDS,
                [
                    *quantiles("springtide_decode_step_seconds", "@at"),
                    objective("tbt"),
                ],
            )
        )
        .with_panel(
            graph(
                "Time of a step, by node",
                "The 99th of a hundred. One above the others: something else runs on its machine, or its card is slower.",
                SECONDS,
                [Query(quantile(0.99, "springtide_decode_step_seconds", "instance", "@at"), "{{instance}}")],
            )
        )
        .with_panel(
            graph(
                "Sequences in a step",
                "Mean, by node; decode_node.max_batch bounds it.",
                COUNT,
                [Query(mean("springtide_decode_batch_size", "instance", "@at"), "{{instance}}")],
            )
        )
        .with_row(row("What is done?"))
        .with_panel(
            graph(
                "Tokens",
                "Generated in a second, by node.",
                PER_SECOND,
                [Query(rate("springtide_decode_tokens_total", "instance", "@at"), "{{instance}}")],
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Attempts",
                "That run, wait for slots or for their prompt, or have idle capacity.",
                COUNT,
                [
                    Query(total("springtide_decode_attempts_running", where="@at"), "running"),
                    Query(total("springtide_decode_attempts_waiting", where="@at"), "waiting"),
                    Query(total("springtide_decode_attempts_idle", where="@at"), "idle capacity"),
                ],
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Context",
                "Tokens of the running sequences, by node.",
                COUNT,
                [Query("springtide_decode_context_tokens{@at}", "{{instance}}")],
                stacked=True,
            )
        )
        .with_row(row("Is there room?"))
        .with_panel(
            graph(
                "Slots given up, attempts refused",
                "In a second: sequences that gave their slots to an older one, and are computed anew; attempts that would have made a "
                "step too long.",
                PER_SECOND,
                [
                    Query(rate("springtide_decode_preemptions_total", "instance", "@at"), "{{instance}} gave its slots"),
                    Query(rate("springtide_decode_admission_rejections_total", "instance", "@at"), "{{instance}} refused"),
                ],
            )
        )
        .with_panel(
            graph(
                "Prompts computed here",
                "In a second: those that the node's own store has nearly all of.",
                PER_SECOND,
                [Query(rate("springtide_decode_inlined_prompts_total", "instance", "@at"), "{{instance}}")],
            )
        )
        .with_panel(
            graph(
                "Failures",
                "Attempts that failed here, in a second, by code.",
                PER_SECOND,
                [Query(rate("springtide_decode_failures_total", "instance, code", "@at"), "{{instance}} {{code}}")],
            )
        )
    )


def pool() -> dashboard.Dashboard:
    slots = "springtide_store_slots"
    return (
        new_dashboard("pool", "KV pool", "How full it is, what it saves, and how its bytes move.", "springtide_store_leases")
        .with_row(row("What does it save?"))
        .with_panel(
            number(
                "Prompt tokens found",
                "Share of all prompts' tokens that need not be computed.",
                SHARE,
                Query(share("springtide_gateway_cached_tokens_total", "springtide_gateway_prompt_tokens_total")),
            )
        )
        .with_panel(
            number(
                "Slots in use",
                "Share of the DRAM slots that attempts hold; the rest is free, or keeps blocks.",
                SHARE,
                Query(f'sum({slots}{{@at,tier="dram",state="in_use"}}) / sum({slots}{{@at,tier="dram"}})'),
                bounds=((0.8, YELLOW), (0.95, RED)),
            )
        )
        .with_panel(
            number(
                "Slots in quarantine",
                "Which a lost writer may still write. Some for seconds after a node died; those that stay are a fault.",
                COUNT,
                Query(f'sum({slots}{{@at,state="quarantined"}})'),
                bounds=((1, YELLOW),),
            )
        )
        .with_panel(
            number(
                "Pinned blocks",
                "Under a pin, of context caches for instance: not evicted.",
                COUNT,
                Query(total("springtide_store_pinned_blocks", where="@at")),
            )
        )
        .with_panel(
            number(
                "SSDs that do not take blocks",
                "Full, or failing.",
                COUNT,
                Query('sum(springtide_store_ssd_state{@at,state!="taking"}) or vector(0)'),
                bounds=((1, RED),),
            )
        )
        .with_panel(
            number(
                "Leases",
                "That peers who read hold.",
                COUNT,
                Query(total("springtide_store_leases", where="@at")),
            )
        )
        .with_panel(
            graph(
                "Hit rate",
                "Of the blocks that stores look for, the share that they have, by store.",
                SHARE,
                [
                    Query(
                        share("springtide_store_hit_blocks_total", "springtide_store_lookup_blocks_total", "instance", "@at"),
                        "{{instance}}",
                    )
                ],
                most=1,
            )
        )
        .with_panel(
            graph(
                "Tokens found, by where",
                "In a second: in the own DRAM, on the own SSD, and at other nodes (remote).",
                PER_SECOND,
                [Query(rate("springtide_store_reused_tokens_total", "source", "@at"), "{{source}}")],
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Slots in DRAM",
                "Of all stores, by state. No `cached` left: nothing is kept; `quarantined` that stays: a fault.",
                COUNT,
                [Query(f'sum by (state) ({slots}{{@at,tier="dram"}})', "{{state}}")],
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Blocks in and out",
                "In a second, by tier: stored, and evicted. As many out as in, with a hit rate that falls: the tier is too small.",
                PER_SECOND,
                [
                    Query(rate("springtide_store_stored_blocks_total", "tier", "@at"), "{{tier}} stored"),
                    Query(rate("springtide_store_removed_blocks_total", "tier", "@at"), "{{tier}} evicted"),
                ],
            )
        )
        .with_row(row("How do its bytes move?"))
        .with_panel(
            graph(
                "Bytes moved",
                "In a second, by transport and direction.",
                BYTES_A_SECOND,
                [Query(rate("springtide_messenger_bytes_total", "transport, direction", "@at"), "{{transport}} {{direction}}")],
            )
        )
        .with_panel(
            graph(
                "Fetching a prefix",
                "From other nodes or the SSD, by how it ended.",
                SECONDS,
                [Query(quantile(0.99, "springtide_store_fetch_seconds", "outcome", "@at"), "{{outcome}} p99")],
            )
        )
        .with_panel(
            graph(
                "Handing a prompt over",
                "From the first question to the last byte, by how it ended.",
                SECONDS,
                [Query(quantile(0.99, "springtide_store_hand_over_seconds", "outcome", "@at"), "{{outcome}} p99")],
            )
        )
        .with_panel(
            graph(
                "Transfers that fail",
                "In a second: batches, slices and connections, by transport; sources that were left for another.",
                PER_SECOND,
                [
                    Query(rate("springtide_messenger_failures_total", "transport, kind", "@at"), "{{transport}} {{kind}}"),
                    Query(rate("springtide_store_sources_given_up_total", "reason", "@at"), "source {{reason}}"),
                    Query(rate("springtide_store_writers_lost_total", where="@at"), "writers lost"),
                ],
            )
        )
        .with_panel(
            graph(
                "Replication",
                "Copies of popular prefixes in a second, by how they ended.",
                PER_SECOND,
                [Query(rate("springtide_conductor_replications_total", "outcome"), "{{outcome}}")],
            )
        )
        .with_panel(
            graph(
                "Bytes copied ahead",
                "By these orders, in a second; conductor.replication_rate bounds it.",
                BYTES_A_SECOND,
                [Query(rate("springtide_conductor_replicated_bytes_total"), "copied")],
            )
        )
        .with_row(row("The SSDs"))
        .with_panel(
            graph(
                "Slots on the SSDs",
                "Of all stores, by state.",
                COUNT,
                [Query(f'sum by (state) ({slots}{{@at,tier="ssd"}})', "{{state}}")],
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Blocks to and from the SSDs",
                "In a second. Missed: they left the DRAM before they could be copied; declined: to compute them was sooner.",
                PER_SECOND,
                [
                    Query(rate("springtide_store_ssd_demoted_blocks_total", where="@at"), "copied to"),
                    Query(rate("springtide_store_ssd_promoted_blocks_total", where="@at"), "read"),
                    Query(rate("springtide_store_ssd_missed_blocks_total", where="@at"), "missed"),
                    Query(rate("springtide_store_ssd_declined_blocks_total", where="@at"), "declined"),
                    Query(rate("springtide_store_ssd_dropped_blocks_total", "reason", "@at"), "lost: {{reason}}"),
                ],
            )
        )
        .with_panel(graph("Reading from the SSD", "One reading of blocks.", SECONDS, quantiles("springtide_store_ssd_read_seconds", "@at")))
    )
