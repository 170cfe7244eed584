"""The process runtime: real processes, real sockets. What comes back is what the loop over the log gives."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import zmq

from headrace import App, Config
from headrace.errors import BadRequest, ConfigError, ModelError, Stopped
from headrace.runtime import loading
from headrace.runtime.client import Replies
from headrace.runtime.cluster import Cluster
from headrace.runtime.inprocess import Runtime
from headrace.runtime.sockets import KEPT_FRAMES_MAX, QUEUE_FRAMES_MAX, Keys, Network
from headrace.sim.oracle import Oracle
from headrace.wire import codec
from headrace.wire.messages import Final, Frame, Shown
from tests.process import bank
from tests.process.bank import account, compute_for_ever, crash, deposit, doze, move, process_id, spin, transfer
from tests.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parent.parent.parent
SMALL = Config(epoch_transactions_max=100, resend_us=200_000)


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def calls_of(seed: int, count: int, accounts: int = 40) -> list[tuple[Any, ...]]:
    rng = random.Random(seed)
    keys = [f"k{i}" for i in range(accounts)]
    calls: list[tuple[Any, ...]] = [(deposit, key, 50) for key in keys]
    while len(calls) < count:
        function = move if rng.random() < 0.2 else transfer
        calls.append((function, *rng.sample(keys, 2), rng.randrange(1, 60)))
    return calls


class Load:
    """Batches handed over one after the other without waiting, and the check that the loop gives the same."""

    def __init__(self, cluster: Cluster, seed: int = 1, count: int = 4_000, rows: int = 200) -> None:
        self.cluster, calls = cluster, calls_of(seed, count)
        self.batches = [calls[at : at + rows] for at in range(0, count, rows)]
        self.futures: list[Future[Replies]] = []

    def send(self, batches: int | None = None) -> None:
        for _ in range(len(self.batches) - len(self.futures) if batches is None else batches):
            at = len(self.futures)
            self.futures.append(self.cluster.client.submit(f"{at}", self.batches[at], wait=True))

    def check(self) -> None:
        self.send()
        rows: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        for calls, future in zip(self.batches, self.futures, strict=True):
            replies = future.result(PATIENCE_S)
            assert len(replies) == len(calls)
            for call, reply in zip(calls, replies, strict=True):
                assert reply.tid is not None
                assert reply.tid not in rows, "two requests have one TID"
                failure = reply.failure
                rows[reply.tid] = (
                    call,
                    (
                        ("ok", reply.result)
                        if failure is None
                        else ("aborted", failure.type, failure.message, failure.function, failure.key)
                    ),
                )
        oracle = Oracle()
        for tid in sorted(rows):
            call, outcome = rows[tid]
            assert outcome == oracle.transact(*call), f"TID {tid}: {call}"
        assert self.cluster.state(account) == {key: value for (_, key), value in oracle.state.items()}
        metrics = self.cluster.metrics()
        assert metrics["committed"] + metrics["aborted"] == len(rows)
        assert metrics["pending"] == 0


@pytest.fixture
def pids() -> Iterator[set[int]]:
    """Processes that must be gone when the test has ended."""
    seen: set[int] = set()
    yield seen
    assert seen
    assert not [pid for pid in seen if is_alive(pid)]


# --- the same as the loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "mode"), [(1, "auto"), (2, "auto"), (3, "ordered")])
def test_several_processes_give_what_the_loop_gives(workers: int, mode: str, pids: set[int]) -> None:
    with Cluster(bank.app, workers, SMALL, mode) as cluster:
        pids.update(cluster.processes().values())
        assert len(pids) == workers
        load = Load(cluster, seed=workers)
        load.check()
        assert cluster.get(account, "k0") == cluster.state(account)["k0"]
        assert cluster.get(account, "nobody", "none") == "none"
        again = cluster.client.options(request_id="0").batch(load.batches[0])
        assert list(again) == list(load.futures[0].result())
        metrics = cluster.metrics()
        assert (metrics["app"], metrics["workers"], metrics["term"]) == ("bank", workers, 1)
        assert metrics["mode"] == ("serial" if workers == 1 else "ordered")
        assert metrics["messages_sent"] > 0
        assert metrics["bytes_sent"] > 0
        assert metrics["messages_refused"] == metrics["strangers_refused"] == 0


def test_functions_run_in_the_workers_and_nowhere_else(pids: set[int]) -> None:
    with Cluster("tests.process.bank:app", 2) as cluster:
        ran = {cluster.client.call("account.process_id", f"k{i}") for i in range(20)}
        assert ran == set(cluster.processes().values())
        assert os.getpid() not in ran
        pids.update(ran)


def test_many_threads_share_a_cluster(pids: set[int]) -> None:
    with Cluster(bank.app, 2, SMALL) as cluster:
        pids.update(cluster.processes().values())

        def work(name: str) -> None:
            counted.append([cluster.client.call(deposit, name, 1) for _ in range(30)])

        counted: list[list[int]] = []
        threads = [threading.Thread(target=work, args=(name,)) for name in "abcdef"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert counted == [list(range(1, 31))] * 6


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [1, 2])
def test_a_worker_that_is_killed_in_the_middle_changes_no_answer(victim: int, pids: set[int]) -> None:
    with Cluster(bank.app, 2, SMALL) as cluster:
        pids.update(cluster.processes().values())
        load = Load(cluster, seed=victim, count=8_000)
        load.send(20)
        load.futures[3].result(PATIENCE_S)
        os.kill(cluster.processes()[victim], signal.SIGKILL)
        load.check()
        eventually(lambda: cluster.metrics()["term"] == 2)
        pids.update(cluster.processes().values())
        assert len(pids) == 3
        assert cluster.metrics()["recoveries"] == 1


def test_all_workers_killed_at_once_change_no_answer(pids: set[int]) -> None:
    with Cluster(bank.app, 2, SMALL) as cluster:
        pids.update(cluster.processes().values())
        load = Load(cluster, seed=7)
        load.send(10)
        load.futures[1].result(PATIENCE_S)
        for pid in cluster.processes().values():
            os.kill(pid, signal.SIGKILL)
        load.check()
        pids.update(cluster.processes().values())


def test_a_worker_that_is_silent_is_replaced(pids: set[int]) -> None:
    with Cluster(bank.app, 2, Config(silence_us_max=2_000_000, resend_us=200_000)) as cluster:
        stopped = cluster.processes()[2]
        pids.update(cluster.processes().values())
        os.kill(stopped, signal.SIGSTOP)
        Load(cluster, seed=3, count=1_000).check()
        assert cluster.processes()[2] != stopped
        pids.update(cluster.processes().values())


def test_a_function_that_never_returns_is_aborted_by_decree_and_the_rest_goes_on(pids: set[int]) -> None:
    config = Config(wall_limit_us=1_000_000, resend_us=200_000)
    with Cluster(bank.app, 2, config) as cluster:
        pids.update(cluster.processes().values())
        before = [(deposit, f"k{i}", 10) for i in range(10)]
        after = [(transfer, f"k{i}", f"k{i + 1}", 4) for i in range(9)]
        replies = cluster.client.submit("x", [*before, (spin, "k3"), *after], wait=True).result(PATIENCE_S)
        assert {at: failure.code for at, failure in replies.failures.items()} == {10: "poisoned"}
        assert replies.failures[10].function == "account.spin"
        assert replies.results == [*[10] * 10, None, 6, *[10] * 8]
        assert cluster.client.call(deposit, "k3", 1) == 11
        pids.update(cluster.processes().values())


@pytest.mark.parametrize(("function", "workers"), [(crash, 1), (crash, 2), (compute_for_ever, 2)])
def test_a_function_that_takes_its_worker_with_it_is_aborted_by_decree(
    function: Any, workers: int, pids: set[int]
) -> None:
    config = Config(silence_us_max=1_500_000, resend_us=200_000)
    with Cluster(bank.app, workers, config) as cluster:
        before = [(deposit, f"k{i}", 10) for i in range(10)]
        after = [(transfer, f"k{i}", f"k{i + 1}", 4) for i in range(9)]
        calls = [*before, (function, "k3"), *after, (function, "k4")]
        replies = cluster.client.submit("x", calls, wait=True).result(PATIENCE_S)
        assert {at: failure.code for at, failure in replies.failures.items()} == {10: "poisoned", 20: "poisoned"}
        assert replies.results == [*[10] * 10, None, 6, *[10] * 8, None]
        assert cluster.client.call(deposit, "k3", 1) == 11
        pids.update(cluster.processes().values())


def test_a_slow_function_within_the_limit_is_left_alone(pids: set[int]) -> None:
    with Cluster(bank.app, 2, Config(silence_us_max=1_500_000)) as cluster:
        pids.update(cluster.processes().values())
        assert cluster.client.call(doze, "k", 2.5) == 0
        assert cluster.metrics()["term"] == 1


# --- rescaling --------------------------------------------------------------------------------------------------------


def test_rescaling_under_load_changes_no_answer(pids: set[int]) -> None:
    with Cluster(bank.app, 2, SMALL) as cluster:
        pids.update(cluster.processes().values())
        load = Load(cluster, seed=5, count=9_000)
        load.send(15)
        assert cluster.rescale(3) > 0
        assert cluster.metrics()["workers"] == 3
        pids.update(cluster.processes().values())
        assert len(cluster.processes()) == 3
        load.send(15)
        assert cluster.rescale(1) > 0
        assert cluster.metrics()["mode"] == "serial"
        load.check()
        assert list(cluster.processes()) == [1]
        with pytest.raises(BadRequest):
            cluster.rescale(0)
        with pytest.raises(BadRequest):
            cluster.rescale(1_000)


def test_a_runtime_of_one_process_says_that_it_cannot_be_rescaled() -> None:
    with Runtime(bank.app) as runtime, pytest.raises(BadRequest, match="--workers 2"):
        runtime.rescale(2)


# --- strangers and nonsense -------------------------------------------------------------------------------------------


class Pair:
    """Two nodes that know each other, in one thread."""

    def __init__(self) -> None:
        self.one, self.two = Network(1, Keys.new()), Network(2, Keys.new())
        self.one.add_node(2, self.two.keys.public, self.two.endpoint)
        self.two.add_node(1, self.one.keys.public, self.one.endpoint)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.one.close()
        self.two.close()

    def received(self, count: int = 1) -> list[Frame]:
        """By the second, that many or more."""
        frames: list[Frame] = []

        def receive() -> bool:
            self.one.wait(0)
            self.two.wait(5)
            frames.extend(self.two.receive())
            return len(frames) >= count

        eventually(receive)
        return frames


def frame(number: int = 1, source: int = 1, to: int = 2) -> Frame:
    return Frame(1, source, to, number, 0, Final(number))


def raw_push(keys: Keys, server_key: str, endpoint: str) -> tuple[zmq.Context[Any], zmq.Socket[bytes]]:
    context: zmq.Context[Any] = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.setsockopt_string(zmq.CURVE_SERVERKEY, server_key)
    push.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    push.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    push.connect(endpoint)
    return context, push


def test_what_is_sent_before_the_address_is_known_arrives_once_it_is() -> None:
    with Pair() as pair:
        pair.one.forget(2)
        pair.one.add_node(2, pair.two.keys.public, None)
        sent = [frame(number) for number in range(1, 20)]
        for each in sent:
            pair.one.send(each)
        assert not pair.one.is_congested
        pair.one.add_node(2, pair.two.keys.public, pair.two.endpoint)
        assert pair.received(19) == sent


def test_a_message_that_is_none_is_refused_counted_and_harms_nobody() -> None:
    whole = codec.encode(frame())
    nonsense = [
        *(whole[:size] for size in range(len(whole))),
        whole + b"\x00",
        whole.replace(b"final", b"finel"),
        codec.encode(frame(source=3)),  # speaks for somebody else
        codec.encode(frame(to=1)),
    ]
    with Pair() as pair:
        context, push = raw_push(pair.one.keys, pair.two.keys.public, pair.two.endpoint)
        for data in nonsense:
            push.send(data)
        push.send_multipart([whole, whole])
        push.send(codec.encode(frame(9)))
        assert pair.received() == [frame(9)]
        assert pair.two.refused == len(nonsense) + 1
        context.destroy(0)


def test_a_cluster_refuses_what_is_cut_short_and_goes_on(pids: set[int]) -> None:
    keys: list[Keys] = []

    class Traitor(Cluster):
        """Lets a stranger have a key."""

        def _open(self) -> None:
            keys.append(Keys.new())
            self._network.add_node(99, keys[0].public, None)
            super()._open()

    with Traitor(bank.app, 2) as cluster:
        pids.update(cluster.processes().values())
        network = cluster._network
        context, push = raw_push(keys[0], network.keys.public, network.endpoint)
        whole = codec.encode(frame(source=99, to=0))
        push.send(whole[:-1])
        push.send(codec.encode(frame(source=1, to=0)))
        eventually(lambda: cluster.metrics()["messages_refused"] == 2)
        push.send(whole)  # a worker of no term
        assert cluster.client.call(deposit, "k", 1) == 1
        context.destroy(0)


def test_a_peer_without_the_right_key_gets_nowhere(pids: set[int]) -> None:
    with Cluster(bank.app, 2) as cluster:
        pids.update(cluster.processes().values())
        network = cluster._network
        context, push = raw_push(Keys.new(), network.keys.public, network.endpoint)
        bare = context.socket(zmq.PUSH)  # does not even encrypt
        bare.connect(network.endpoint)
        for socket in (push, bare):
            socket.send(codec.encode(frame(source=1, to=0)))
        eventually(lambda: cluster.metrics()["strangers_refused"] >= 1)
        assert cluster.client.call(deposit, "k", 1) == 1
        assert cluster.metrics()["messages_refused"] == 0
        context.destroy(0)


def test_keys_stand_on_no_command_line(pids: set[int]) -> None:
    with Cluster(bank.app, 2) as cluster:
        for pid in cluster.processes().values():
            pids.add(pid)
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            assert words[1:] == [b"-m", b"headrace.runtime.worker_process", b""]


def test_a_node_that_was_forgotten_is_a_stranger() -> None:
    with Pair() as pair:
        pair.one.send(frame(1))
        assert pair.received() == [frame(1)]
        pair.two.forget(1)
        pair.one.send(frame(2))
        pair.two.add_node(3, Keys.new().public, None)

        def refused() -> bool:
            pair.two.wait(5)
            assert not pair.two.receive()
            return pair.two.refused == 1

        eventually(refused)


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3])
def test_who_was_turned_away_is_heard_soon_after_it_is_met(delay_s: float) -> None:
    """News of a node may come after its first knock. ZeroMQ by itself may knock again after 30 seconds only."""
    with Pair() as pair, contextlib.closing(Network(3, Keys.new())) as stranger:
        stranger.add_node(2, pair.two.keys.public, pair.two.endpoint)
        stranger.send(frame(7, source=3))
        eventually(lambda: pair.two.wait(5) or pair.two.strangers)
        until_s = time.monotonic() + delay_s
        eventually(lambda: pair.two.wait(5) or time.monotonic() >= until_s)
        pair.two.add_node(3, stranger.keys.public, stranger.endpoint)
        began_s = time.monotonic()
        assert pair.received() == [frame(7, source=3)]
        assert time.monotonic() - began_s < 25


def test_two_nodes_that_flood_each_other_both_get_through() -> None:
    """Each sends more than all queues hold before it reads anything; then both read and all of it arrives."""
    count = 2 * QUEUE_FRAMES_MAX + 200
    body = Shown(1, [("account", f"k{i}", "x" * 1_000) for i in range(50)])
    with Pair() as pair:
        for number in range(1, count + 1):
            pair.one.send(Frame(1, 1, 2, number, 0, body))
            pair.two.send(Frame(1, 2, 1, number, 0, body))
        assert pair.one.is_congested
        assert pair.two.is_congested
        got: dict[int, list[int]] = {1: [], 2: []}

        def receive() -> bool:
            for network in (pair.one, pair.two):
                network.wait(1)
                got[network.me] += [each.sequence for each in network.receive()]
            return all(len(numbers) == count for numbers in got.values())

        eventually(receive)
        assert got == {1: list(range(1, count + 1)), 2: list(range(1, count + 1))}
        assert not pair.one.is_congested
        assert pair.one.dropped == pair.two.dropped == 0


def test_what_is_kept_for_a_peer_is_limited() -> None:
    network = Network(1, Keys.new())
    network.add_node(2, Keys.new().public, None)
    for _ in range(2):  # what is sent again before it has left is not kept twice
        for number in range(1, KEPT_FRAMES_MAX + 1):
            network.send(frame(number))
        assert (network.sent, network.dropped) == (KEPT_FRAMES_MAX, 0)
    for number in range(1, 11):
        network.send(frame(KEPT_FRAMES_MAX + number))
    assert network.dropped == 10
    network.close()


# --- beginning and end ------------------------------------------------------------------------------------------------


def test_close_finishes_what_was_handed_over(pids: set[int]) -> None:
    cluster = Cluster(bank.app, 2, Config(epoch_interval_us=3_600_000_000))
    pids.update(cluster.processes().values())
    submitted = cluster.client.submit("x", [(deposit, "k", 1), (move, "k", "l", 1)], wait=True)
    cluster.close()
    assert submitted.result(PATIENCE_S).results == [1, [0, 1]]
    with pytest.raises(Stopped):
        cluster.client.call(deposit, "k", 1)
    cluster.close()


def test_no_worker_outlives_a_parent_that_is_killed(tmp_path: Path, pids: set[int]) -> None:
    """Also one that is busy in a function which never returns."""
    script = tmp_path / "parent.py"
    script.write_text(
        "from tests.process.bank import app, spin\n"
        "from headrace.runtime.cluster import Cluster\n"
        "cluster = Cluster(app, 2)\n"
        "cluster.client.submit('x', [(spin, 'k')], wait=True)\n"
        "print(*cluster.processes().values(), flush=True)\n"
        "input()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert all(map(is_alive, workers))
    finally:
        parent.kill()
        parent.wait(PATIENCE_S)
        parent.stdin.close()  # type: ignore[union-attr]
        parent.stdout.close()  # type: ignore[union-attr]
    eventually(lambda: not any(map(is_alive, workers)))
    pids.update(workers)


SCRIPT = """
from headrace import App
from headrace.runtime.cluster import Cluster

app = App("script")
counter = app.operator("counter")

@counter.register
def add(ctx, n: int) -> int:
    ctx.put(ctx.get(0) + n)
    return ctx.get()

{guard}
    with Cluster(app, 2) as cluster:
        print(cluster.client.batch([(add, f"k{{i % 3}}", i) for i in range(9)]).results)
"""


def run_script(tmp_path: Path, guard: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard=guard))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False
    )


def test_an_app_in_the_script_that_was_started_runs_on_workers(tmp_path: Path) -> None:
    done = run_script(tmp_path, 'if __name__ == "__main__":')
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 1, 2, 3, 5, 7, 9, 12, 15]\n"


def test_a_script_that_starts_its_cluster_when_imported_is_told_what_to_do(tmp_path: Path) -> None:
    done = run_script(tmp_path, "if True:")
    assert done.returncode != 0
    assert 'if __name__ == "__main__"' in done.stderr


def test_an_app_that_workers_cannot_find_is_refused() -> None:
    hidden = App("hidden")
    with pytest.raises(ModelError, match="top of a module"):
        Cluster(hidden)
    with pytest.raises(ModelError, match="no module"):
        Cluster("tests.process.nothing:app")
    with pytest.raises(ConfigError, match="mode"):
        Cluster(bank.app, mode="parallel")
    with pytest.raises(ConfigError, match="workers"):
        Cluster(bank.app, workers=0)


def test_an_app_that_is_another_in_the_workers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    late = App("bank")
    late.operator("account").register(process_id.body)
    monkeypatch.setattr(loading, "target_of", lambda app: loading.parse("tests.process.bank:app"))
    with pytest.raises(ModelError, match="other functions"):
        Cluster(late, 1)
