"""The machine, in a few words for reports."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from messenger.arena_memory import kernel_makes_huge_pages


def describe_machine() -> str:
    """The machine in words, for example `2 cores AMD EPYC 9B14, 24 GiB, Linux x86_64`, and whether memory that is shared has huge pages."""
    cores = len(os.sched_getaffinity(0))
    gibibytes = round(psutil.virtual_memory().total / (1 << 30))
    pages = ", shared memory in huge pages" if kernel_makes_huge_pages() else ""
    return f"{cores} cores {_cpu_name()}, {gibibytes} GiB, {platform.system()} {platform.machine()}{pages}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "CPU")
