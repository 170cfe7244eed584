"""`headrace snapshot` and `headrace state`: the durable snapshots, and the state at the end of any epoch."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.cli.logs import in_json
from headrace.durability.migration import LooseValues
from headrace.durability.reading.store_reader import StoreReader
from headrace.durability.snapshots.manifests import Manifest
from headrace.errors import BadRequest, UnknownFunction
from headrace.runtime.loading import load
from headrace.wire.values import shown


def list_snapshots(store: str, as_json: bool) -> None:
    past = StoreReader(store)
    rows = [row_of(manifest) for manifest in past.snapshots.manifests()]
    if as_json:
        print(in_json({"store": past.store.url, "snapshots": rows}))
        return
    table = Table("epoch", "term", "complete", "layers", "objects", "bytes", "log from")
    table.add_column("manifest", overflow="fold")  # in full, even in a narrow terminal
    for row in rows:
        cells = [row["epoch"], row["term"], "yes" if row["complete"] else escape(row["trouble"])]
        cells += [row.get(name, "") for name in ("layers", "objects", "bytes", "position")]
        table.add_row(*map(str, cells), row["name"])
    out = Console(highlight=False)
    out.print(table if rows else f"{past.store.url} has no snapshot yet", markup=False)


def row_of(manifest: Manifest) -> dict[str, Any]:
    row = {"epoch": manifest.epoch, "term": manifest.term, "name": manifest.name, "complete": manifest.is_complete}
    if not manifest.is_complete:
        return row | {"trouble": manifest.trouble}
    return row | {
        "layers": len(manifest.layers),
        "objects": len(manifest.body.objects()),
        "bytes": manifest.bytes,
        "position": manifest.position,
        "code": manifest.fingerprint,
    }


def show_snapshot(store: str, epoch: int | None, as_json: bool) -> None:
    past = StoreReader(store)
    loaded = past.snapshots.load(epoch)
    if loaded is None:
        raise BadRequest(
            f"{past.store.url} has no snapshot yet: run `headrace snapshot now` while the app runs to take one"
        )
    manifest = loaded.manifest
    layers: list[dict[str, Any]] = [
        {
            "epoch": layer.epoch,
            "rows": sum(stored.rows for stored in layer.objects),
            "bytes": layer.bytes,
            "objects": [stored.name for stored in layer.objects],
        }
        for layer in manifest.layers
    ]
    metadata = manifest.metadata
    sections = (metadata.sequencing, metadata.counts, metadata.sources, metadata.ledger)
    meta = {
        name: value
        for section in sections
        for name, value in msgspec.structs.asdict(section).items()
        if isinstance(value, int)
    }
    entities = {operator: len(table) for operator, table in loaded.tables.items()}
    row = row_of(manifest) | {"entities": entities, "meta": meta, "layers": layers}
    if as_json:
        print(in_json(row))
        return
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"{manifest.name}: epoch {manifest.epoch}, term {manifest.term}, {manifest.bytes:,} bytes", markup=False)
    out.print(f"the log continues with record {manifest.position}; code {manifest.fingerprint}", markup=False)
    for operator, count in entities.items():
        out.print(f"  {count:,} entities of {operator}", markup=False)
    for layer in layers:
        out.print(
            f"  layer up to epoch {layer['epoch']}: {layer['rows']:,} rows, {layer['bytes']:,} bytes", markup=False
        )
        for name in layer["objects"]:
            out.print(f"    {name}", markup=False)
    out.print("  " + ", ".join(f"{name} {value}" for name, value in meta.items()), markup=False)


# --- state ------------------------------------------------------------------------------------------------------------


def tables_at(store: str, target: str | None, epoch: int | None) -> tuple[int, dict[str, dict[Any, Any]]]:
    """The sealed state at the end of an epoch. Without the app's code, that of the newest snapshot up to there."""
    past = StoreReader(store, None if target is None else load(target))
    if target is not None:
        replay = past.replay(epoch)
        return replay.epoch, replay.state()
    loaded = past.snapshots.load(epoch)
    if loaded is None:
        raise BadRequest(f"{past.store.url} has no snapshot yet: add --app MODULE:APP to replay its log")
    return loaded.manifest.epoch, loaded.tables


def table_of(tables: dict[str, dict[Any, Any]], operator: str, target: str | None) -> dict[Any, Any]:
    if operator not in tables and target is not None:
        raise UnknownFunction(f"no operator {shown(operator)}; there are: {', '.join(tables)}")
    return tables.get(operator, {})


def get_state(store: str, target: str | None, epoch: int | None, operator: str, key: Any, as_json: bool) -> bool:
    at, tables = tables_at(store, target, epoch)
    table = table_of(tables, operator, target)
    exists = key in table
    state = LooseValues().unseal(table[key]) if exists else None
    if as_json:
        print(in_json({"epoch": at, "exists": exists, "state": state}))
    else:
        Console(stderr=True, highlight=False).print(f"at the end of epoch {at}", markup=False)
        print(in_json(state) if exists else f"{operator} {key!r} has no state")
    return exists


def scan_state(
    store: str, target: str | None, epoch: int | None, operator: str, limit: int | None, as_json: bool
) -> None:
    at, tables = tables_at(store, target, epoch)
    table, values = table_of(tables, operator, target), LooseValues()
    keys = sorted(table, key=lambda key: (type(key).__name__, key))
    shown_keys = keys if limit is None else keys[:limit]
    if as_json:
        for key in shown_keys:
            print(in_json({"key": key, "state": values.unseal(table[key])}))
        return
    out = Console(highlight=False, soft_wrap=True)
    for key in shown_keys:
        out.print(f"{key!r}  {in_json(values.unseal(table[key]))}", markup=False)
    more = "" if len(shown_keys) == len(keys) else f", {len(shown_keys):,} of which are shown"
    Console(stderr=True, highlight=False).print(f"{len(keys):,} entities at the end of epoch {at}{more}", markup=False)
