"""What the type checker knows of an app: mypy runs once, strictly, over a correct app, one with mistakes, and the
examples."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import defaultdict
from decimal import Decimal
from pathlib import Path

import pytest

from headrace import App, Context, Function, Operator, Runtime
from tests.typing import typed_bank

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CORRECT, WRONG = HERE / "typed_bank.py", HERE / "wrong_bank.py"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ERROR = re.compile(r"(?P<file>[^:]+):(?P<line>\d+): error: (?P<text>.*)")

Errors = dict[str, dict[int, str]]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """What mypy reports, by file and line. Nothing but errors of these files is wanted."""
    files = [str(path.relative_to(ROOT)) for path in (CORRECT, WRONG, *EXAMPLES)]
    settings = ["--config-file=", "--strict", "--follow-imports=silent", "--python-version=3.11", "--no-error-summary"]
    cache = f"--cache-dir={tmp_path_factory.mktemp('mypy')}"
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, cache, *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    found: Errors = defaultdict(dict)
    for line in ran.stdout.splitlines():
        if error := ERROR.match(line):
            found[error["file"]][int(error["line"])] = error["text"]
    return found


def test_a_correct_app_has_no_error_and_no_cast(errors: Errors) -> None:
    assert errors[str(CORRECT.relative_to(ROOT))] == {}
    text = CORRECT.read_text()
    assert "cast(" not in text
    assert "type: ignore" not in text
    assert not re.search(r"\bAny\b(?!`)", text)


def test_every_mistake_is_reported_on_its_line(errors: Errors) -> None:
    lines = WRONG.read_text().splitlines()
    planted = {number: line for number, line in enumerate(lines, 1) if "# wrong" in line}
    assert len(planted) >= 20
    assert set(errors[str(WRONG.relative_to(ROOT))]) == set(planted)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_have_no_error(errors: Errors, path: Path) -> None:
    assert errors[str(path.relative_to(ROOT))] == {}


def test_the_correct_app_does_what_it_says() -> None:
    with Runtime(typed_bank.app) as runtime:
        assert typed_bank.story(runtime) == ["100", "bob has 30", "80", "None", "30", "80", "0"]
        assert asyncio.run(typed_bank.ask(runtime.client)) == len("bob has 35")
        assert typed_bank.described(typed_bank.transfer, runtime.client) == "BOB HAS 36"
        assert runtime.client.call(typed_bank.twice, "carl", Decimal(2)) == 2 + 4
        assert runtime.client.call(typed_bank.slowly, "carl", "dora") == len("dora has 1")
        assert runtime.state(typed_bank.total)["calls"] == 2


def test_brackets_are_allowed_at_run_time() -> None:
    """Annotations that are not text are evaluated: Python does that where the module does not say otherwise."""
    evaluated = {"ctx": Context[typed_bank.Account], "function": Function[[int], str, str], "operator": Operator[int]}
    app = App("evaluated")

    def held(ctx, amount=1):  # type: ignore[no-untyped-def]
        return ctx.get(amount)

    held.__annotations__ = {"ctx": Context[int], "amount": int, "return": int}
    function = app.operator("held", state=int).register(held)
    with Runtime(app) as runtime:
        assert runtime.client.call(function, "k") == 1
    assert [hint.__origin__ for hint in evaluated.values()] == [Context, Function, Operator]
