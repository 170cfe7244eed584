"""The simulator itself: a fixed set of seeds is clean, hits what it must hit, and gives the same trace everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from headrace.sim.crashes import SCENARIOS, Scenario, crash_everywhere
from headrace.sim.durable_mutants import DURABLE_MUTANTS
from headrace.sim.mutants import MUTANTS, Mutant, caught_by, look_of
from headrace.sim.parameters import Parameters, draw
from headrace.sim.run import PROBES, RunReport, run, simulate

SEEDS = range(100)
MANY = int(100 * float(os.environ.get("HEADRACE_EXAMPLES", "1")))  # HEADRACE_EXAMPLES=10 looks ten times as long


@pytest.fixture(scope="module")
def reports() -> list[RunReport]:
    return [simulate(seed) for seed in range(max(MANY, len(SEEDS)))]


def test_a_fixed_set_of_seeds_is_clean(reports: list[RunReport]) -> None:
    assert {report.seed: report.violations for report in reports if not report.is_clean} == {}


def test_every_declared_probe_is_hit(reports: list[RunReport]) -> None:
    hit: Counter[str] = Counter()
    for report in reports:
        hit.update(report.probes)
    assert [probe for probe in PROBES if not hit[probe]] == []


def test_every_class_of_faults_happens(reports: list[RunReport]) -> None:
    hit: Counter[str] = Counter()
    for report in reports:
        hit.update(report.faults)
    expected = {"lost", "duplicated", "delayed", "reordered", "held back", "cut off", "partitions one-way"}
    expected |= {"partitions two-way", "crashes", "crashes armed in a recovery", "pauses", "zombies", "clocks off"}
    expected |= {"frames again", "frames of old terms again", "client retries", "client replies lost", "rescales"}
    expected |= {"overruns", "false alarms", "reached a successor", "client requests lost", "silent links"}
    expected |= {"coordinator crashes after a snapshot"}
    expected |= {"coordinator crashes", "coordinator pauses", "coordinators superseded", "false takeovers"}
    expected |= {"coordinator pauses in a store operation", "crashes armed in a coordinator's recovery", "power lost"}
    expected |= {"unsynced kept", "unsynced lost", "unsynced cut", "unsynced holes", "flipped bits", "store full"}
    expected |= {"store errors", "slow store operations", "deletions undone", "writes seen half done"}
    expected |= {"append failed, fenced", "start failed, the store refuses", "start failed, fenced"}
    assert expected <= set(hit)


@pytest.mark.parametrize("seed", [6900397, 9500613])
def test_a_seed_that_showed_a_mistake_is_clean(seed: int) -> None:
    """A snapshot before the replies that it covers; calls before a schedule that had missed several moments."""
    assert simulate(seed).violations == []


def test_a_seed_repeats_itself() -> None:
    for seed in (3, 14):
        assert simulate(seed) == simulate(seed)


def test_two_seeds_differ() -> None:
    assert len({simulate(seed).digest for seed in range(5)}) == 5


def command(*args: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli", "sim", *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
    )


def test_a_trace_does_not_depend_on_hashes(reports: list[RunReport]) -> None:
    found = []
    for hash_seed, jobs in (("1", "1"), ("2", "2")):
        done = command("--seeds", "12", "--jobs", jobs, "--json", hash_seed=hash_seed)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    for whole in found:
        assert {"seeds", "violations", "faults", "probes", "digest", "seconds"} <= set(whole)
        assert whole.pop("seconds") > 0
    assert found[0] == found[1]
    assert found[0]["seeds"] == 12
    assert found[0]["transactions"] == sum(report.transactions for report in reports[:12])


def test_one_seed_is_told_in_full() -> None:
    done = command("--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("seed", "workload", "config", "faults hit", "probes hit", "digest", "verdict"):
        assert f"\n{word} " in "\n" + done.stdout
    assert simulate(7).digest in done.stdout


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_crash_before_any_effect_is_survived(scenario: Scenario) -> None:
    runs = list(crash_everywhere(scenario))
    assert {crash_at: report.violations for crash_at, report in runs if not report.is_clean} == {}
    assert len(runs) > 5
    assert sum(report.faults.get("crashes", 0) > 0 for _, report in runs) >= len(runs) - 1


@pytest.mark.parametrize("mutant", [*MUTANTS, *DURABLE_MUTANTS], ids=lambda mutant: mutant.name)
def test_a_planted_mistake_is_caught(mutant: Mutant) -> None:
    seed = caught_by(mutant, range(200))
    assert seed is not None
    assert look_of(mutant)(seed) == [], "it is the mistake that shows, nothing else"


def test_parameters_follow_from_the_seed_alone() -> None:
    assert draw(5) == draw(5)
    assert len({repr(draw(seed).described()) for seed in range(20)}) == 20


def test_a_calm_world_is_clean_in_every_mode_with_every_number_of_workers() -> None:
    for workload in ("bank", "append", "programs"):
        for workers in range(6):
            for mode in ("auto", "ordered", *(["serial"] if workers == 1 else [])):
                store = ("none", "files", "objects")[workers % 3]
                report = run(Parameters(workers, workload, workers=workers, mode=mode, chaos_us=50_000, store=store))
                assert report.violations == []
                assert report.transactions >= 35


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("store", ["files", "objects"])
def test_time_chance_and_the_outside_world_are_repeated_by_the_log(workers: int, store: str) -> None:
    report = run(Parameters(workers, "outside", workers=workers, chaos_us=50_000, store=store))
    assert report.violations == []
    assert report.probes["external calls"] > 0
