"""One profile for all property tests: repeatable, without deadlines; HEADRACE_EXAMPLES=10 looks ten times as long. JVMs
that start soon: those of tests live for a minute, and would compile for a third of it. And processes that hear Ctrl-C,
also where a shell runs the tests in the background."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

for _helper in ("core.shop", "operations.stores", "durability.snapshot_world"):  # their asserts say what differs
    pytest.register_assert_rewrite(f"tests.{_helper}")

settings.register_profile(
    "headrace",
    max_examples=int(100 * float(os.environ.get("HEADRACE_EXAMPLES", "1"))),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("headrace")

os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # which processes would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)
