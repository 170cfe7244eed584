"""Workloads and the harness behind `headrace bench`."""
