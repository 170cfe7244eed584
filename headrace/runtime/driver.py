"""What all runtimes have in common: clients submit batches, one thread drives the core, and replies come back as
futures.

Only this thread changes the core (other threads read its program, its counters and the last batch of a source), so a
Ctrl-C, a slow client or a cancelled task never interrupts a transaction.
Clients submit their batches through a queue. One step takes the batches that wait there (at most `BATCHES_MAX`), so
epochs grow with the load.

With a store there is a `Keeper` (durability/keeper.py): it carries out the effects that write to the store and reports
back through the same queue. There is also an `Intake` (intake.py), a client like any other: it submits the batches that
sources have put into the store.

`Runtime` (inprocess.py) drives an engine in this process, `Cluster` (cluster.py) a coordinator and its workers.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, overload

from headrace.config import Config
from headrace.core.admission import Admission
from headrace.core.epoch import Batch
from headrace.core.events import (
    Answer,
    Append,
    Broken,
    Check,
    Keep,
    LogFailures,
    Perform,
    Read,
    ReadResult,
    Refuse,
    Save,
    SetTimer,
    SnapshotTaken,
    TakeSnapshot,
    Tick,
)
from headrace.core.origin import FromClient, FromSource
from headrace.core.signature import Args
from headrace.errors import BadCall, BadRequest, Overloaded, Stopped, StreamError, TooLarge, UnknownFunction
from headrace.model.app import App
from headrace.model.operator import Function, Operator
from headrace.model.type_variables import Default, S
from headrace.runtime.client import Client, Replies
from headrace.runtime.clock import Clock, system_clock
from headrace.runtime.externals import Externals
from headrace.runtime.failure_log import FailureLog
from headrace.wire.messages import Answers, Entities, RequestIds
from headrace.wire.values import shown

if TYPE_CHECKING:
    from headrace.durability.keeper import Keeper
    from headrace.durability.recovery import OpenedStore
    from headrace.durability.store import Store
    from headrace.runtime.intake import Intake

QueueItem = tuple[Future[Any] | None, Any]  # without a future it is a report from the keeper
BATCHES_MAX = 1_000  # batches taken into one step
PATIENCE_S_MAX = 3_600.0
DRAIN_S = 0.005  # between two checks


class GivenUp(BaseException):
    """A signal for the driver's thread: another thread has ended the runtime meanwhile."""


class Driver(ABC):
    """One core, one thread that drives it, any number of clients. A subclass provides the source of events, carries out
    its own kinds of effects, and calls `_begin` when it is set up."""

    # Which method carries out an effect.
    EFFECTS: ClassVar[dict[type, str]] = {
        SetTimer: "_set_timer",
        Answer: "_give_answers",
        Refuse: "_give_refusal",
        ReadResult: "_give_state",
        SnapshotTaken: "_give_epoch",
        Perform: "_perform",
        LogFailures: "_log_failures",
        Append: "_make_durable",
        Check: "_make_durable",
        Keep: "_make_durable",
        Save: "_make_durable",
    }

    def __init__(
        self, app: App, config: Config, core: Any, clock: Clock | None, opened: OpenedStore | None = None
    ) -> None:
        self.app, self.config, self._clock = app, config, clock or system_clock()
        self.engine = core  # for clients: its `program` knows the functions and the values
        self.admission = Admission(core.program)
        self.client = LocalClient(self)
        self._queue: queue.SimpleQueue[QueueItem | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._pending = 0
        self._unanswered: dict[Future[Any], None] = {}
        self._broken: BaseException | None = None
        self._closed = False
        self._ended = threading.Event()  # nothing is left to do, normally or by an error
        self._keeper: Keeper | None = None
        self._intake: Intake | None = None
        self.store_url: str | None = None
        if opened is not None:
            from headrace.durability.keeper import Keeper
            from headrace.durability.store import address_of

            self.store_url = address_of(opened.store)
            self._keeper = Keeper(opened, self._tell)
        name = secrets.token_hex(8) if opened is None else str(opened.identity["cluster"])
        self._externals = Externals(app, core.program.values, name, self._tell)
        self._failure_log = FailureLog()
        self._timer_us: int | None = None
        self._thread = threading.Thread(target=self._serve, name=f"headrace-{app.name}", daemon=True)

    def _begin(self) -> None:
        self._thread.start()
        if self._keeper is not None:
            from headrace.runtime.intake import InboxReader, Intake

            store, last_of = self._keeper.store_work.opened_store.store, self.engine.sources.last_of
            self._intake = Intake(InboxReader(store, self.admission, self.submit, last_of, self._check_log))

    # --- for clients ---

    def submit(self, batch: Batch, wait: bool = True) -> Future[Answers]:
        """Submit admitted calls. The future has their answers."""
        rows, limit = len(batch), self.config.pending_transactions_max
        is_source = isinstance(batch.origin, FromSource)
        if is_source:
            limit = max(limit, rows)  # it cannot be split: it waits until nothing else is pending
        if rows > limit:
            raise TooLarge(
                f"a batch of {rows} calls is over the limit of {limit} pending calls (pending_transactions_max): send "
                "smaller batches"
            )
        if not is_source and 0 < self.config.request_ids_max < rows:
            kept = self.config.request_ids_max
            raise TooLarge(
                f"a batch of {rows} calls, but only {kept} request ids are kept (request_ids_max): send smaller batches"
            )
        with self._room:
            self._check_alive()
            while self._pending + rows > limit:
                if not wait:
                    raise Overloaded(
                        f"{self._pending} transactions are waiting, the limit is {limit} (pending_transactions_max)"
                    )
                self._room.wait()
                self._check_alive()
            self._pending += rows
            future = self._hand_over(batch)
        future.add_done_callback(lambda _: self._release(rows))
        return future

    @overload
    def state(self, operator: Operator[S]) -> dict[Any, S]: ...
    @overload
    def state(self, operator: str) -> dict[Any, Any]: ...
    def state(self, operator: Operator | str) -> dict[Any, Any]:
        """All entities of an operator, key and state, as they are between two epochs."""
        name, unseal = self._name_of(operator), self.engine.program.values.unseal
        return {key: unseal(value) for _, key, value in self._ask(lambda token: Read(token, name, None))}

    @overload
    def get(self, operator: Operator[S], key: Any) -> S | None: ...
    @overload
    def get(self, operator: Operator[S], key: Any, default: Default) -> S | Default: ...
    @overload
    def get(self, operator: str, key: Any, default: Any = None) -> Any: ...
    def get(self, operator: Operator | str, key: Any, default: Any = None) -> Any:
        """The state of one entity."""
        place = self.place_of(operator, key)
        found = self.read([place]).result()
        return self.engine.program.values.unseal(found[0][2]) if found else default

    def place_of(self, operator: Operator | str, key: Any) -> tuple[str, Any]:
        """An entity that may be read: its operator and key."""
        name = self._name_of(operator)
        self.engine.program.check_key(key)
        return name, key

    def read(self, places: Sequence[tuple[str, Any]]) -> Future[Entities]:
        """The states of these entities at one moment, between two epochs: (operator, key, sealed state) of those that
        exist."""
        with self._room:
            self._check_alive()
            return self._hand_over(lambda token: Read(token, places=list(places)))

    def snapshot(self) -> dict[str, Any]:
        """Make a snapshot now. Returns its epoch."""
        if self._keeper is None:
            raise BadRequest("this app has no store, so it cannot take snapshots: start it with --store")
        return {"epoch": self._ask(TakeSnapshot)}

    def drain(self, timeout_s: float = PATIENCE_S_MAX) -> None:
        """Wait until everything that sources have put into the store's inbox has run."""
        if self._keeper is None:
            return
        from headrace.durability.inbox.inbox import check_held, waiting

        store, until_s = self._keeper.store_work.opened_store.store, time.monotonic() + timeout_s
        while batches := waiting(store):
            self._check_alive()
            check_held(store, batches[0])
            if time.monotonic() > until_s:
                raise StreamError(f"batches of sources are still waiting after {timeout_s:g} s")
            time.sleep(DRAIN_S)

    def wait(self) -> None:
        """Wait until the runtime is closed. If it stopped by itself, raise the error that stopped it."""
        self._ended.wait()
        if self._broken is not None:
            raise self._broken

    def health(self) -> dict[str, Any]:
        """Whether requests are answered: the "status" is "ok", or says what is wrong."""
        if self._broken is not None:
            return {"status": "stopped", "error": str(self._broken) or repr(self._broken)}
        return {"status": "closing" if self._closed else "ok"}

    @abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Counters for people and dashboards."""

    def rescale(self, workers: int) -> int:
        """Change the number of workers, between two epochs. Returns how many shards moved."""
        raise BadRequest(
            "this app runs in one process and cannot be rescaled: start it with --workers 2, or use a Cluster"
        )

    def close(self, patience_s: float | None = None) -> None:
        """Finish what was submitted, then stop. With `patience_s`, a function that runs for longer than that is not
        waited for."""
        if threading.current_thread() is self._thread:
            raise BadCall("a function cannot close its own runtime")
        with self._room:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
                self._wake()
            self._room.notify_all()
        self._wait_for_end(patience_s)
        if self._intake is not None:
            self._intake.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for subclasses ---

    def _wait_for_end(self, patience_s: float | None) -> None:
        self._ended.wait()

    def _open(self) -> None:
        """Called at the start of the thread."""
        self._follow(self.engine.start(self._clock()))

    @abstractmethod
    def _serve_once(self) -> bool:
        """Wait for an event and handle it. Returns False once the runtime is closed."""

    def _settle(self) -> None:
        """The runtime is closed: finish what was submitted, without waiting for the epoch interval. With a store, end
        with a snapshot, so that the next start has nothing to replay and may use changed code."""
        clock, interval_us = self._clock, self.config.epoch_interval_us
        self._clock = lambda: clock() + interval_us  # an epoch that waits for its interval closes now
        self._step(Tick())
        while self._unanswered:
            self._serve_once()
        if self._keeper is not None:
            last: Future[Any] = Future()
            self._unanswered[last] = None
            self._step(TakeSnapshot(last))
            while self._unanswered:
                self._serve_once()

    def _wake(self) -> None:  # noqa: B027 most subclasses need neither of these two
        """Something was put into the queue: wake the thread if it waits elsewhere."""

    def _clean_up(self) -> None:  # noqa: B027
        """The thread ends, normally or with an error: release its resources."""

    def _handle_report(self, news: Any) -> None:
        """Handle a report from the keeper."""
        if isinstance(news, Broken):
            raise news.error
        self._step(news)

    def _journal_metrics(self) -> dict[str, Any]:
        journal = self.engine.journal
        if not journal.is_durable:
            return {"is_durable": False}
        return {
            "is_durable": True,
            "records": journal.last,
            "records_durable": journal.durable,
            "snapshot_epoch": journal.saved_epoch,
            "transactions_to_replay": journal.transactions,
            **({} if self._intake is None else self._intake.metrics()),
        }

    def _name_of(self, operator: Operator | str) -> str:
        name = operator.name if isinstance(operator, Operator) else operator
        if name not in self.app.operators:
            raise UnknownFunction(
                f"no operator {shown(name)} in app {self.app.name!r}; it has: {', '.join(self.app.operators)}"
            )
        return name

    def _ask(self, question: Callable[..., Any]) -> Any:
        """Let the thread answer a question between two steps."""
        with self._room:
            self._check_alive()
            future = self._hand_over(question)
        return future.result()

    def _check_log(self) -> None:
        """Raises `Stopped` if another engine has taken over the log."""
        self._ask(lambda token: Read(token, ""))  # of no operator: answered once the log is known to be still ours

    def _collect_batches(self, item: QueueItem | None) -> tuple[list[QueueItem], QueueItem | None, bool]:
        """Collect the waiting batches from this item on. Returns them, the question behind them if there is one, and
        whether the runtime is still open."""
        batches: list[QueueItem] = []
        while item is not None:
            if item[0] is not None:
                self._unanswered[item[0]] = None
            if not isinstance(item[1], Batch):
                return batches, item, True
            batches.append(item)
            if len(batches) >= BATCHES_MAX or self._queue.empty():
                return batches, None, True
            item = self._queue.get()
        return batches, None, False

    def _step(self, event: Any, now_us: int | None = None) -> None:
        self._follow(self.engine.step(self._clock() if now_us is None else now_us, event))

    def _follow(self, effects: Iterable[Any]) -> None:
        """Carry out the effects of a step."""
        self._timer_us = None
        for effect in effects:
            getattr(self, self.EFFECTS[type(effect)])(effect)

    def _set_timer(self, effect: SetTimer) -> None:
        self._timer_us = effect.at_us

    def _give_answers(self, effect: Answer) -> None:
        self._answer(effect.token, effect.answers)

    def _give_refusal(self, effect: Refuse) -> None:
        self._answer(effect.token, error=effect.error)

    def _give_state(self, effect: ReadResult) -> None:
        self._answer(effect.token, effect.entities)

    def _give_epoch(self, effect: SnapshotTaken) -> None:
        self._answer(effect.token, effect.epoch)

    def _perform(self, effect: Perform) -> None:
        self._externals.perform(effect)

    def _log_failures(self, effect: LogFailures) -> None:
        try:
            self._failure_log.write(effect)
        except Exception:  # of somebody's handler: what it does not write must not stop the engine
            traceback.print_exc()

    def _make_durable(self, effect: Append | Check | Keep | Save) -> None:
        assert self._keeper is not None
        self._keeper.carry_out(effect)

    def _answer(self, future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
        del self._unanswered[future]
        with contextlib.suppress(BaseException):  # raised by a client's callback; the result is set by then
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    # --- inside ---

    def _hand_over(self, work: Batch | Callable[..., Any]) -> Future[Any]:
        """Put work into the queue, under the lock: whatever is in it before the runtime closes gets an answer."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        self._queue.put((future, work))
        self._wake()
        return future

    def _tell(self, news: Any) -> None:
        self._queue.put((None, news))
        self._wake()

    def _check_alive(self) -> None:
        if self._broken is not None:
            raise Stopped(f"the runtime stopped itself: {self._broken!r}") from self._broken
        if self._closed:
            raise Stopped("the runtime is closed")
        if threading.current_thread() is self._thread:
            raise BadCall("a function cannot use a client of its own runtime: use ctx.call or ctx.call_async")

    def _release(self, rows: int) -> None:
        with self._room:
            self._pending -= rows
            self._room.notify_all()

    def _serve(self) -> None:
        try:
            self._open()
            while self._serve_once():
                pass
            self._settle()
        except GivenUp:
            return  # another thread has ended the runtime
        except BaseException as error:  # a broken invariant: nothing after it can be trusted
            self._broken = error
        self._end()

    def _end(self) -> None:
        """Nothing is served any more: finish what was handed over, and fail the rest."""
        try:
            self._clean_up()
            self._externals.close()
            self._failure_log.sum_up()
            if self._keeper is not None:
                self._keeper.close()
        finally:
            self._fail_the_rest()
            self._ended.set()

    def _fail_the_rest(self) -> None:
        reason = "the runtime is closed" if self._broken is None else f"the runtime stopped itself: {self._broken!r}"
        rest: list[Future[Any]] = list(self._unanswered)
        with self._room:
            self._closed = True
            while not self._queue.empty():
                item = self._queue.get()
                if item is not None and item[0] is not None:
                    rest.append(item[0])
            self._room.notify_all()
        for future in rest:
            future.set_exception(Stopped(reason))


def open_store(store: str | Path | Store | None, app: App, config: Config) -> OpenedStore | None:
    """Take over the store, if one is given. Arrow and the durability modules are imported only then."""
    if store is None:
        return None
    from headrace.durability.recovery import OpenedStore

    return OpenedStore(store, app, config)


class LocalClient(Client):
    """A client of a runtime in this process."""

    def __init__(self, runtime: Driver) -> None:
        super().__init__()
        self._runtime = runtime

    def map(self, function: Function | str, keys: Sequence[Any], args: Sequence[Args]) -> Replies:
        """Call one function on many keys, each with its tuple of arguments. This is the fastest way to submit columns
        of data."""
        ids = self.next_id()
        self._runtime.admission.check_id(ids)
        if len(keys) != len(args):
            raise BadRequest(f"{len(keys)} keys, but arguments for {len(args)}")
        if not set(map(type, args)) <= {tuple}:
            raise BadRequest("args must be a list of tuples, one for each key")
        batch = self._runtime.admission.admit_columns(FromClient(ids), function, list(keys), list(args))
        return self._send(batch, wait=True).result().naming(lambda row: (function, keys[row]))

    def submit(self, ids: RequestIds, calls: Sequence[Any], wait: bool) -> Future[Replies]:
        for request_id in [ids] if isinstance(ids, str) else ids:
            self._runtime.admission.check_id(request_id)
        return self._send(self._runtime.admission.admit(FromClient(ids), calls), wait=wait)

    def _send(self, batch: Batch, wait: bool) -> Future[Replies]:
        unseal = self._runtime.engine.program.values.unseal
        replies: Future[Replies] = Future()
        replies.set_running_or_notify_cancel()  # a submitted call cannot be cancelled

        def answer(future: Future[Answers]) -> None:
            error = future.exception()
            if error is not None:
                replies.set_exception(error)
            else:
                replies.set_result(Replies(future.result(), unseal))

        self._runtime.submit(batch, wait).add_done_callback(answer)
        return replies
