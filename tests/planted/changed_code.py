"""Mistakes that break the promises of the section "Changed code"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "A code change that can change a result is detected and named.",
        "headrace/model/source.py",
        "            return [type(value).__name__, repr(value)]\n",
        "            return [type(value).__name__]\n",
    ),
    Mistake(
        "One that cannot is ignored.",
        "headrace/model/source.py",
        "return body[1:] if is_docstring else body",
        "return body",
    ),
    Mistake(
        "Changed code does not start while epochs of the old code wait to be replayed.",
        "headrace/durability/recovery.py",
        "        if obstacles:\n",
        "        if obstacles and not digest:\n",
    ),
    Mistake(
        "It starts from a snapshot at the log's end, and request ids are kept.",
        "headrace/durability/recovery.py",
        "kept = [each for each in replies if each.number <= epoch]",
        "kept = [each for each in replies if each.number <= epoch and not is_migrated]",
    ),
    Mistake(
        "`headrace upgrade` makes such a snapshot.",
        "headrace/cli/replay.py",
        "        with Runtime(app, Config(shards=past.config.shards), store=store) as runtime:\n"
        '            epoch, is_new = runtime.snapshot()["epoch"], True\n',
        "        runtime = Runtime(app, Config(shards=past.config.shards), store=store)\n"
        '        epoch, is_new = runtime.metrics()["epochs"], True\n',
    ),
    Mistake(
        "A changed state type needs a migration, and the refusal says so.",
        "headrace/durability/migration.py",
        "if tables.get(name)]\n",
        "if tables.get(name) and name not in app.operators]\n",
    ),
)
