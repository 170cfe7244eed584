"""The house: who imports whom, what the pure parts never touch, and how large a file may be."""

from __future__ import annotations

import ast
import dataclasses
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace import Config

ROOT = Path(headrace.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LINES_MAX = 600

BASE = {"errors", "config"}
PURE = ("model", "wire", "core", "tpg", "flow", "sql", "actors")
CORE = BASE | {"model", "wire"}
KNOWS = {  # each part, and those below it; some are still to be built
    "errors": set(),
    "config": {"errors"},
    "model": BASE,
    "wire": BASE,
    "core": CORE,
    "tpg": CORE | {"core"},  # of core only the state: see STATE
    "flow": CORE,
    "sql": CORE | {"flow"},
    "actors": CORE | {"flow"},
    "durability": CORE | {"core", "tpg", "flow"},
    "functions": CORE | {"core", "flow", "sql", "durability"},
    "runtime": CORE | {"core", "tpg", "flow", "sql", "actors", "durability", "functions"},
    "gateway": CORE | {"core", "durability", "runtime"},
    "sim": CORE | {"core", "tpg", "flow", "sql", "actors", "durability", "functions", "runtime"},
    "chaos": CORE | {"core", "durability", "runtime", "sim"},
    "testing": CORE | {"core", "durability", "runtime", "sim"},
}
STATE = {
    f"headrace.core.{name}" for name in ("program", "state", "epoch", "backend")
}  # what declared transactions may use of the core
CHANCE = ROOT / "model" / "chance.py"  # the one pure file that knows `random`: what functions draw is seeded
OUTSIDE = {  # modules by which the world could get into the pure parts
    *(
        "time",
        "random",
        "secrets",
        "socket",
        "socketserver",
        "select",
        "selectors",
        "ssl",
        "http",
        "urllib",
        "requests",
    ),
    *("threading", "_thread", "asyncio", "concurrent", "multiprocessing", "subprocess", "queue", "sched", "signal"),
    *("os", "io", "sys", "pathlib", "shutil", "tempfile", "glob", "fcntl", "mmap", "logging", "sqlite3", "ctypes"),
    *(
        "pyspark",
        "pandas",
        "fastapi",
        "uvicorn",
        "uvloop",
        "httptools",
        "rich",
        "typer",
        "zmq",
        "boto3",
        "pickle",
        "cloudpickle",
        "marshal",
    ),
}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def part_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Every module named by an import anywhere in the file, in full."""
    package = ["headrace", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def parts_imported(path: Path) -> set[str]:
    """The parts of headrace that a file imports, without its own."""
    own = {part.stem for part in ROOT.iterdir() if part.suffix in ("", ".py")}
    named = (name.split(".") for name in imports_of(path))
    found = {name[1] for name in named if name[0] == "headrace" and len(name) > 1 and name[1] in own}
    return found - {part_of(path)}


def show(path: Path) -> str:
    return str(path.relative_to(ROOT.parent))


def test_there_is_a_house() -> None:
    assert {"model", "wire", "core", "runtime"} <= {part_of(path) for path in FILES}
    assert "core" in parts_imported(ROOT / "runtime" / "inprocess.py")
    assert "msgspec" in set(imports_of(ROOT / "wire" / "values.py"))


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) in KNOWS], ids=show)
def test_a_part_knows_only_those_below_it(path: Path) -> None:
    stranger = parts_imported(path) - KNOWS[part_of(path)]
    assert not stranger, f"{show(path)} imports {stranger}"


def test_declared_transactions_use_only_the_state_of_the_core() -> None:
    for path in FILES:
        if part_of(path) == "tpg":
            used = {".".join(name.split(".")[:3]) for name in imports_of(path) if name.startswith("headrace.core.")}
            assert used <= STATE, f"{show(path)} imports {used - STATE}"


def test_a_name_of_a_class_stands_for_one_class() -> None:
    defined = Counter(node.name for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef))
    assert [name for name, count in defined.items() if count > 1] == []


def test_a_name_of_a_file_stands_for_one_file() -> None:
    names = Counter(path.name for path in FILES)
    assert [name for name, count in names.items() if count > 1] == ["__init__.py"]


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) in KNOWS], ids=show)
def test_no_part_imports_the_public_face(path: Path) -> None:
    assert "headrace" not in set(imports_of(path)), f"{show(path)} imports headrace as a whole"


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) != "cli"], ids=show)
def test_nobody_imports_the_command_line(path: Path) -> None:
    assert "cli" not in parts_imported(path)


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) != "spark"], ids=show)
def test_only_spark_imports_pyspark(path: Path) -> None:
    assert "pyspark" not in {name.split(".")[0] for name in imports_of(path)}


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) in (*PURE, "errors", "config")], ids=show)
def test_the_pure_parts_touch_nothing_outside(path: Path) -> None:
    touched = {name.split(".")[0] for name in imports_of(path)} & OUTSIDE
    if path == CHANCE:
        touched -= {"random"}
    assert not touched, f"{show(path)} imports {touched}"


def test_what_functions_draw_is_seeded() -> None:
    """Of `random` the pure parts use one class, in one file, with a seed."""
    tree = ast.parse(CHANCE.read_text())
    assert [name for name in imports_of(CHANCE) if name.startswith("random")] == ["random", "random.Random"]
    made = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Random"
    ]
    assert made
    assert all(len(node.args) == 1 for node in made)


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) == "sim"], ids=show)
def test_the_simulator_touches_nothing_outside_but_numbers_from_a_seed(path: Path) -> None:
    touched = {name.split(".")[0] for name in imports_of(path)} & (OUTSIDE - {"random"})
    assert not touched, f"{show(path)} imports {touched}"


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) in PURE], ids=show)
def test_the_pure_parts_open_nothing_and_order_nothing_by_chance(path: Path) -> None:
    called = {
        node.func.id
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"open", "input", "print", "hash", "id", "eval", "__import__", "breakpoint"}


@pytest.mark.parametrize("path", FILES, ids=show)
def test_a_file_is_short(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines < LINES_MAX, f"{show(path)} has {lines} lines"


def test_every_public_name_exists() -> None:
    assert headrace.__all__
    assert len(set(headrace.__all__)) == len(headrace.__all__)
    for name in headrace.__all__:
        assert hasattr(headrace, name), name


def test_importing_headrace_is_light() -> None:
    heavy = ["pyspark", "fastapi", "pandas", "rich", "uvicorn", "typer", "numpy", "pyarrow"]
    script = f"import sys, headrace; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "path", [path for path in FILES if part_of(path) in (*PURE, "runtime", "gateway", "sim")], ids=show
)
def test_every_module_can_be_imported_by_itself(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    __import__(name)


def test_every_setting_is_used() -> None:
    used = {
        node.attr
        for path in FILES
        if path.name != "config.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
    }
    assert {field.name for field in dataclasses.fields(Config)} <= used, "nothing reads some settings"
