"""The docs are true: their code runs, and what they name exists.

The Python blocks of one file share a namespace and run in order. `# -> value` at the end of a line is compared with the
value of the expression before it, `# raises Type: part of the message` with what it raises. A block whose first line is
`# needs spark`, `# needs workers` or `# needs headrace run module:app` runs only in the tests that provide it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shlex
import socket
import subprocess
import sys
import tokenize
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace import Config, Runtime
from headrace.config import LIMITS
from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
FOLDERS = r'((?:store=|Path\(|load\(|save\(|json\(|start\(|Location", |parquet\(f?))"(?=[a-z])'  # in examples
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
}
PLACES = ["benchmarks", "docs", "examples", "headrace", "tests"]

# --- reading a page ---------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    language: str
    line: int  # of its first line in the page
    text: str

    @property
    def needs(self) -> str:
        first = self.text.partition("\n")[0]
        return first.removeprefix("# needs ") if first.startswith("# needs ") else ""


def blocks(page: str) -> list[Block]:
    text = PAGES[page]
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(fence[1], text.count("\n", 0, fence.start(2)) + 1, fence[2]) for fence in fences]


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)


def code_spans(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def pages_with(needs: str) -> list[str]:
    return [page for page in PAGES if any(block.needs.startswith(needs) for block in blocks(page) if block.needs)]


# --- running its code -------------------------------------------------------------------------------------------------


def claims_in(source: str) -> dict[int, str]:
    """Line -> what its comment claims."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    return {line: text for line, text in comments.items() if text.startswith(("# -> ", "# raises "))}


class Claims(ast.NodeTransformer):
    """Turns `value  # -> claim` into `__same__(value, claim)`, and `value  # raises claim` into a check as well."""

    def __init__(self, claims: dict[int, str]) -> None:
        self.left = dict(claims)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        kind, _, claim = self.left.pop(node.end_lineno or 0, "").removeprefix("# ").partition(" ")
        if kind == "->":
            call = ast.Call(ast.Name("__same__", ast.Load()), [node.value, ast.Constant(claim)], [])
            made: ast.stmt = ast.Expr(call)
        elif kind == "raises":
            check = ast.Call(ast.Name("__raises__", ast.Load()), [ast.Constant(claim)], [])
            made = ast.With([ast.withitem(check)], [node])
        else:
            return node
        return ast.fix_missing_locations(ast.copy_location(made, node))


def same(value: Any, claim: str) -> None:
    assert repr(value) == claim


@contextlib.contextmanager
def raises(claim: str) -> Iterator[None]:
    name, _, part = claim.partition(": ")
    with pytest.raises(Exception, match=re.escape(part) or None) as caught:
        yield
    assert caught.type.__name__ == name, repr(caught.value)


def execute(source: str, namespace: dict[str, Any], name: str = "<block>", line: int = 1) -> None:
    claims = Claims(claims_in(source))
    tree = claims.visit(ast.parse(source))
    assert not claims.left, f"{name}: claims that follow no expression: {claims.left}"
    ast.increment_lineno(tree, line - 1)
    namespace |= {"__same__": same, "__raises__": raises}
    exec(compile(tree, name, "exec"), namespace)  # noqa: S102 the repository's own docs


Run = Callable[..., None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs the blocks of a page that need nothing, or what is provided."""
    started: list[dict[str, Any]] = []

    def run_page(page: str, provided: str = "", edit: Callable[[str], str] = str, **given: Any) -> None:
        module = types.ModuleType(re.sub(r"\W", "_", page))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        started.append(module.__dict__)
        module.__dict__.update(given)
        for block in blocks(page):
            if block.language == "python" and (not block.needs or (provided and block.needs.startswith(provided))):
                execute(edit(block.text), module.__dict__, str(ROOT / page), block.line)

    yield run_page
    for namespace in started:
        for value in namespace.values():
            if isinstance(value, Runtime):
                value.close()


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language == "python" for b in blocks(page))])
def test_every_python_block_runs_and_every_claim_in_a_comment_holds(page: str, run: Run) -> None:
    run(page)


@pytest.mark.spark
@pytest.mark.parametrize("page", pages_with("spark"))
def test_every_block_that_needs_spark_runs(page: str, run: Run, tmp_path: Path) -> None:
    """In a folder of its own, with a folder of payments in it. (Spark's is where it was started.)"""
    (tmp_path / "payments").mkdir()
    rows = [{"src": "alice", "dst": "bob", "amount": amount} for amount in (30, 500)]
    (tmp_path / "payments" / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    run(page, "spark", lambda text: re.sub(FOLDERS, rf'\1"{tmp_path}/', text))


@pytest.mark.parametrize("page", pages_with("workers"))
def test_every_block_that_needs_workers_runs(page: str, run: Run) -> None:
    run(page, "workers")


@pytest.mark.parametrize("page", pages_with("headrace run"))
def test_every_block_that_needs_a_served_app_runs(page: str, run: Run) -> None:
    [command] = {block.needs for block in blocks(page) if block.needs.startswith("headrace run")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = "from headrace.cli import main; main()"
    arguments = [*shlex.split(command)[1:], "--port", str(port)]
    with subprocess.Popen([sys.executable, "-c", start, *arguments], cwd=ROOT) as server:
        try:
            eventually(lambda: listens(port, server), what=f"a server on port {port}", pause_s=0.05)
            run(page, command, lambda text: text.replace(":8090", f":{port}"))
        finally:
            server.terminate()


def listens(port: int, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, f"nothing listens on port {port}; the server ended with {server.poll()}"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.mark.parametrize(
    "source",
    [
        "1 + 1  # -> 3",
        "'2'  # -> 2",
        "if True:\n    [1]  # -> [2]",
        "int('x')  # raises TypeError",
        "int('x')  # raises ValueError: nothing of the kind",
        "int('1')  # raises ValueError",
        "a = 1  # -> 1",
    ],
)
def test_a_false_claim_in_a_comment_is_found(source: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        execute(source, {})


def test_a_true_claim_in_a_comment_holds() -> None:
    execute("(\n    1 +\n    1\n)  # -> 2\nint('x')  # raises ValueError: invalid literal", {})


# --- what the docs name -----------------------------------------------------------------------------------------------


def commands(program: str) -> list[tuple[str, list[str]]]:
    """(page, words) of every command of this program in shell blocks and in `code`."""
    found = []
    for page in PAGES:
        lines = [line for block in blocks(page) if block.language == "sh" for line in block.text.splitlines()]
        lines += [block.needs for block in blocks(page) if block.needs]
        for line in lines + code_spans(page):
            if line.removeprefix("$ ").startswith(program + " "):
                found.append((page, shlex.split(line.removeprefix("$ "), comments=True)))
    return found


def test_every_headrace_command_named_in_the_docs_exists() -> None:
    import typer

    from headrace.cli import app

    named = commands("headrace")
    assert named
    for page, words in named:
        command: Any = typer.main.get_command(app)
        for word in words[1:]:
            if hasattr(command, "commands"):
                assert word in command.commands, f"{page}: {' '.join(words)}"
                command = command.commands[word]
            elif word.startswith("--"):
                options = {option for parameter in command.params for option in parameter.opts}
                assert word in options, f"{page}: {' '.join(words)}"


def test_every_headrace_command_is_named_in_the_docs() -> None:
    import typer

    from headrace.cli import app

    def leaves(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
        if hasattr(command, "commands"):
            for name, child in command.commands.items():
                yield from leaves(child, *words, name)
        else:
            yield words

    named = [tuple(words[1:]) for _, words in commands("headrace")]
    for words in leaves(typer.main.get_command(app)):
        assert any(given[: len(words)] == words for given in named), " ".join(words)


def test_what_to_do_is_said_for_every_error_that_a_store_can_bring() -> None:
    from headrace import errors

    found = [error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, Exception)]
    wanted = {error.code for error in found if issubclass(error, errors.StoreError)} - {errors.ObjectMissing.code}
    wanted |= {error.code for error in (errors.Fenced, errors.AppChanged, errors.NotDeterministic)}
    said = {row[0].strip("`"): row for row in table_rows("docs/operations.md") if len(row) == 3}
    assert wanted <= set(said)


def test_every_make_verb_named_in_the_docs_exists() -> None:
    verbs = set(re.findall(r"^([a-z][\w-]*)\s*:(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = commands("make")
    assert named
    for page, words in named:
        assert set(words[1:]) <= verbs, f"{page}: {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_folder_named_in_the_docs_exists(page: str) -> None:
    for span in code_spans(page):
        path = span.partition("::")[0]
        if path.partition("/")[0] in PLACES and "/" in path and " " not in path:
            assert (ROOT / path).exists(), span


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_every_test_named_in_the_docs_exists(page: str) -> None:
    for span in code_spans(page):
        path, separator, name = span.partition("::")
        if separator:
            assert name in functions_of(ROOT / path), span


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_resolves(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, heading = target.partition("#")
            there = ((ROOT / page).parent / path).resolve() if path else ROOT / page
            assert there.exists(), target
            assert not heading or heading in headings(there.read_text()), target


def headings(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def table_rows(page: str) -> list[list[str]]:
    rows = [line.strip("| ").split(" | ") for line in prose(page).splitlines() if line.startswith("| ")]
    return [row for row in rows if not set("".join(row)) <= set("-| ")]


def test_every_promise_names_where_it_is_kept_and_the_test_that_proves_it() -> None:
    rows = [row for row in table_rows("docs/guarantees.md") if row[0] != "promise"]
    assert rows
    for promise, *rest in rows:
        assert len(rest) == 2, promise
        assert re.search(r"`headrace/[\w/.]*`", rest[0]), promise
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", rest[1]), promise


def test_the_architecture_names_every_folder_and_only_what_is_missing_as_missing() -> None:
    page = "docs/architecture.md"
    folders = {path.name for path in (ROOT / "headrace").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    named = {row[0].strip("`") for row in table_rows(page)}
    assert {f"headrace/{folder}/" for folder in folders} <= named
    missing = {name.strip("/") for name in named if name.endswith("/") and not name.startswith("headrace/")}
    assert not missing & folders


@pytest.mark.parametrize("folder", ["core", "durability"])
def test_the_way_of_a_request_passes_every_file(folder: str) -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "headrace" / folder).glob("[!_]*.py")}
    assert files <= set(code_spans("docs/architecture.md"))


def test_the_table_of_limits_has_the_defaults() -> None:
    units = {"": 1, "bytes": 1, "MiB": 1 << 20, "s": 1_000_000}
    rows = [row for row in table_rows("docs/concepts.md") if len(row) == 4 and hasattr(Config(), row[0].strip("`"))]
    assert {name.strip("`") for name, *_ in rows} >= {*LIMITS, "wall_limit_us", "pending_transactions_max"}
    for name, _, default, _ in rows:
        number, _, unit = default.partition(" ")
        assert int(number.replace(",", "")) * units[unit] == getattr(Config(), name.strip("`")), name


def test_every_decision_is_in_the_index() -> None:
    records = {path.name for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md")}
    assert set(re.findall(r"\((\d[^)]*)\)", PAGES["docs/decisions/README.md"])) == records


@pytest.mark.parametrize("page", PAGES)
def test_prose_and_code_are_wrapped_at_120_characters(page: str) -> None:
    for line in PAGES[page].splitlines():
        assert len(line) <= 120 or line.startswith("| "), line
