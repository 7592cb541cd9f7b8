"""The dashboard of processes and the machines that they are on."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.look import (
    BYTES,
    BYTES_A_SECOND,
    COUNT,
    METRICS,
    RED,
    SECONDS,
    SHARE,
    YELLOW,
    Column,
    Query,
    graph,
    new_dashboard,
    quantile,
    rate,
    row,
    rows,
)

PROCESS = "@at"
HOST = 'instance=~"$host"'
INTERFACES = f'{HOST},device!="lo"'
DISKS = f'{HOST},fstype!~"tmpfs|overlay|squashfs"'


def hosts() -> dashboard.Dashboard:
    busy, all_of_it = (rate("node_cpu_seconds_total", "instance", where) for where in (f'{HOST},mode!="idle"', HOST))
    host = (
        dashboard.QueryVariable("host")
        .label("Machine")
        .query("label_values(node_uname_info, instance)")
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )
    by = "springtide_role, instance"
    return (
        new_dashboard("hosts", "processes and machines", "Is every process there, and has it what it needs?", "up")
        .with_variable(host.datasource(METRICS))
        .with_row(row("Processes"))
        .with_panel(
            rows(
                "Processes",
                "All that are known. Up 0: it does not answer.",
                {"Role": "springtide_role", "Process": "instance"},
                [
                    Column("Up", Query(f"max by ({by}) (up{{{PROCESS}}})"), bounds=()),
                    Column("Runs for", Query(f"time() - max by ({by}) (process_start_time_seconds{{{PROCESS}}})"), SECONDS),
                    Column(
                        "Starts in an hour",
                        Query(f"max by ({by}) (changes(process_start_time_seconds{{{PROCESS}}}[1h]))"),
                        bounds=((1, YELLOW), (3, RED)),
                    ),
                    Column("Processors", Query(f"sum by ({by}) (rate(process_cpu_seconds_total{{{PROCESS}}}[5m]))")),
                    Column("Memory", Query(f"max by ({by}) (process_resident_memory_bytes{{{PROCESS}}})"), BYTES),
                    Column(
                        "Open files",
                        Query(f"max by ({by}) (process_open_fds{{{PROCESS}}} / process_max_fds{{{PROCESS}}})"),
                        SHARE,
                        ((0.8, RED),),
                    ),
                ],
            )
        )
        .with_panel(
            graph(
                "Processor time",
                "Processors that each process uses.",
                COUNT,
                [Query(rate("process_cpu_seconds_total", by, PROCESS), "{{instance}}")],
            )
        )
        .with_panel(
            graph(
                "Memory",
                "Resident, of each process; a store's has its arena.",
                BYTES,
                [Query(f"process_resident_memory_bytes{{{PROCESS}}}", "{{instance}}")],
            )
        )
        .with_panel(
            graph(
                "Lateness of event loops",
                "How much later than wanted they have their turn: the 99th of a hundred looks. From half a second on a process looks hung.",
                SECONDS,
                [Query(quantile(0.99, "springtide_event_loop_lag_seconds", by, PROCESS), "{{instance}}")],
                bounds=((0.1, YELLOW), (0.5, RED)),
            )
        )
        .with_panel(
            graph(
                "Certificates end in",
                "By process. Those of the cluster's own authority are renewed when 30 days are left.",
                SECONDS,
                [Query(f"springtide_certificate_expiry_timestamp_seconds{{{PROCESS}}} - time()", "{{instance}} {{certificate}}")],
                width=12,
            )
        )
        .with_panel(
            graph(
                "Versions",
                "Processes by the version that they run: more than one for as long as an upgrade takes.",
                COUNT,
                [Query(f"count by (version) (springtide_build_info{{{PROCESS}}})", "{{version}}")],
                width=12,
                stacked=True,
            )
        )
        .with_row(row("Machines, of node_exporter where there is one"))
        .with_panel(
            graph(
                "Processors in use",
                "Share of all of a machine's.",
                SHARE,
                [Query(f"{busy} / {all_of_it}", "{{instance}}")],
                most=1,
                bounds=((0.9, YELLOW),),
            )
        )
        .with_panel(
            graph(
                "Memory in use",
                "Share of a machine's; arenas are part of it. At its end the kernel kills the largest process, which is a store.",
                SHARE,
                [Query(f"1 - node_memory_MemAvailable_bytes{{{HOST}}} / node_memory_MemTotal_bytes{{{HOST}}}", "{{instance}}")],
                most=1,
                bounds=((0.9, YELLOW), (0.97, RED)),
            )
        )
        .with_panel(
            graph(
                "Disks in use",
                "Share, of the fullest file system of each machine.",
                SHARE,
                [
                    Query(
                        f"max by (instance) (1 - node_filesystem_avail_bytes{{{DISKS}}} / node_filesystem_size_bytes{{{DISKS}}})",
                        "{{instance}}",
                    )
                ],
                most=1,
                bounds=((0.9, YELLOW), (0.97, RED)),
            )
        )
        .with_panel(
            graph(
                "Network",
                "Bytes in a second, received and sent, without loopback.",
                BYTES_A_SECOND,
                [
                    Query(rate("node_network_receive_bytes_total", "instance", INTERFACES), "{{instance}} received"),
                    Query(rate("node_network_transmit_bytes_total", "instance", INTERFACES), "{{instance}} sent"),
                ],
                width=12,
            )
        )
        .with_panel(
            graph(
                "Waiting for disks",
                "Share of the time in which some process waits for one (pressure stall information).",
                SHARE,
                [Query(f"rate(node_pressure_io_waiting_seconds_total{{{HOST}}}[$__rate_interval])", "{{instance}}")],
                width=12,
            )
        )
        .with_row(row("Cards, of dcgm-exporter where there is one"))
        .with_panel(
            graph(
                "Cards: busy",
                "Share of the time that something runs on the card.",
                "percent",
                [Query("DCGM_FI_DEV_GPU_UTIL", "{{Hostname}} {{gpu}}")],
                most=100,
            )
        )
        .with_panel(
            graph(
                "Cards: memory",
                "Share that is in use; device_memory sets what engines take.",
                SHARE,
                [Query("DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE)", "{{Hostname}} {{gpu}}")],
                most=1,
            )
        )
        .with_panel(
            graph(
                "Cards: last error",
                "The Xid, 0 for none; NVIDIA's list says what it is.",
                COUNT,
                [Query("DCGM_FI_DEV_XID_ERRORS", "{{Hostname}} {{gpu}}")],
                bounds=((1, RED),),
            )
        )
    )
