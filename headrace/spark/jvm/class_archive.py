"""Makes Spark start faster: the classes that its JVM loads are read and checked once, and kept in an archive.

Java calls this class data sharing. Rules:
1. The archive belongs to one Java and one Spark version, which are part of its name. In a virtual environment it is
   stored there and is deleted with it; otherwise in the user's cache.
2. A JVM that it does not fit ignores it silently. So it only changes the start time.

`headrace doctor --warm` makes it, by running what apps usually do.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark

from headrace.errors import JavaMissing
from headrace.spark.jvm.caches import alone, user_cache
from headrace.spark.kafka.connector import spark_jars

REHEARSAL = "import sys, headrace.spark.jvm.class_archive as here; here.rehearse(*map(here.Path, sys.argv[1:]))"
REHEARSAL_S_MAX = 1_800.0  # a minute, if nothing else runs


def place(home: Path) -> Path:
    """The path of the archive for this Java, whether it exists or not."""
    folder = Path(sys.prefix) / "share" / "headrace" if sys.prefix != sys.base_prefix else user_cache()
    files = [home / "lib" / "modules", *sorted(spark_jars().iterdir())]  # Java compares their times and sizes, too
    marks = [f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    digest = hashlib.sha256("\n".join(marks).encode()).hexdigest()[:12]
    return folder / f"spark-{pyspark.__version__}-{digest}.jsa"


def java_options(home: Path) -> str:
    """The options that make a JVM use the archive; none if there is no archive."""
    try:
        path = place(home)
    except (OSError, RuntimeError):  # an unusual Java, or no home directory
        return ""
    return f' "-XX:SharedArchiveFile={path}" -Xlog:cds=off -Xlog:cds+dynamic=off' if path.exists() else ""


def make(home: Path) -> Path:
    """Make the archive if it does not exist. In a virtual environment, archives of earlier versions are deleted."""
    path = place(home)
    if not path.exists():
        with alone(path.parent):
            if not path.exists():  # still not there
                print(f"Making an archive of Spark's classes (a minute, 200 MB) in {path.parent} ...", file=sys.stderr)
                write(path)
    return path


def write(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="headrace-warm-") as folder:
        made = path.with_name(f".{path.name}.{os.getpid()}")
        words = [sys.executable, "-c", REHEARSAL, str(made), folder]
        try:
            ran = subprocess.run(words, capture_output=True, text=True, timeout=REHEARSAL_S_MAX, check=False)
            if ran.returncode or not made.exists():
                raise JavaMissing(
                    f"the archive of Spark's classes could not be made: {(ran.stdout + ran.stderr)[-800:]}"
                )
            if sys.prefix != sys.base_prefix:
                for other in path.parent.glob("spark-*.jsa"):
                    other.unlink(missing_ok=True)
            os.replace(made, path)
        except subprocess.TimeoutExpired:
            raise JavaMissing(
                f"the run of Spark that makes the archive did not end within {REHEARSAL_S_MAX:.0f} s"
            ) from None
        finally:
            made.unlink(missing_ok=True)


def rehearse(archive: Path, folder: Path) -> None:
    """Run briefly what apps do; when the JVM ends, it records the classes that were loaded."""
    from headrace import App, Context, Runtime
    from headrace.spark.session import session
    from headrace.spark.transact import transact

    app = App("rehearsal")
    account = app.operator("account", state=int, changes=True)

    @account.register
    def add(ctx: Context, amount: int) -> int:
        ctx.put(ctx.get(0) + amount)
        return amount

    spark = session(java_options=f'-XX:TieredStopAtLevel=1 "-XX:ArchiveClassesAtExit={archive}"')
    spark.range(100).selectExpr("cast(id as string) as key", "id as amount").write.json(str(folder / "in"))
    now = {"availableNow": True}
    with Runtime(app, store=folder / "store") as runtime:
        rows = spark.readStream.schema("key string, amount long").json(str(folder / "in"))
        query = transact(rows, add, key="key", args=["amount"], runtime=runtime, name="calls", trigger=now)
        assert query is not None
        query.awaitTermination()
        runtime.drain()
    store = str(folder / "store")
    replies = spark.readStream.format("headrace.replies").load(store).writeStream.format("parquet").trigger(**now)
    replies.option("checkpointLocation", str(folder / "replies")).start(str(folder / "out")).awaitTermination()
    changes = spark.readStream.format("headrace.changes").load(store).groupBy("operator").count().writeStream
    changes.format("memory").queryName("changed").outputMode("complete").trigger(**now).start().awaitTermination()
    state = spark.read.format("headrace.state").option("operator", "account").load(store)
    state.join(spark.read.parquet(str(folder / "out"))).groupBy("status").sum("value").toPandas()
    spark.stop()
