"""`headrace doctor`: whether everything is there that Headrace needs, and if not, what to do."""

from __future__ import annotations

import importlib.metadata
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from headrace.errors import HeadraceError

FREE_BYTES_MIN = 1 << 30


class Problem(Exception):
    """Something is wrong; the message says what to do."""


class MissingOptional(Exception):
    """An optional part is missing; the message says what it is for, and how to get it."""


def python() -> str:
    return sys.version.split()[0]


def packages() -> str:
    versions = {name: importlib.metadata.version(name) for name in ("pyspark", "pandas", "pyarrow")}
    if not versions["pyspark"].startswith("4.3."):
        raise Problem(f"pyspark {versions['pyspark']}: Headrace is made for 4.3; pip install 'pyspark==4.3.*'")
    if int(versions["pandas"].partition(".")[0]) >= 3:
        raise Problem(f"pandas {versions['pandas']}: PySpark 4.3 needs pandas below 3; pip install 'pandas<3'")
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def java(install: bool) -> str:
    from headrace.spark.jvm.java import find_java, install_java

    home, version = install_java() if install else find_java()
    return f"Java {version} at {home}"


def archive(warm: bool) -> str:
    from headrace.spark.jvm import class_archive
    from headrace.spark.jvm.java import find_java

    home, _ = find_java()
    if warm:
        class_archive.make(home)
    if not class_archive.java_options(home):
        raise MissingOptional(
            "Spark could start in 60% of the time: headrace doctor --warm (takes a minute, and 200 MB)"
        )
    return f"Spark's classes are archived in {class_archive.place(home)}"


def kafka(install: bool) -> str:
    from headrace.spark.kafka import connector

    found = connector.fetch() if install else connector.find()
    if found is None:
        raise MissingOptional(
            f"Spark's connector is missing; headrace run --kafka needs it. To install it, {connector.hint()}"
        )
    return f"Spark's connector {found.version} at {found.jars[0].parent if found.jars else connector.spark_jars()}"


def spark() -> str:
    from headrace.spark import session
    from headrace.spark.kafka import connector

    found = connector.find()
    made = session("headrace-doctor", master="local[1]", **(found.settings if found else {}))
    try:
        rows = made.range(1_000).count()
        has_kafka = connector.is_loaded(made)
    finally:
        made.stop()
    if rows != 1_000:
        raise Problem(f"Spark counted {rows} rows of 1,000: reinstall pyspark")
    if found is not None and not has_kafka:
        raise Problem(
            f"Spark starts, but does not load its Kafka connector {found.version}: delete {connector.cache()}"
        )
    return f"starts and runs a job{', and has its Kafka connector' if has_kafka else ''}"


def port_free(port: int) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise Problem(
                f"port {port} is in use: stop the process that uses it, or use headrace run --port N"
            ) from None
    return f"{port} is free"


def disk() -> str:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES_MIN:
        raise Problem(f"only {free >> 20} MiB free in {folder}: free some space, or set TMPDIR to another folder")
    return f"{free >> 30} GiB free in {folder}"


def examine(install_java: bool, quick: bool, port: int, install_kafka: bool = False, warm: bool = False) -> bool:
    """Run every check and print its result. Returns True if all is well; optional parts may be missing."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("Python", python),
        ("packages", packages),
        ("Java", lambda: java(install_java)),
        ("archive", lambda: archive(warm)),
        ("Kafka", lambda: kafka(install_kafka)),
        ("port", lambda: port_free(port)),
        ("disk", disk),
    ]
    if not quick:
        checks.append(("Spark", spark))
    out, well = Console(highlight=False), True
    for name, check in checks:
        try:
            with out.status(f"checking {name} ..."):
                found = check()
        except MissingOptional as error:
            out.print(f"[yellow]- {name:9}[/] {escape(str(error))}")
        except (Problem, HeadraceError, importlib.metadata.PackageNotFoundError, OSError) as error:
            well = False
            out.print(f"[red]✗ {name:9}[/] {escape(str(error))}", markup=True)
        else:
            out.print(f"[green]✓ {name:9}[/] {found}")
    out.print("All checks passed." if well else "Some checks failed: see the lines above.")
    return well
