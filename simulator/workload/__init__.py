"""What a simulated cluster is asked to do: requests with their times, lengths and blocks, read from a trace or generated."""

from simulator.workload.csv import CsvColumns, read_csv
from simulator.workload.generate import generate, generator_options
from simulator.workload.mooncake import read_mooncake, write_mooncake
from simulator.workload.request import SimRequest, Workload
from simulator.workload.trace import read_trace

__all__ = [
    "CsvColumns",
    "SimRequest",
    "Workload",
    "generate",
    "generator_options",
    "read_csv",
    "read_mooncake",
    "read_trace",
    "write_mooncake",
]
