"""The messages, as frozen structs. Columns, not rows: a message carries a batch, and its cost is paid once per
batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import add
from typing import Any

import msgspec

from headrace.wire.values import size_of

PART_BYTES_MAX = 16 << 20  # of large values in one message; more if a single value is larger

RequestIds = str | list[str]
"""The ids of a batch's rows: each its own, or a stem, and then row 7 of stem "x" has the id "x/7"."""


def id_of(ids: RequestIds, row: int) -> str:
    return f"{ids}/{row}" if isinstance(ids, str) else ids[row]


class TracedError(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An exception and the frames that it passed, outermost first: file, line, function. A frame without a file says
    how many were left out."""

    type: str
    message: str
    frames: list[tuple[str, int, str]]


class Failure(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Why there is no result. `code` is for programs, `type` and `message` are the exception's, `function` and `key`
    say where it was raised (None if nothing ran), `where` is the file and the line in the app's own code (None for the
    app's own `Abort`). `trace` is for the log: the engine takes it out before a failure is stored or sent to a
    client."""

    code: str
    type: str
    message: str
    function: str | None = None
    key: Any = None
    where: str | None = None
    trace: list[TracedError] | None = None


class Calls(msgspec.Struct, frozen=True, tag="calls", forbid_unknown_fields=True, omit_defaults=True):
    """A client's batch: column i of each list is one call. `args` are encoded tuples; the last ones of a call have its
    `names`. If no call has any, the list is empty."""

    ids: RequestIds
    functions: list[str]
    keys: list[Any]
    args: list[bytes]
    names: list[list[str]] = []


class Answers(msgspec.Struct, frozen=True, tag="answers", forbid_unknown_fields=True):
    """The replies to one `Calls`, in its order. A result is a sealed value; a failure is stored under its row's number.
    A row without a TID was refused: it was never logged and changed nothing."""

    ids: RequestIds
    tids: Sequence[int | None]
    epochs: list[int | None]
    results: list[Any]
    failures: dict[int, Failure]


def with_refused(answers: Answers, ids: RequestIds, refused: dict[int, Failure]) -> Answers:
    """The answers with the rows inserted again that were refused before the others were sent."""
    if not refused:
        return answers
    places = range(len(answers.tids) + len(refused))
    rows = [at for at in places if at not in refused]
    failures = {rows[at]: failure for at, failure in answers.failures.items()} | refused

    def spread(column: Sequence[Any]) -> list[Any]:
        values: list[Any] = [None] * len(places)
        for at, value in zip(rows, column, strict=True):
            values[at] = value
        return values

    return Answers(ids, spread(answers.tids), spread(answers.epochs), spread(answers.results), failures)


class Refusal(msgspec.Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    """The whole message was refused."""

    failure: Failure


Message = Calls | Answers | Refusal

# --- between the coordinator (0) and the workers (1, 2, ...) ----------------------------------------------------------

Entities = list[tuple[str, Any, Any]]
"""State on its way: (operator, key, sealed value)."""


class Begin(msgspec.Struct, frozen=True, tag="begin", forbid_unknown_fields=True):
    """A term begins: everything that a worker had is void. `entities` are those of its shards, in parts of bounded
    size; the worker continues once it has the last part."""

    owners: list[int]  # shard -> worker
    version: int
    workers: int
    entities: Entities
    is_last: bool = True
    seed: int = 0  # the app's seed: what functions draw follows from it
    watched: list[str] = []  # operators whose changes in epochs are to be reported
    has_digests: bool = False  # whether digests of what epochs write are to be reported


class Run(msgspec.Struct, frozen=True, tag="run", forbid_unknown_fields=True):
    """An epoch, in columns; every worker gets all of it and picks its own rows. Its TIDs are a range."""

    epoch: int
    mode: str
    tids: tuple[int, int, int]  # start, stop, step
    functions: list[int] | int  # numbers of the program's entries; one number if all are the same
    keys: list[Any]
    args: list[tuple[Any, ...]]
    predicted: list[Any] | None  # the call graphs learned so far, if there are new ones: see core/ordered/prediction.py
    poisoned: list[int]  # TIDs that must abort
    suspects: list[int]  # TIDs that are gathered, without being tried
    is_lone: bool = False  # one transaction, sent only to its root's worker: settled by shares
    time_us: int = 0  # the epoch's
    limits: dict[str, int] | None = None  # those of the log, if they are not the present ones
    stored: list[tuple[bytes, int, int]] | None = None  # instead of functions, keys and args: see `Epoch.stored`


class Final(msgspec.Struct, frozen=True, tag="final", forbid_unknown_fields=True):
    """The epoch is settled: nothing in it changes any more."""

    epoch: int


class Response(msgspec.Struct, frozen=True, tag="response"):
    """The response to an external call of a transaction: a sealed result, or the message of its failure. Also a record
    of the log."""

    tid: int
    call: str
    result: Any = None
    failure: str | None = None


class Need(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An external call that a transaction waits for. It continues once the response is there."""

    tid: int
    call: str  # also the idempotency key
    name: str
    args: bytes  # an encoded tuple


class Respond(msgspec.Struct, frozen=True, tag="respond", forbid_unknown_fields=True):
    """The responses to the external calls that this transaction has made so far: it continues."""

    epoch: int
    tid: int
    responses: list[Response]


class Gather(msgspec.Struct, frozen=True, tag="gather", forbid_unknown_fields=True):
    """Everything below `first` is final: `worker` runs the TIDs from there to `last`, with the state that the others
    lend."""

    epoch: int
    first: int
    last: int
    worker: int
    lenders: list[int]
    share: int | None = None  # of a lone epoch


class Gathered(msgspec.Struct, frozen=True, tag="gathered", forbid_unknown_fields=True):
    """Outcomes of gathered transactions, from this TID on: they are final."""

    epoch: int
    first: int
    results: list[Any]
    failures: dict[int, Failure]  # by TID


class Idle(msgspec.Struct, frozen=True, tag="idle", forbid_unknown_fields=True):
    """A worker has nothing to do for an epoch: what it has sent and received on each channel so far (0 is the
    coordinator), and the outcome of the transactions whose roots it owns. Void as soon as it receives more."""

    epoch: int
    sent: list[int]
    received: list[int]
    results: list[Any]
    failures: dict[int, Failure]  # by TID
    suspects: list[int]  # TIDs that are to be gathered
    stats: dict[str, int]
    learned: list[Any]  # call graphs that may be predicted
    shares: list[int] | None = None  # of a lone epoch: 2^-share is returned, for each of them
    needs: list[Need] = []  # external calls that must be answered before it continues
    later: list[tuple[Any, Any]] = []  # entities of the operator `headrace` that the epoch changed: key, sealed state
    held: list[int] = []  # the suspects whose repairs did not end
    late: int = 0  # entities that the gathering worker had to ask for while it ran
    digest: bytes | int | None = None  # of what the epoch wrote here: see core/digests.py; an int is a sum


ChangedColumns = tuple[str, list[Any], list[Any], list[Any]]
"""What changed of an operator: its name, the keys, the states before and those after."""


class Changed(msgspec.Struct, frozen=True, tag="changed", forbid_unknown_fields=True):
    """What a final epoch changed on a worker's shards: per operator the keys, the states before and those after,
    MISSING where there was none; in parts of bounded size."""

    epoch: int
    changes: list[ChangedColumns]
    is_last: bool = True


class Results(msgspec.Struct, frozen=True, tag="results", forbid_unknown_fields=True):
    """The first of the results that an `Idle` will bring, if they are too many bytes for one message."""

    epoch: int
    results: list[Any]


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Something that one worker tells another about a transaction."""

    tid: int


class Made(Row, frozen=True, tag=0):
    """A call was made, or is made again with other arguments. If it is awaited, the first `caller_size` bytes of its
    place are the caller's; `attempt` distinguishes its answer from those to earlier tries."""

    place: bytes
    function: int
    key: Any
    args: tuple[Any, ...]
    caller_size: int
    depth: int
    attempt: int


class Cancelled(Row, frozen=True, tag=1):
    """A call was not made after all."""

    place: bytes


class Answered(Row, frozen=True, tag=2):
    """The call at `place` has the answer to the call with this number."""

    place: bytes
    number: int
    attempt: int
    result: Any


class AnsweredAll(Row, frozen=True, tag=10):
    """The roots of these transactions, `tid` and others, have the answers to their predicted calls with this number."""

    number: int
    tids: list[int]
    results: list[Any]


class Failed(Row, frozen=True, tag=3):
    place: bytes
    failure: Failure


class Mended(Row, frozen=True, tag=4):
    """What failed at this place no longer fails."""

    place: bytes


class TransactionAborted(Row, frozen=True, tag=5):
    """To all workers, from the root's worker: no other transaction sees this transaction's writes."""


class TransactionRevived(Row, frozen=True, tag=6):
    pass


class Lent(Row, frozen=True, tag=7):
    """State for the stretch that begins with this TID, as it is below the TID; in parts of bounded size."""

    entities: Entities
    is_last: bool = True


class LendRequest(Row, frozen=True, tag=8):
    """A request for the state of these entities, (operator, key), below this TID."""

    entities: list[tuple[str, Any]]


class Installed(Row, frozen=True, tag=9):
    """What a stretch that ends with this TID has changed, in parts of bounded size; the last part ends it."""

    entities: Entities
    is_last: bool = True


StretchRows = Lent | LendRequest | Installed
STATE_ROWS = frozenset((Lent, Installed))
Rows = (
    Made | Cancelled | Answered | AnsweredAll | Failed | Mended | TransactionAborted | TransactionRevived | StretchRows
)


class Traffic(msgspec.Struct, frozen=True, tag="traffic", forbid_unknown_fields=True):
    """What one worker tells another about an epoch's transactions: rows in the order in which they happened."""

    epoch: int
    rows: list[Rows]
    share: int | None = None  # of a lone epoch: 2^-share is passed on
    lone: tuple[int, int, int] | None = None  # and its TID, its root's worker and the epoch's time


class Show(msgspec.Struct, frozen=True, tag="show", forbid_unknown_fields=True):
    """Between two epochs: send state, of all operators or of one, of all keys or of one; or of these places, each an
    operator and a key; or what changed since the last such request (or since the term began), with the state MISSING
    where it was deleted."""

    token: int
    operator: str | None = None
    key: Any = None
    is_delta: bool = False
    places: list[tuple[str, Any]] | None = None


class Shown(msgspec.Struct, frozen=True, tag="shown", forbid_unknown_fields=True):
    token: int
    entities: Entities
    is_last: bool = True


Body = Begin | Run | Final | Gather | Gathered | Respond | Idle | Results | Changed | Traffic | Show | Shown


class Frame(msgspec.Struct, frozen=True, tag="frame", forbid_unknown_fields=True):
    """A message on a channel: number `sequence` of this term from `source` to `to`, and how many arrived in order in
    the other direction. Without a body it is only the acknowledgement."""

    term: int
    source: int
    to: int
    sequence: int
    acknowledged: int
    body: Body | None = None


def in_pieces(rows: list[Any], size: int) -> list[list[Any]]:
    """Messages of bounded size for another worker. `size` is the size of the large values in the epoch. Of state that
    is lent or given back, each part but the last ends a message."""
    if size < PART_BYTES_MAX and STATE_ROWS.isdisjoint(map(type, rows)):
        return [rows]
    pieces: list[list[Any]] = [[]]
    room = PART_BYTES_MAX
    for row in rows:
        weight = weight_of(row)
        if room < weight and pieces[-1]:
            pieces.append([])
            room = PART_BYTES_MAX
        pieces[-1].append(row)
        room = room - weight if type(row) not in STATE_ROWS or row.is_last else -1
    return pieces


def weight_of(row: Rows) -> int:
    """The bytes of the large values in a row."""
    if isinstance(row, Made):
        return sum(map(size_of, row.args))
    if isinstance(row, Answered):
        return size_of(row.result)
    return sum(size_of(state) for _, _, state in row.entities) if isinstance(row, Lent | Installed) else 0


def in_parts(entities: Entities, count_max: int) -> list[tuple[Entities, bool]]:
    """Split for sending, by number and by size: at least one part, the last one marked."""
    parts: list[Entities] = [[]]
    room = PART_BYTES_MAX
    for entity in entities:
        room -= size_of(entity[2])
        if len(parts[-1]) >= count_max or room < 0:
            parts.append([])
            room = PART_BYTES_MAX - size_of(entity[2])
        parts[-1].append(entity)
    return [(part, part is parts[-1]) for part in parts]


def changes_in_parts(changes: list[ChangedColumns], count_max: int) -> list[tuple[list[ChangedColumns], bool]]:
    """The same for the changes of an epoch."""
    parts: list[list[ChangedColumns]] = [[]]
    rows, room = 0, PART_BYTES_MAX
    for operator, keys, befores, afters in changes:
        at = 0
        for end, size in enumerate(sizes_of(befores, afters)):
            rows, room = rows + 1, room - size
            if rows > count_max or (room < 0 and rows > 1):
                parts[-1].append((operator, keys[at:end], befores[at:end], afters[at:end]))
                parts.append([])
                at, rows, room = end, 1, PART_BYTES_MAX - size
        parts[-1].append((operator, keys[at:], befores[at:], afters[at:]))
    return [(part, part is parts[-1]) for part in parts]


def has_large(values: list[Any]) -> bool:
    """Whether any of these sealed values may have many bytes."""
    return not {str, bytes}.isdisjoint(map(type, values))


def sizes_of(befores: list[Any], afters: list[Any]) -> Iterable[int]:
    """The bytes of each pair of states."""
    if not has_large(befores) and not has_large(afters):
        return repeat(0, len(befores))
    return map(add, map(size_of, befores), map(size_of, afters))
