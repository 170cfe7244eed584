"""The configuration: every limit and every interval, each with its unit in its name.

Limits that can change a result (`*_max` of calls, depth, bytes) count something. Only `wall_limit_us` measures time,
and its decisions become part of the log.
"""

from __future__ import annotations

import dataclasses

from headrace.errors import ConfigError

MAY_BE_ZERO = (
    "epoch_interval_us",
    "reply_interval_us",
    "report_delay_us",
    "request_id_retention_us",
    "request_ids_max",
)
LIMITS = ("calls_max", "depth_max", "transaction_bytes_max", "value_bytes_max", "value_depth_max", "key_bytes_max")


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    # An epoch closes when it has this many transactions, or this long after its first one. With an interval of 0 it
    # closes as soon as all waiting requests have been taken: while one epoch runs, requests collect for the next one.
    epoch_transactions_max: int = 1_000
    epoch_interval_us: int = 0
    epoch_bytes_max: int = 16 << 20  # of arguments that are not small; one call may exceed it

    # One transaction.
    calls_max: int = 10_000
    depth_max: int = 256
    transaction_bytes_max: int = 64 << 20

    # One value (state, all arguments of one call, result) and one key.
    value_bytes_max: int = 1 << 20
    value_depth_max: int = 64
    key_bytes_max: int = 512
    request_id_bytes_max: int = 256

    # What is kept to answer a repeated request id: at most this many transactions, for this long.
    request_ids_max: int = 250_000
    request_id_retention_us: int = 600_000_000

    # Number of sources, such as streaming queries, whose last batch is remembered.
    sources_max: int = 1_000

    # Back-pressure: transactions taken from clients and not answered yet.
    pending_transactions_max: int = 1_000_000

    # Placement: the key space is divided into this many shards, fixed when a store is created.
    shards: int = 64

    # Epochs that run at the same time: the next one starts while the last one settles.
    epochs_in_flight_max: int = 2

    # Between nodes: when an unacknowledged frame is sent again, how many frames at once, and entities per frame.
    resend_us: int = 1_000_000
    window_frames_max: int = 64
    entities_per_frame_max: int = 10_000

    # Limits what a recovery replays: after this many transactions the coordinator takes a copy of all state.
    replay_transactions_max: int = 200_000

    # With a store: how often a snapshot is taken (also after `replay_transactions_max`), how many are kept, how long
    # replies are kept, the least time between two writes of replies (streams of replies see them no sooner), and how
    # large a segment of the log grows.
    snapshot_interval_us: int = 10_000_000
    snapshots_kept: int = 3
    reply_retention_us: int = 3_600_000_000
    reply_interval_us: int = 50_000
    segment_bytes_max: int = 64 << 20

    # A worker whose calls wait for answers reports that it is idle only after this long.
    report_delay_us: int = 2_000

    # Calls that a worker runs before it looks at its messages again.
    slice_calls_max: int = 500

    # A function's calls are predicted after this many runs that made the same calls.
    predict_after_runs: int = 16

    # A transaction whose functions take longer than this is stopped, on workers together with the worker, and aborts by
    # decree.
    wall_limit_us: int = 10_000_000

    # A worker that is silent for this long is considered lost.
    silence_us_max: int = 5_000_000

    def __post_init__(self) -> None:
        self.validate()

    def limits(self) -> dict[str, int]:
        """The limits that can change a result: they are part of the log."""
        return {name: getattr(self, name) for name in LIMITS}

    def validate(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int:
                raise ConfigError(f"{field.name} is {value!r}; it must be an int")
            least = 0 if field.name in MAY_BE_ZERO else 1
            if not least <= value < 1 << 62:
                raise ConfigError(f"{field.name} is {value}; it must be between {least} and 2**62")
        if self.value_depth_max > 200:
            raise ConfigError(f"value_depth_max is {self.value_depth_max}; it must be at most 200")
        if self.reply_retention_us < self.request_id_retention_us:
            raise ConfigError("reply_retention_us must be at least request_id_retention_us: an id's reply must be kept")
