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
        "Code that only adds replays what older code has logged; any other difference is refused.",
        "headrace/model/fingerprint.py",
        'VersionDifference(f"field {name}: its default changed")',
        'VersionDifference(f"field {name}: its default changed", True)',
    ),
    Mistake(
        "A reply that lacks a new field is the same as one that has it at its default.",
        "headrace/core/outcome.py",
        "same_renewed(before.results[row], now.results[row], values)",
        "before.results[row] == now.results[row]",
    ),
    Mistake(
        "So is a request that is repeated, and with another value it is another one.",
        "headrace/core/engine.py",
        "            and all(same_renewed(one, other, values) for one, other in zip(known, now, strict=True))\n",
        "",
    ),
    Mistake(
        "Newer code that gives another reply in a replay is refused, and leaves nothing behind.",
        "headrace/core/engine.py",
        "return self.replayed > self.last_number()",
        "return False",
    ),
    Mistake(
        "A default that changes later leaves what is stored as it is.",
        "headrace/durability/migration.py",
        "migrated = fill(others, old, new, values)",
        "migrated = others",
    ),
    Mistake(
        "A default that cannot stand in what is stored is refused at start.",
        "headrace/durability/added_fields.py",
        "            if not is_stable:\n",
        "            if False:\n",
    ),
    Mistake(
        "A default that all records share and that can be changed is refused at start.",
        "headrace/wire/defaults.py",
        "    for part in parts_of(default):\n        check_shared(where, part)\n",
        "",
    ),
    Mistake(
        "A logged batch gives newer code the calls of then.",
        "headrace/durability/inbox/batch_calls.py",
        "    reset(given, added)\n",
        "",
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
    Mistake(
        "What a migration returns is a value of the declared type, also inside.",
        "headrace/durability/conversion.py",
        "            set_field(made, name, right)\n    return made\n",
        "    return made\n",
    ),
    Mistake(
        "If it cannot be one, nothing starts, and the store stays as it was.",
        "headrace/durability/migration.py",
        "sealed = seal(checked(new, operator.state))",
        "sealed = values.seal(new)",
    ),
)
