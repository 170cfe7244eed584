"""Events and effects: everything that enters the core, and everything that leaves it.

A step takes one event and returns effects, in the order in which the driver carries them out. The engine, the
coordinator and the worker each have a table that maps an event to the method that handles it.

An effect that shows something to the outside leaves only when what it follows from is durable:

    Answer            the epoch's record, and every decree and response logged so far
    ReadResult        the same, and a `Check` that no other engine has taken over the log
    Perform           the record of the epoch, or of the intent, that wants the call
    Keep, Save        the records of the epochs that they cover
    SnapshotTaken     the snapshot itself

All other effects may leave at once. `Journal.covers` says whether a record is durable, with every decree and response
so far. `Engine._answer` and `Engine._perform` hold back answers, reads and external calls until it does; the journal
itself holds back `Keep`, `Save` and `SnapshotTaken`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace.core.epoch import Batch, Epoch
from headrace.core.epoch_changes import Changes
from headrace.core.log_records import Record
from headrace.core.snapshot_metadata import SnapshotMetadata
from headrace.errors import HeadraceError
from headrace.wire.messages import Answers, Entities, Failure, Frame

# --- events from clients ----------------------------------------------------------------------------------------------


class Submit(NamedTuple):
    """Batches of admitted calls, from clients and sources. Each token comes back with its batch's answers."""

    batches: list[tuple[Any, Batch]]


class Read(NamedTuple):
    """Read state as it is between two epochs: of all operators or one, of all keys or one; or that of some entities,
    each an operator and a key."""

    token: Any
    operator: str | None = None
    key: Any = None
    places: list[tuple[str, Any]] | None = None


class TakeSnapshot(NamedTuple):
    """Take a snapshot now. `SnapshotTaken` comes back when it is durable."""

    token: Any


class Rescale(NamedTuple):
    """Change the number of workers. `Rescaled` comes back."""

    token: Any
    workers: int


# --- effects for clients ----------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """Every row of a submission is final."""

    token: Any
    answers: Answers


class Refuse(NamedTuple):
    """The whole request fails with this error. None of its calls was logged."""

    token: Any
    error: HeadraceError


class ReadResult(NamedTuple):
    """The answer to `Read`."""

    token: Any
    entities: Entities


class SnapshotTaken(NamedTuple):
    """The answer to `TakeSnapshot`."""

    token: Any
    epoch: int


class Rescaled(NamedTuple):
    """The answer to `Rescale`."""

    token: Any
    workers: int
    moved: int  # shards


# --- for the people who run it ----------------------------------------------------------------------------------------


class FailedRun(NamedTuple):
    """A transaction whose function raised something other than `Abort`, with its trace."""

    request_id: str
    tid: int
    epoch: int
    failure: Failure


class LogFailures(NamedTuple):
    """An effect: write these to the log of the process. They are final, and no replay reports them again."""

    runs: list[FailedRun]
    more: dict[tuple[str, str], int]  # how many others there were, by function and place


# --- time -------------------------------------------------------------------------------------------------------------


class Tick(NamedTuple):
    """An event: the time that `SetTimer` asked for has come."""


class SetTimer(NamedTuple):
    """An effect: send a `Tick` at this time, unless another event comes first."""

    at_us: int


# --- external calls ---------------------------------------------------------------------------------------------------


class Perform(NamedTuple):
    """An effect: call an external system. `Responded` comes back, after all tries."""

    call: str  # also the idempotency key
    name: str
    args: tuple[Any, ...]


class Responded(NamedTuple):
    """An event: an external call gave a result, or failed."""

    call: str
    result: Any = None
    failure: str | None = None


# --- durability -------------------------------------------------------------------------------------------------------


class Append(NamedTuple):
    """An effect: write this record to the log. `Appended` comes back when it is durable."""

    number: int
    record: Record


class Appended(NamedTuple):
    """An event: all records up to this one are durable."""

    number: int


class Check(NamedTuple):
    """An effect: make sure that no other engine has taken over the log. `Checked` comes back, or this engine is
    stopped."""

    ticket: int


class Checked(NamedTuple):
    """An event: the log was still this engine's when `Check` was carried out."""

    ticket: int


class Keep(NamedTuple):
    """An effect: the epoch is final. Keep its replies, and what it changed if that is logged."""

    epoch: Epoch
    changes: Changes | None = None


Delta = Entities | dict[str, dict[Any, Any]]  # rows, or tables by operator; a deleted entity has the state MISSING


class Snapshot(NamedTuple):
    """The state at the end of an epoch, as the changes since the last snapshot, and all else that the next
    epoch depends on."""

    epoch: int
    position: int  # the first record of the log that a recovery has to read
    delta: Delta
    metadata: SnapshotMetadata
    is_full: bool = False  # it replaces all earlier ones


class Save(NamedTuple):
    """An effect: write this snapshot. `Saved` or `SaveFailed` comes back."""

    snapshot: Snapshot


class Saved(NamedTuple):
    """An event: the snapshot is durable."""

    epoch: int
    oldest: int = 0  # the epoch of the oldest snapshot to keep


class SaveFailed(NamedTuple):
    """An event: the snapshot could not be written. The engine continues; the log is kept for longer."""

    epoch: int
    error: HeadraceError


class Broken(NamedTuple):
    """For the driver: nothing more can be made durable, so it stops."""

    error: BaseException


# --- the network and the workers --------------------------------------------------------------------------------------


class Received(NamedTuple):
    """An event: a frame has come from the network."""

    frame: Frame


class Send(NamedTuple):
    """An effect: hand a frame to the network. It may be lost, duplicated or late."""

    frame: Frame


class Start(NamedTuple):
    """An effect: start a new worker with this number; stop the old one first, if any. It begins with this term: frames
    of older terms, meant for its predecessor, may still be under way."""

    worker: int
    term: int


class Stop(NamedTuple):
    """An effect: this worker is no longer needed."""

    worker: int


class Lost(NamedTuple):
    """An event: a worker is gone."""

    worker: int


class Overran(NamedTuple):
    """An event: a worker was stopped because a function of this transaction did not return."""

    worker: int
    tid: int


JournalEffect = Append | Check | Keep | Save | SnapshotTaken
StoreEvent = Appended | Checked | Saved | SaveFailed
EngineEvent = Submit | Tick | Read | TakeSnapshot | Responded | StoreEvent
EngineEffect = Answer | Refuse | ReadResult | Perform | SetTimer | LogFailures | JournalEffect
CoordinatorEvent = EngineEvent | Received | Lost | Overran | Rescale
CoordinatorEffect = EngineEffect | Send | Start | Stop | Rescaled
WorkerEvent = Received | Tick
WorkerEffect = Send | SetTimer
