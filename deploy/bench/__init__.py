"""Measuring a running cluster from the outside: a workload, a driver, statistics, a report."""
