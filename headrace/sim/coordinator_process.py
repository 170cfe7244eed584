"""One coordinator's process with all that belongs to it, from its start to its end.

It has its own handle of the disk, its workers, and the pending requests of its clients. Several may run at the same
time: one that was paused, or wrongly taken for lost, continues as if nothing had happened, until the log tells it that
it has been superseded.

What production does in two threads beside the core (`durability/keeper.py`) happens here in separate events, so that
anything can come in between; and before each store operation the process may be paused, slowed down or killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.core.admission import Admission
from headrace.core.coordinator import on_workers
from headrace.core.engine import Engine
from headrace.core.epoch import Epoch
from headrace.core.events import Append, Appended, Check, Saved, Snapshot, Submit
from headrace.core.log_records import Decree
from headrace.core.origin import FromClient, FromSource
from headrace.durability.identity import create_identity, identity_of
from headrace.durability.keeper import PendingRecord, StoreWork
from headrace.durability.recovery import OpenedStore
from headrace.errors import AppChanged, Fenced, LogBroken, SnapshotBroken, StoreError, WrongStore
from headrace.sim.disk import Crashed, SimStore
from headrace.sim.node import SimNode
from headrace.wire.messages import Failure, RequestIds

if TYPE_CHECKING:
    from headrace.config import Config
    from headrace.sim.workload import Call
    from headrace.sim.world import World

NESTED_MAX = 4  # processes that are in the middle of an operation while others run
Token = tuple[Callable[[Any], None], bool, Callable[[], bool]]


class CoordinatorProcess:
    def __init__(self, world: World, number: int, config: Config, workers: int, mode: str, version: int = 0) -> None:
        """With 0 workers it is an engine without workers, which runs everything itself."""
        self.version, self.app = version, world.workload.apps[version]
        self.world, self.number, self.config = world, number, config
        self.wanted_workers, self.mode = workers, mode
        self.node = SimNode(self, 0, 1, None, world.new_clock())
        self.node.clock.offset_us += world.ahead_us
        self.workers: dict[int, SimNode] = {}
        self.incarnations: Counter[int] = Counter()
        self.tokens: dict[int, Token] = {}
        self.gathered: list[tuple[int, Any]] = []  # submissions that go into the next step
        self.last_term = 0
        self.is_serving = False
        self.store: SimStore | None = None
        self.store_work: StoreWork
        self.opened_store: OpenedStore
        self.appends: list[PendingRecord | Check] = []
        self.background: list[Epoch | Snapshot | PendingRecord | None] = []  # None is a compaction
        self.records: dict[int, bytes] = {}  # not in the log yet
        self.is_writing = self.is_working = False
        self.handed_over = 0  # the last record
        self.logged: set[str] = set()  # operators whose changes are logged
        self.news_us = 0  # when the last event of the keeper arrives
        self.pause_in: int | None = None  # store operations until it is paused
        self.reported: set[int] = set()  # TIDs whose failures were reported
        self.dies_in: tuple[int, str] | None = None  # store operations until it dies, and where in the last one
        self.power_in: int | None = None  # writes until power is lost, before they are synced

    @property
    def is_alive(self) -> bool:
        return self.node.is_alive

    @property
    def core(self) -> Any:
        return self.node.core

    def find(self, number: int) -> SimNode | None:
        """The node that has this number now; an engine without workers has none to talk to."""
        return self.workers.get(number) if number or not self.wanted_workers else self.node

    # --- start ---

    def open(self) -> bool:
        """Takes over the store and starts. False if the process ended before it could serve."""
        parameters = self.world.parameters
        if parameters.store == "none":
            self.node.core = self._new_core(False, parameters.seed, 0)
        elif not self.guard("start", self._recover):
            return False
        self.admission = Admission(self.core.program)
        self.is_serving = True
        return True

    def _new_core(self, is_durable: bool, seed: int, term: int) -> Engine:
        app, config = self.app, self.config
        if not self.wanted_workers:
            return Engine(app, config, is_durable=is_durable, seed=seed)
        return on_workers(app, config, self.wanted_workers, self.mode, is_durable=is_durable, seed=seed, term=term)

    def _recover(self) -> None:
        world, app = self.world, self.app
        store = self.store = SimStore(world.disk, f"coordinator {self.number}", self._before_operation)
        if identity_of(store) is None:
            create_identity(store, app, self.config, cluster="sim", seed=world.parameters.seed)
        self.logged = {name for name in app.operators if world.changes.random() < world.parameters.changes}
        self._set_changes()
        opened_store = self.opened_store = OpenedStore(store, app, self.config, world.workload.print_of(self.version))
        core = self._new_core(True, opened_store.seed, opened_store.log.term)
        world.workload.hooks.watch(None)
        opened_store.restore(core)
        inherited = [epoch for epoch in core.backlog if epoch.is_inherited]
        if inherited:
            world.probe("started a newer version that had to replay an older one's epochs")
        if any(epoch.final_rows for epoch in inherited):
            world.probe("compared an older version's replies")
        if core.deferred.spent:
            world.probe("started with firings that had aborted")
        if world.workload.hooks.is_stuck:
            world.violate(f"{self.node.name} is stuck in its recovery, in a function that does not return")
        self.store_work, self.handed_over = StoreWork(opened_store), opened_store.log.last
        world.archive.take_over(self, opened_store)
        self.node.core = core

    def guard(self, what: str, action: Callable[[], None]) -> bool:
        """Runs an action that uses the store. If it fails the process ends, as in production."""
        world = self.world
        try:
            action()
        except Crashed:
            world.note(f"{self.node.name} is gone in the middle of its {what}")
            world.end(self)
        except (LogBroken, SnapshotBroken, WrongStore) as error:
            world.violate(f"{self.node.name} {what}: nothing durable is ever lost here, and yet {error!r}")
            world.end(self)
        except AppChanged as error:
            if self.version == max(process.version for process in world.processes):
                raise world.broken(f"{self.node.name} raised {error!r} in its {what}") from error
            world.note(f"{self.node.name} ends, {what}: a newer version ran meanwhile")
            world.fault(f"{what} failed, a newer version ran")
            world.end(self)
        except (StoreError, Fenced) as error:
            world.note(f"{self.node.name} ends, {what}: {error!r}")
            world.fault(f"{what} failed, {'fenced' if isinstance(error, Fenced) else 'the store refuses'}")
            world.end(self)
        except Exception as error:
            raise world.broken(f"{self.node.name} raised {error!r} in its {what}") from error
        return self.is_alive

    def _before_operation(self, store: SimStore, op: str, name: str) -> None:
        world = self.world
        world.trace_event(self.node, op, name.encode())
        world.on_operation(self, op, name)
        if self.dies_in is not None:
            store.dies_at, self.dies_in = (store.operations + self.dies_in[0] - 1, self.dies_in[1]), None
        if self.power_in is not None and op == ("sync" if store.can_append else "create"):
            self.power_in -= 1
            if self.power_in < 0:
                world.lose_power()
        if world.nested >= NESTED_MAX or not self.is_alive:
            return
        if self.pause_in is not None:
            self.pause_in -= 1
            if self.pause_in < 0:
                self.pause_in = None
                world.fault("coordinator pauses in a store operation")
                world.on_pause(self)
        if world.is_slow():
            world.fault("slow store operations")
            until_us = world.now_us + world.disk_times.randint(100, 20_000)
            world.run_others_while(lambda: world.now_us < until_us and self.is_alive, until_us)
            self._set_changes()
        if self.node.is_paused:
            world.run_others_while(lambda: self.node.is_paused and self.is_alive)
            self._set_changes()

    def _set_changes(self) -> None:
        """Changelogs may be turned on and off at every start. In this world all processes share the app: one that
        started while this one waited may have set it otherwise."""
        for name, operator in self.app.operators.items():
            operator.changes = name in self.logged

    # --- what the core wants durable ---

    def append(self, effect: Append) -> bytes:
        self.handed_over = effect.number
        written = self.store_work.encode(effect)
        self.records[effect.number] = written.data
        self.appends.append(written)
        self._soon_write()
        return written.data

    def give_up(self, tid: int, failure: Failure) -> None:
        """What production's watchdog does with a function that cannot be interrupted: it has the decree written, after
        all that was handed over, and the process ends."""
        if self.is_alive:
            self.append(Append(self.handed_over + 1, Decree({tid: failure})))
            self._end_when_written()

    def _end_when_written(self) -> None:
        if not self.is_alive:  # it was killed, or lost the store to a successor, while it wrote
            return
        if self.is_writing:
            self.world.after(200, self._end_when_written)
        else:
            self.world.probe("engines given up")
            self.world.end(self)

    def check(self, check: Check) -> None:
        self.appends.append(check)
        self._soon_write()

    def keep(self, *items: Epoch | Snapshot | PendingRecord | None) -> None:
        self.background += items
        self._soon_work()

    def _soon_write(self) -> None:
        if not self.is_writing:
            self.is_writing = True
            self.world.after(self.world.disk_times.choice((0, 100, 1_000)), self._write)

    def _soon_work(self) -> None:
        if not self.is_working:
            self.is_working = True
            self.world.after(self.world.disk_times.choice((0, 200, 5_000)), self._work)

    def _write(self) -> None:
        """What production's log thread does with all waiting records."""
        if self._waits(self._write):
            return
        group, self.appends = self.appends, []
        if self.guard("append", lambda: self._tell(self.store_work.append(group))):
            self.is_writing = False
            retired = [item for item in group if isinstance(item, PendingRecord) and item.retired]
            if retired:
                self.keep(*retired)
            if self.appends:
                self._soon_write()

    def _work(self) -> None:
        """What production's background thread does: one item per event, so that others run in between."""
        if self._waits(self._work):
            return
        stop = next(
            (at for at, item in enumerate(self.background) if not isinstance(item, Epoch)), len(self.background)
        )
        group, self.background = self.background[: stop or 1], self.background[stop or 1 :]
        if self.guard("keeping", lambda: self._carry_out(group)):
            self.is_working = False
            if self.background:
                self._soon_work()

    def _carry_out(self, group: list[Any]) -> None:
        first = group[0]
        if isinstance(first, Epoch):
            self.store_work.keep(group)
            for epoch in group:
                self.world.archive.wrote(self, epoch)
            if self.opened_store.changes is not None:
                self.world.archive.changed(self)
        elif isinstance(first, Snapshot):
            news = self.store_work.save(first)
            if isinstance(news[0], Saved):
                self.world.archive.saved(self, first.epoch)
                self.world.on_saved(self)
            self._tell(news)
            self.background.insert(0, None)
        elif first is None:
            self.store_work.compact()
        else:
            self.store_work.retire(first.retired)

    def _waits(self, action: Callable[[], None]) -> bool:
        """Whether the action must not run now. If the process is paused it is tried later, if it is gone it is not."""
        if self.node.is_paused and self.is_alive:
            self.world.after(5_000, action)
        return self.node.is_paused or not self.is_alive

    def _tell(self, news: Sequence[Any]) -> None:
        """Delivers events to the core in order, a little later."""
        world = self.world
        for event in news:
            if isinstance(event, Appended):
                for number in [number for number in self.records if number <= event.number]:
                    world.archive.promise(self, number, self.records.pop(number))
            self.news_us = max(self.news_us, world.now_us + world.disk_times.choice((0, 0, 300)))
            world.at(self.news_us, self._hear, event)
            self.news_us += 1

    def _hear(self, event: Any) -> None:
        self.world.step(self.node, event)

    # --- requests ---

    def submit(self, token: int, ids: RequestIds, calls: list[Call], source: tuple[str, int] | None) -> None:
        """A batch arrives; batches that arrive close together go into one step."""
        if not self.is_alive:
            self.world.fault("requests to a coordinator that is gone")
            return
        origin = FromClient(ids) if source is None else FromSource(ids, *source)
        calls = self.world.workload.for_version(self.version, calls)
        self.gathered.append((token, self.admission.admit(origin, calls)))
        if len(self.gathered) == 1:
            self.world.after(self.world.schedule.choice((0, 0, 200)), self._hand_over)

    def _hand_over(self) -> None:
        batches, self.gathered = self.gathered, []
        self.world.step(self.node, Submit(batches))
