"""The in-process runtime: one engine, one thread that drives it, any number of clients.

The thread is the only one that touches the engine, so a Ctrl-C, a slow client or a cancelled task never meets a
transaction half done. Clients hand their batches over through a queue; all that waits there goes into one step, so that
epochs grow with the load.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from headrace.config import Config
from headrace.core.engine import Answer, Engine, SetTimer, Submit, Tick
from headrace.core.epoch import Batch
from headrace.core.ingress import Admission
from headrace.core.program import MISSING, Args
from headrace.errors import BadCall, BadRequest, ModelError, Overloaded, Stopped, TooLarge, UnknownFunction
from headrace.model.app import App
from headrace.model.operator import Function, Operator
from headrace.runtime.client import Client, Replies
from headrace.runtime.clock import Clock, system_clock
from headrace.wire.messages import Answers, RequestIds
from headrace.wire.values import shown

Result = TypeVar("Result")
GATHER_MAX = 1_000  # batches taken into one step
PATIENCE_S_MAX = 3_600.0


class Runtime:
    """Runs an app in this process: `with Runtime(app) as runtime: runtime.client.call(transfer, "a", "b", 5)`."""

    def __init__(self, app: App, config: Config | None = None, clock: Clock | None = None) -> None:
        if not isinstance(app, App):
            raise ModelError(f"Runtime takes an App, not {shown(app)}")
        self.app, self.config, self._clock = app, config or Config(), clock or system_clock()
        self.engine = Engine(app, self.config)
        self.admission = Admission(self.engine.program)
        self.client = LocalClient(self)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._pending = 0
        self._unanswered: dict[Future[Any], None] = {}
        self._broken: BaseException | None = None
        self._closed = False
        self._timer_us: int | None = None
        self._thread = threading.Thread(target=self._serve, name=f"headrace-{app.name}", daemon=True)
        self._thread.start()

    # --- for clients ---

    def submit(self, batch: Batch, wait: bool = True) -> Future[Answers]:
        """Hand over admitted calls. The future has their answers."""
        rows, limit = len(batch), self.config.pending_transactions_max
        if batch.source is not None:
            limit = max(limit, rows)  # it cannot be split: it waits until it is alone
        if rows > limit:
            raise TooLarge(f"a batch of {rows} calls is over the limit of {limit} pending ones: send smaller batches")
        if batch.source is None and 0 < self.config.request_ids_max < rows:
            kept = self.config.request_ids_max
            raise TooLarge(f"a batch of {rows} calls, but only {kept} request ids are kept: send smaller batches")
        with self._room:
            self._check_alive()
            while self._pending + rows > limit:
                if not wait:
                    raise Overloaded(f"{self._pending} transactions are waiting, the limit is {limit}")
                self._room.wait()
                self._check_alive()
            self._pending += rows
            future = self._hand_over(batch)
        future.add_done_callback(lambda _: self._release(rows))
        return future

    def state(self, operator: Operator | str) -> dict[Any, Any]:
        """All entities of an operator, key and state, as they are between two epochs."""
        table, unseal = self._table(operator), self.engine.program.values.unseal
        return self._ask(lambda: {key: unseal(value) for key, value in table.items()})

    def get(self, operator: Operator | str, key: Any, default: Any = None) -> Any:
        """The state of one entity."""
        table, unseal = self._table(operator), self.engine.program.values.unseal
        self.engine.program.check_key(key)
        value = self._ask(lambda: table.get(key, MISSING))
        return default if value is MISSING else unseal(value)

    def metrics(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "app": self.app.name,
            "mode": "serial",
            "workers": 1,
            "epochs": engine.sequencing.open.number - 1,
            "committed": engine.committed,
            "aborted": engine.aborted,
            "pending": self._pending,
            "entities": {name: len(table) for name, table in engine.program.tables.items()},
        }

    def close(self) -> None:
        """Finish what was handed over, then stop."""
        if threading.current_thread() is self._thread:
            raise BadCall("a function cannot close its own runtime")
        with self._room:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
            self._room.notify_all()
        self._thread.join()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ---

    def _table(self, operator: Operator | str) -> dict[Any, Any]:
        name = operator.name if isinstance(operator, Operator) else operator
        if name not in self.engine.program.tables:
            raise UnknownFunction(
                f"no operator {shown(name)} in app {self.app.name!r}; it has: {', '.join(self.app.operators)}"
            )
        return self.engine.program.tables[name]

    def _ask(self, question: Callable[[], Result]) -> Result:
        """Have the engine's thread answer a question, between two steps."""
        with self._room:
            self._check_alive()
            future = self._hand_over(question)
        return future.result()  # type: ignore[no-any-return]

    def _hand_over(self, work: Batch | Callable[[], Any]) -> Future[Any]:
        """Into the inbox, under the lock: what is in it before the runtime is closed is answered."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it cannot be taken back
        self._inbox.put((future, work))
        return future

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
            while self._serve_once():
                pass
            if self._timer_us is not None:
                self._step(Tick(), self._timer_us)
        except BaseException as error:  # a broken invariant: nothing after it can be trusted
            self._broken = error
        finally:
            self._fail_the_rest()

    def _serve_once(self) -> bool:
        """Take what is there into one step. False once the runtime is closed."""
        patience_s = (
            None if self._timer_us is None else min(max(0, self._timer_us - self._clock()) / 1e6, PATIENCE_S_MAX)
        )
        try:
            item = self._inbox.get(timeout=patience_s)
        except queue.Empty:
            self._step(Tick())
            return True
        batches: list[tuple[Future[Answers], Batch]] = []
        while item is not None:
            self._unanswered[item[0]] = None
            if not isinstance(item[1], Batch):
                break
            batches.append(item)
            if len(batches) >= GATHER_MAX or self._inbox.empty():
                break
            item = self._inbox.get()
        if batches:
            self._step(Submit(batches))
        if item is not None and not isinstance(item[1], Batch):
            future, question = item
            try:
                future.set_result(question())
            except Exception as error:
                future.set_exception(error)
            del self._unanswered[future]
        return item is not None

    def _step(self, event: Submit | Tick, now_us: int | None = None) -> None:
        self._timer_us = None
        for effect in self.engine.step(self._clock() if now_us is None else now_us, event):
            if isinstance(effect, SetTimer):
                self._timer_us = effect.at_us
                continue
            del self._unanswered[effect.token]
            with contextlib.suppress(BaseException):  # of a client's callback; the result is set by then
                if isinstance(effect, Answer):
                    effect.token.set_result(effect.answers)
                else:
                    effect.token.set_exception(effect.error)

    def _fail_the_rest(self) -> None:
        reason = "the runtime is closed" if self._broken is None else f"the runtime stopped itself: {self._broken!r}"
        rest: list[Future[Any]] = list(self._unanswered)
        with self._room:
            self._closed = True
            while not self._inbox.empty():
                item = self._inbox.get()
                if item is not None:
                    rest.append(item[0])
            self._room.notify_all()
        for future in rest:
            future.set_exception(Stopped(reason))


class LocalClient(Client):
    """A client of a runtime in this process."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime

    def map(
        self, function: Function | str, keys: Sequence[Any], args: Sequence[Args], *, request_id: str | None = None
    ) -> Replies:
        """One function for many keys, each with its tuple of arguments: the quickest way in for columns of data."""
        ids = self.id_or_new(request_id)
        self._runtime.admission.check_id(ids)
        if len(keys) != len(args):
            raise BadRequest(f"{len(keys)} keys, but arguments for {len(args)}")
        if not set(map(type, args)) <= {tuple}:
            raise BadRequest("args is a list of tuples, one for each key")
        return self._send(
            self._runtime.admission.admit_columns(ids, function, list(keys), list(args)), wait=True
        ).result()

    def submit(self, ids: RequestIds, calls: Sequence[Any], wait: bool) -> Future[Replies]:
        for request_id in [ids] if isinstance(ids, str) else ids:
            self._runtime.admission.check_id(request_id)
        return self._send(self._runtime.admission.admit(ids, calls), wait=wait)

    def _send(self, batch: Batch, wait: bool) -> Future[Replies]:
        unseal = self._runtime.engine.program.values.unseal
        replies: Future[Replies] = Future()
        replies.set_running_or_notify_cancel()  # once handed over, a call cannot be taken back

        def answer(future: Future[Answers]) -> None:
            error = future.exception()
            if error is not None:
                replies.set_exception(error)
            else:
                replies.set_result(Replies(future.result(), unseal))

        self._runtime.submit(batch, wait).add_done_callback(answer)
        return replies
