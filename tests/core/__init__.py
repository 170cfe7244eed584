"""Tests of the core, by subject: calls, limits, aborts, repair, gathering, predictions, timers, external calls, values.

Tests that are numbered `b1` to `b16` stand for holes that were found in the published Styx, each as the sentence that
must hold here. Where it is cheap, the mistake is planted, to show that the test would notice it.
"""
