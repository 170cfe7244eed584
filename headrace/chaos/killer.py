"""The killer: causes kills, pauses and takeovers at random times, from one seed.

The faults are bounded: what is paused is resumed, what is killed is started again. The first fault, and the one after a
fault of a coordinator, wait until a client was answered.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable

from headrace.chaos.servers import ChaosFailed, Process, Server, Servers
from headrace.chaos.traffic import ClientPool
from headrace.durability.log.takeover import highest_term
from headrace.durability.store import Store

PROGRESS_S_MAX = 30.0  # until a client is answered again
QUIET_S = (0.2, 1.2)  # between two faults
PAUSE_S = (0.05, 1.2)
LONG_PAUSE_S = (5.5, 7.0)  # longer than the timeout for a silent worker
ZOMBIE_AWAKE_S = (0.5, 3.0)  # how long a zombie is awake
KILL_WHILE_STARTING_S = (0.0, 2.5)  # how long after its start a coordinator is killed


class Killer:
    """Causes faults step by step until `heal`. Must be used in the thread that starts the servers."""

    def __init__(
        self, servers: Servers, traffic: ClientPool, rng: random.Random, store: Store | None, is_short: bool
    ) -> None:
        self.servers, self.traffic, self.rng, self.store, self.is_short = servers, traffic, rng, store, is_short
        self.counts: Counter[str] = Counter()
        self.recoveries_ms: dict[str, list[float]] = {"coordinator": [], "worker": []}
        self.wrong: list[str] = []
        self._asleep: list[tuple[float, Process]] = []  # when to resume which process
        faults: list[tuple[Callable[[], None], int]] = [(self.kill_worker, 4), (self.pause_worker, 3)]
        if store is not None:
            faults += [
                (self.kill_coordinator, 3),
                (self.pause_coordinator, 2),
                (self.take_over, 3),
                (self.snapshot, 3),
            ]
        else:
            faults += [(self.pause_coordinator, 2)]
        self._faults = [fault for fault, weight in faults for _ in range(weight)]
        self._upcoming: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Waits until a client was answered: before that there is nothing to lose."""
        self._await_progress(0)

    def step(self) -> None:
        """Causes one fault, and waits a little."""
        if not self._upcoming:  # each kind comes as often as its weight says, in random order
            self._upcoming = self.rng.sample(self._faults, len(self._faults))
        self._replace_ended_server()
        self._upcoming.pop()()
        self._wait(self.rng.uniform(*QUIET_S))

    def heal(self) -> None:
        """Ends the faults: all processes are resumed, and one server serves."""
        for _, process in self._asleep:
            process.signal(signal.SIGCONT)
        self._asleep.clear()
        for zombie in list(self.servers.zombies):
            self._bury(zombie)
        self._replace_ended_server()

    # --- workers ---

    def kill_worker(self) -> None:
        worker = self._some_worker()
        if worker is not None and worker.signal(signal.SIGKILL):
            self.counts["worker_kills"] += 1
            self._await_progress(time.monotonic_ns(), "worker")

    def pause_worker(self) -> None:
        worker = self._some_worker()
        if worker is not None and worker.signal(signal.SIGSTOP):
            self.counts["pauses"] += 1
            is_long = not self.is_short and self.rng.random() < 0.2
            for_s = self.rng.uniform(*(LONG_PAUSE_S if is_long else PAUSE_S))
            self._asleep.append((time.monotonic() + for_s, worker))

    def _some_worker(self) -> Process | None:
        server = self.servers.current
        awake = [process for process in server.workers() if not process.is_stopped()] if server else []
        return self.rng.choice(sorted(awake)) if awake else None

    # --- coordinators ---

    def kill_coordinator(self) -> None:
        """Kills it, and sometimes its successor too, while it starts."""
        server = self._current()
        self.servers.current = None
        began_ns = time.monotonic_ns()
        server.kill()
        self.counts["coordinator_kills"] += 1
        successor = self.servers.start()
        if self.rng.random() < 0.3:
            self._wait(self.rng.uniform(*KILL_WHILE_STARTING_S))
            successor.kill()
            self.counts["coordinator_kills"] += 1
            successor = self.servers.start()
        self._await_service(successor)
        self._await_progress(began_ns, "coordinator")

    def pause_coordinator(self) -> None:
        """Pauses it for a while; no other coordinator takes over."""
        server = self._current()
        server.process.signal(signal.SIGSTOP)
        self.counts["pauses"] += 1
        self._wait(self.rng.uniform(*PAUSE_S))
        server.process.signal(signal.SIGCONT)
        self._await_progress(time.monotonic_ns())

    def take_over(self) -> None:
        """Pauses it while another one takes over, and resumes it: during the take-over, or after it."""
        zombie = self._current()
        zombie.process.signal(signal.SIGSTOP)
        self.counts["pauses"] += 1
        began_ns = time.monotonic_ns()
        self._wait(self.rng.uniform(0.0, 0.3))
        successor = self.servers.start()
        self.servers.zombies.append(zombie)
        self.servers.current = None
        when = self.rng.choice(("while it starts", "while it takes over", "after that", "after that"))
        if when == "while it starts":
            self._asleep.append((time.monotonic() + self.rng.uniform(0.2, 2.0), zombie.process))
        elif when == "while it takes over":
            self._await_term(successor)
            self._asleep.append((time.monotonic() + self.rng.uniform(0.0, 0.1), zombie.process))
        self._await_service(successor)
        if when == "after that":
            self._await_progress(began_ns)
            zombie.process.signal(signal.SIGCONT)
        self.counts["takeovers"] += 1
        until_s = time.monotonic() + self.rng.uniform(*ZOMBIE_AWAKE_S)
        while time.monotonic() < until_s and not zombie.has_ended():
            self._wait(0.05)
        self.counts["zombies_that_ended"] += zombie.has_ended()
        self._bury(zombie)
        self._await_progress(time.monotonic_ns())

    def snapshot(self) -> None:
        """Takes a snapshot. The server may have paused workers: they are resumed meanwhile."""
        asked = threading.Thread(target=self._ask_for_snapshot, args=(self._current(),), daemon=True)
        asked.start()
        while asked.is_alive():
            self._wait(0.01)

    def _ask_for_snapshot(self, server: Server) -> None:
        request = urllib.request.Request(f"{server.url}/v1/snapshot", b"{}", {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PROGRESS_S_MAX) as response:
                self.counts["snapshots"] += json.load(response)["status"] == "ok"
        except (OSError, ValueError, KeyError) as error:
            self.wrong.append(f"no snapshot could be taken at server {server.number}: {error}")

    # --- inside ---

    def _current(self) -> Server:
        server = self.servers.current
        assert server is not None
        return server

    def _bury(self, zombie: Server) -> None:
        self.servers.zombies.remove(zombie)
        zombie.kill()

    def _replace_ended_server(self) -> None:
        """Starts a new server if the current one ended. If it was not killed, that is an error."""
        server = self.servers.current
        if server is not None and not server.has_ended():
            return
        self.servers.current = None
        if server is not None:
            self.wrong.append(f"server {server.number} ended by itself ({server.exit_code}): {server.last_errors()}")
        self._await_service(self.servers.start())

    def _await_service(self, server: Server) -> None:
        while not server.is_serving():
            self._wait(0.01)
            self.servers.check(server)
        self.servers.current = server

    def _await_term(self, server: Server) -> None:
        """Waits until the log has a new term: from then on the previous coordinator must not write."""
        assert self.store is not None
        before = highest_term(self.store)
        while highest_term(self.store) == before:
            self._wait(0.005)
            self.servers.check(server)

    def _await_progress(self, since_ns: int, kind: str | None = None) -> None:
        """Waits until a request that was sent after that instant is answered."""
        now_s = time.monotonic()
        while self.traffic.last_success[0] <= since_ns:
            if time.monotonic() - now_s > PROGRESS_S_MAX:
                raise ChaosFailed(
                    f"no request was answered for {PROGRESS_S_MAX:.0f} s after "
                    + (f"a fault of a {kind or 'server'}" if self.counts else "the start")
                )
            self._wait(0.005)
        if kind is not None:
            self.recoveries_ms[kind].append((self.traffic.last_success[1] - since_ns) / 1e6)

    def _wait(self, for_s: float) -> None:
        """Waits, and resumes the processes whose pause is over."""
        until_s = time.monotonic() + for_s
        while True:
            now_s = time.monotonic()
            for at_s, process in [each for each in self._asleep if each[0] <= now_s]:
                process.signal(signal.SIGCONT)
                self._asleep.remove((at_s, process))
            if now_s >= until_s:
                return
            time.sleep(min(0.02, until_s - now_s))

    def figures(self) -> dict[str, float | int | None]:
        kinds = ("worker_kills", "coordinator_kills", "pauses", "takeovers", "zombies_that_ended", "snapshots")
        counts = {kind: self.counts[kind] for kind in kinds}
        found: dict[str, float | int | None] = {"kills": counts["worker_kills"] + counts["coordinator_kills"], **counts}
        for kind, times_ms in self.recoveries_ms.items():
            name = "recovery_ms" if kind == "coordinator" else "worker_recovery_ms"
            found[f"{name}_median"] = round(statistics.median(times_ms), 1) if times_ms else None
            found[f"{name}_max"] = round(max(times_ms), 1) if times_ms else None
        return found
