"""The parameters of a run, all drawn from one seed: the kinds and strengths of faults, and how small the limits are.

Each class of faults is on with a probability of about 0.6, so that runs differ in kind: a bug that needs one part to be
quiet and another to fail is still found.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from headrace.config import Config
from headrace.sim.disk import DiskFaults

FAULT_PROBABILITY = 0.6

STORES = ("files", "files", "files", "objects", "objects", "none")
WORKLOADS = ("bank", "append", "programs", "programs")
MODES = ("auto", "auto", "serial", "ordered", "ordered", "ordered")


@dataclasses.dataclass(frozen=True)
class Faults:
    """Strengths of faults; 0 if a class is off."""

    loss: float = 0.0  # of frames, probability
    duplication: float = 0.0
    tail: float = 0.0  # probability that a frame takes much longer
    reordering: bool = False
    echoes: int = 0  # old frames that come again, of this term or an older one
    silences: int = 0  # links that hold everything back, then deliver it at once
    partitions: int = 0
    crashes: int = 0
    crash_again: float = 0.0  # probability that a worker crashes while it recovers
    pauses: int = 0  # nodes that stop for a while; those that were replaced meanwhile wake up as zombies
    false_alarms: int = 0  # working workers that are reported as lost
    clocks: bool = False  # off by up to 500 ms, and drifting
    client_loss: float = 0.0  # of requests and replies
    impatience: bool = False  # clients that retry soon, in other batches
    rescales: int = 0
    reads: int = 0
    misbehaviour: bool = False  # functions that overrun, do not await, return what cannot be encoded
    coordinator_crashes: int = 0  # between two effects, or in the middle of a store operation
    snapshot_crashes: int = 0  # of a coordinator, soon after it has saved a snapshot
    coordinator_pauses: int = 0  # another one takes over meanwhile, and the first wakes up as a zombie
    false_takeovers: int = 0  # another one takes over while the first works
    power_losses: int = 0  # all coordinators end, and what was not synced is lost
    full_times: int = 0  # the store is full for a while
    store_errors: float = 0.0  # probability per operation
    sync_errors: float = 0.0
    flips: float = 0.0  # of a bit, on a read
    splits: float = 0.0  # writes that others see half done
    new_limits: bool = False  # the next coordinator has other limits
    slow_store: bool = False  # operations that take long; others run meanwhile

    @property
    def of_disk(self) -> DiskFaults:
        return DiskFaults(self.store_errors, self.sync_errors, self.flips, self.splits)


@dataclasses.dataclass(frozen=True)
class Parameters:
    seed: int
    workload: str = "bank"
    transactions: int = 40
    clients: int = 2
    workers: int = 2  # 0: an engine without workers
    mode: str = "auto"
    chaos_us: int = 500_000
    delay_us: int = 200
    store: str = "files"
    config: Config = dataclasses.field(default_factory=Config)
    faults: Faults = dataclasses.field(default_factory=Faults)
    tiny: tuple[str, ...] = ()  # the limits that are tiny in this run
    changes: float = 0.0  # probability that an operator logs its changes, drawn for each coordinator
    only: tuple[int, ...] | None = None  # of the drawn transactions, only these

    def rng(self, concern: str) -> random.Random:
        """A separate generator for each concern: one more draw in one place changes nothing elsewhere."""
        return random.Random(f"headrace {self.seed} {concern}")

    def settings(self, rng: random.Random, number: int, is_chaos: bool) -> tuple[Config, int, str]:
        """The configuration, workers and mode of the coordinator with this number. Later coordinators may have others:
        what the log says does not depend on them."""
        workers, mode = rng.choice((0, 1, 2, 3, 4)), rng.choice(MODES)
        chance, calls, depth = rng.random(), rng.choice((2, 5, 50)), rng.choice((1, 2, 50))
        if number == 1:
            return self.config, self.workers, self.mode
        config = self.config
        if self.faults.new_limits and chance < 0.7:
            config = dataclasses.replace(config, calls_max=calls, depth_max=depth)
        return config, min(workers, 1 if mode == "serial" else config.shards), mode

    def described(self) -> dict[str, Any]:
        """What `headrace sim --seed` prints: of limits and faults, only what is not the default."""
        usual, config = Config(), dataclasses.asdict(self.config)
        faults = {name: value for name, value in dataclasses.asdict(self.faults).items() if value}
        return {
            **{name: getattr(self, name) for name in ("workload", "transactions", "clients", "workers", "mode")},
            "chaos_us": self.chaos_us,
            "delay_us": self.delay_us,
            "store": self.store,
            "changes": self.changes,
            "only": self.only,
            "config": {name: value for name, value in config.items() if value != getattr(usual, name)},
            "faults": faults,
        }


TINY: dict[str, tuple[int, ...]] = {  # limits, and their tiny values
    "epoch_transactions_max": (1, 2, 5),
    "epochs_in_flight_max": (1, 3),
    "window_frames_max": (1, 2),
    "entities_per_frame_max": (1, 3),
    "slice_calls_max": (1, 2),
    "calls_max": (2, 5),
    "depth_max": (1, 2),
    "replay_transactions_max": (1, 7),
    "shards": (1, 3),
}


def draw_store(seed: int) -> tuple[str, bool]:
    """The kind of store, and whether the first coordinator is an engine without workers."""
    rng = random.Random(f"headrace {seed} store")
    return rng.choice(STORES), rng.random() < 0.15


def draw_workload(seed: int, store: str, drawn: str) -> str:
    """The workload. "outside" needs a log: only there the responses from outside can be seen."""
    is_outside = random.Random(f"headrace {seed} outside").random() < 0.2
    return "outside" if is_outside and store != "none" else drawn


def draw_versions(seed: int, store: str) -> bool:
    """Whether later coordinators may run newer versions of the app. Without a store there is nothing to inherit."""
    return random.Random(f"headrace {seed} versions").random() < 0.12 and store != "none"


def draw_transactions(seed: int, workload: str, drawn: int, misbehaviour: bool) -> int:
    """How many transactions; for programs sometimes so many that an epoch has hundreds. Fewer if half of them may
    overrun: each time, all epochs since the last copy of the state run again."""
    rng = random.Random(f"headrace {seed} transactions")
    if workload != "programs" or rng.random() >= 0.1:
        return drawn
    return 120 if misbehaviour else rng.randint(150, 600)


def draw_durable(seed: int) -> dict[str, Any]:
    """The faults of the coordinator and its disk, from a separate generator."""
    rng = random.Random(f"headrace {seed} durability")
    strengths: dict[str, Any] = {
        "coordinator_crashes": rng.randint(1, 3),
        "coordinator_pauses": rng.randint(1, 2),
        "false_takeovers": rng.randint(0, 2),
        "power_losses": rng.randint(1, 2),
        "full_times": rng.randint(1, 2),
        "store_errors": rng.uniform(0.0, 0.02),
        "sync_errors": rng.uniform(0.0, 0.05),
        "flips": rng.uniform(0.0, 0.1),
        "splits": rng.uniform(0.0, 0.3),
        "new_limits": True,
        "slow_store": True,
    }
    return {name: strength for name, strength in strengths.items() if rng.random() < FAULT_PROBABILITY}


def draw_snapshots(seed: int) -> dict[str, int]:
    """How often there is a snapshot, and how small the segments of the log are."""
    rng = random.Random(f"headrace {seed} snapshots")
    return {
        "snapshot_interval_us": rng.choice((1_000, 20_000, 100_000, 10_000_000)),
        "snapshots_kept": rng.choice((1, 2, 3)),
        "segment_bytes_max": rng.choice((1, 2_000, 20_000, 64 << 20)),
    }


def draw_late(seed: int) -> tuple[dict[str, int], int]:
    """A firing that aborted is dropped an epoch later: in some runs that takes a while, and the coordinator crashes
    with a snapshot just between the two. Returns limits, and how many crashes."""
    rng = random.Random(f"headrace {seed} late")
    limits = {"epoch_interval_us": rng.choice((5_000, 30_000)), "snapshot_interval_us": 1_000}
    crashes = rng.randint(1, 4)
    return (limits, crashes) if rng.random() < FAULT_PROBABILITY else ({}, 0)


def draw_changes(seed: int, store: str) -> float:
    """The share of operators that log their changes; without a store none can."""
    drawn = random.Random(f"headrace {seed} changelog").choice((0.0, 0.6, 1.0, 1.0))
    return drawn if store != "none" else 0.0


def draw(seed: int) -> Parameters:
    rng = random.Random(f"headrace {seed} parameters")

    def maybe(strength: Any, otherwise: Any = 0) -> Any:
        """`strength` is drawn in any case, so that later draws stay the same."""
        return strength if rng.random() < FAULT_PROBABILITY else otherwise

    faults = Faults(
        loss=maybe(rng.uniform(0.0, 0.3), 0.0),
        duplication=maybe(rng.uniform(0.0, 0.5), 0.0),
        tail=maybe(rng.uniform(0.0, 0.3), 0.0),
        reordering=maybe(True, False),
        echoes=maybe(rng.randint(1, 20)),
        silences=maybe(rng.randint(1, 3)),
        partitions=maybe(rng.randint(1, 3)),
        crashes=maybe(rng.randint(1, 3)),
        crash_again=maybe(rng.uniform(0.0, 0.5), 0.0),
        pauses=maybe(rng.randint(1, 3)),
        false_alarms=maybe(rng.randint(0, 2)),
        clocks=maybe(True, False),
        client_loss=maybe(rng.uniform(0.0, 0.3), 0.0),
        impatience=maybe(True, False),
        rescales=maybe(rng.randint(1, 3)),
        reads=maybe(rng.randint(1, 4)),
        misbehaviour=maybe(True, False),
    )
    store, is_engine = draw_store(seed)
    if store != "none":
        faults = dataclasses.replace(faults, **draw_durable(seed))
    if rng.random() < 0.1:
        faults = Faults()  # a run without faults
    limits: dict[str, int] = {
        "epoch_transactions_max": rng.choice((4, 10, 1000)),
        "epoch_interval_us": rng.choice((0, 0, 500, 5_000)),
        "resend_us": rng.choice((5_000, 20_000, 50_000)),
        "silence_us_max": rng.choice((40_000, 150_000)),
        "wall_limit_us": rng.choice((20_000, 100_000)),
        "shards": rng.choice((8, 64)),
        "predict_after_runs": rng.choice((1, 2, 5, 16)),
    }
    chosen = {name: rng.choice(values) for name, values in TINY.items()}
    tiny = tuple(name for name in TINY if rng.random() < 0.25)
    limits |= {name: chosen[name] for name in tiny} | draw_snapshots(seed)
    mode, workers = rng.choice(MODES), rng.choice((1, 2, 2, 3, 3, 4, 5))
    if is_engine:
        faults = dataclasses.replace(faults, rescales=0)
    workload = draw_workload(seed, store, rng.choice(WORKLOADS))
    workload = "versions" if draw_versions(seed, store) else workload
    if workload == "outside" and faults != Faults():
        late, crashes = draw_late(seed)
        limits, faults = limits | late, dataclasses.replace(faults, snapshot_crashes=crashes)
    return Parameters(
        seed=seed,
        workload=workload,
        transactions=draw_transactions(seed, workload, rng.randint(20, 80), faults.misbehaviour),
        clients=rng.randint(1, 4),
        workers=0 if is_engine else 1 if mode == "serial" else min(workers, limits["shards"]),
        mode=mode,
        chaos_us=max(rng.choice((50_000, 200_000, 500_000)), 1_000_000 if faults.snapshot_crashes else 0),
        delay_us=rng.choice((50, 200, 1_000)),
        store=store,
        config=Config(**limits),
        faults=faults,
        tiny=tiny,
        changes=draw_changes(seed, store),
    )
