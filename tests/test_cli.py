"""The `headrace` command, as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import BadRequest

ROOT = Path(__file__).parent.parent


def headrace(*words: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT)


def test_every_command_explains_itself() -> None:
    said = headrace("--help").stdout
    for command in ("demo", "run", "call", "rescale", "bench", "sim", "doctor", "version"):
        assert command in said
        assert headrace(command, "--help").returncode == 0


def test_version_prints_the_version() -> None:
    import headrace as package

    assert headrace("version").stdout == f"headrace {package.__version__}\n"


def test_the_arguments_of_a_call_are_by_position_or_by_name() -> None:
    from headrace.cli.serve import arguments

    assert arguments([]) == "[]"
    assert json.loads(arguments(["bob", "5", "1.5e3", "[1]", '"5"', '"a=b"', "=x", "a b=c", "1=2"])) == [
        *("bob", 5, 1500.0, [1], "5", "a=b", "=x", "a b=c", "1=2")
    ]
    assert json.loads(arguments(["to=bob", "amount=5", 'note="a=b"', "more=c=d", "none="])) == {
        "to": "bob",
        "amount": 5,
        "note": "a=b",
        "more": "c=d",
        "none": "",
    }
    assert json.loads(arguments(["0.10", "1e400", "NaN"]), parse_float=str) == ["0.10", "1e400", "NaN"]
    for mixed in (["bob", "amount=5"], ["amount=5", "bob"], ["a=1", "a=2"]):
        with pytest.raises(BadRequest, match="all arguments by position, or each once by name; text with = in it"):
            arguments(mixed)


def test_an_app_that_is_served_can_be_called_until_it_is_stopped() -> None:
    command = [sys.executable, "-u", "-m", "headrace.cli", "run", "examples.bank:app", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
        assert found is not None
        url = ("--url", found.group())
        made = headrace("call", "account.deposit", "alice", "100", *url)
        assert (made.returncode, json.loads(made.stdout)) == (0, 100)
        again = headrace("call", "account.transfer", "alice", "bob", "30", "--request-id", "r", *url)
        assert (again.returncode, json.loads(again.stdout)) == (0, 70)
        assert (
            headrace("call", "account.transfer", "alice", "bob", "30", "--request-id", "r", *url).stdout == again.stdout
        )
        named = headrace("call", "account.transfer", "alice", "amount=5", "to=bob", *url)
        assert (named.returncode, json.loads(named.stdout)) == (0, 65)
        unknown = headrace("call", "account.transfer", "alice", "amount=5", "dst=bob", *url)
        assert (unknown.returncode, json.loads(unknown.stdout)["error"]) == (
            2,
            "account.transfer(to: str, amount: int) has no parameter 'dst'",
        )
        aborted = headrace("call", "account.transfer", "alice", "bob", "500", *url)
        assert (aborted.returncode, json.loads(aborted.stdout)["status"]) == (1, "aborted")
        refused = headrace("call", "account.transfer", "alice", "bob", *url)
        assert (refused.returncode, json.loads(refused.stdout)["code"]) == (2, "bad_arguments")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(120)
    unreachable = headrace("call", "account.deposit", "alice", "100", *url)
    assert unreachable.returncode == 2
    assert "unreachable" in unreachable.stderr


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("examples.bank", "does not name an app"),
        ("examples.nothing:app", "no module"),
        ("examples.bank:nothing", "it has: app"),
        ("json:dumps", "there is no App in it"),
    ],
)
def test_what_cannot_be_run_is_said(target: str, reason: str) -> None:
    said = headrace("run", target, "--port", "0")
    assert said.returncode == 2
    assert reason in " ".join(said.stderr.split())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--replies", "answers"], "need --kafka"),
        (["--conf", "spark.cores.max=2"], "--conf needs --master"),
        (["--check", "--workers", "2"], "a check runs in one process"),
        (["--check", "--master", "spark://x:1"], "a check runs in one process"),
        (["--accept-logged"], "there are logged replies in a store only: add --store"),
        (["--conf", "spark.cores.max=2", "--master", "local[2]"], "does not start Spark: remove --conf"),
        (["--conf", "cores=2", "--master", "spark://x:1"], "as in spark.cores.max=8"),
        (["--kafka", "broker:9092"], "add --store"),
        (["--mode", "ordered"], "add --workers 2"),
    ],
)
def test_options_that_would_do_nothing_are_refused(words: list[str], reason: str) -> None:
    said = headrace("run", "examples.bank:app", "--port", "0", *words)
    assert said.returncode == 2
    assert reason in " ".join(said.stderr.replace("│", " ").split())


def test_the_benchmark_ends_with_one_line_of_json(tmp_path: Path) -> None:
    save = tmp_path / "result.json"
    said = headrace(
        "bench", "ycsb", "--json", "--transactions", "20000", "--repeats", "1", "--zipf", "0.99", "--save", str(save)
    )
    assert said.returncode == 0, said.stderr
    result = json.loads(said.stdout.splitlines()[-1])
    for figures in (result, result["coroutine"]):
        assert figures["conserved"]
        assert figures["same_as_reference"]
        assert figures["committed_per_s"] > 0
        assert figures["reference_per_s"] > 0
        assert 0 < figures["p50_ms"] <= figures["p99_ms"]
        assert figures["aborted"] == 0
    assert result["bytes_per_entity"] > 0
    assert 0 < result["aborted_of_ok"] < 5
    assert 0 < result["refused_of_ok"] < 5
    assert json.loads(save.read_text())["machine"]["cores"] == os.cpu_count()


def test_the_benchmark_over_workers_gives_what_the_serial_engine_gives() -> None:
    said = headrace("bench", "ycsb", "--workers", "2", "--json", "--transactions", "5000", "--repeats", "1")
    assert said.returncode == 0, said.stderr
    result = json.loads(said.stdout.splitlines()[-1])
    assert (result["workers"], result["mode"]) == (2, "ordered")
    for form in ("one_way", "awaited", "merged"):
        assert result[form]["same_as_serial"]
        assert result[form]["committed_per_s"] > 0
    assert result["costly"]["speedup"] > 0


def test_messages_of_an_epoch_do_not_grow_with_its_transactions() -> None:
    said = headrace("bench", "epochs", "--json", "--epochs", "2")
    assert said.returncode == 0, said.stderr
    rows = json.loads(said.stdout.splitlines()[-1])["rows"]
    by_size = {
        row["epoch"]: row for row in rows if not row["predicted"] and row["form"] == "one_way" and not row["zipf"]
    }
    assert by_size[10_000]["told"] > 50 * by_size[100]["told"]
    assert by_size[10_000]["messages"] < 2 * by_size[100]["messages"]
    predicted = [row for row in rows if row["predicted"] and row["form"] == "one_way"]
    assert all(row["told"] == row["ran_again"] == 0 for row in predicted)


def test_the_doctor_names_what_is_wrong_and_how_to_mend_it(tmp_path: Path) -> None:
    well = headrace("doctor", "--quick", "--port", "0")
    assert well.returncode == 0, well.stdout
    assert "All checks passed" in well.stdout
    script = (
        "import sys; from headrace.cli.doctor import examine; import headrace.spark.jvm.java as j;"
        "j.candidates = lambda: iter(()); sys.exit(0 if examine(False, True, 0) else 1)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1
    assert "headrace doctor --install-java" in " ".join(ran.stdout.split())


@pytest.mark.spark
def test_the_demo_shows_a_stream_some_aborts_and_the_total_conserved() -> None:
    said = headrace("demo", "--calls", "20000", timeout_s=240)
    assert said.returncode == 0, said.stderr
    assert "def transfer" in said.stdout
    assert " aborted" in said.stdout
    assert "paid to hotels = 500,000  ✓" in said.stdout
    assert "the same accounts and hotels: ✓" in said.stdout
    assert "free rooms" in said.stdout
    assert "✗" not in said.stdout
    assert "what to try next" in said.stdout
    assert "s from the start of a micro-batch to its last row" in " ".join(said.stdout.split())
    assert said.stderr == ""
