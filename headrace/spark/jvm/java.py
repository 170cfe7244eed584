"""The Java that Spark needs: where to find one, and how to get one.

PySpark 4.3 runs on Java 17 or 21 and needs the module `jdk.incubator.vector`, which reduced Java installations lack. So
each candidate is tested by starting it with that module.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import JavaMissing
from headrace.spark.jvm.caches import alone

VERSIONS = (17, 21)
PLACES = (
    "/usr/lib/jvm/*",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
    "~/.sdkman/candidates/java/*",
    "~/.jdk/*",
    "~/.jdk/*/Contents/Home",
)
SIZE = "190 MB"
HINT = "install a Java 17 or 21 and set JAVA_HOME, or run: headrace doctor --install-java"


def candidates() -> Iterator[Path]:
    """Homes of Java installations, preferred ones first: JAVA_HOME, the one on the PATH, then the usual places."""
    if os.environ.get("JAVA_HOME"):
        yield Path(os.environ["JAVA_HOME"])
    on_path = shutil.which("java")
    if on_path is not None:
        yield Path(on_path).resolve().parent.parent
    for place in PLACES:
        pattern = os.path.expanduser(place)
        root, _, rest = pattern.partition("*")
        found = sorted(Path(root).glob("*" + rest)) if Path(root).is_dir() else ()
        yield from (home for home in found if not home.name.startswith("."))


def version_of(home: Path) -> int | None:
    """The major version of a Java that can run Spark; None if it cannot."""
    command = [str(home / "bin" / "java"), "--add-modules", "jdk.incubator.vector", "-version"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(\d+)', ran.stderr)
    return int(found.group(1)) if ran.returncode == 0 and found else None


def find_java() -> tuple[Path, int]:
    """Home and version of the Java to use. Raises `JavaMissing`, which lists what was found instead."""
    seen: dict[Path, str] = {}
    for home in candidates():
        if home.resolve() in seen:
            continue
        version = version_of(home)
        if version in VERSIONS:
            return home, version
        seen[home.resolve()] = f"{home} ({f'Java {version}' if version else 'does not start'})"
    others = f" Found only: {', '.join(seen.values())}." if seen else ""
    raise JavaMissing(f"Spark needs Java 17 or 21, and none was found.{others} To fix it: {HINT}")


def install_java() -> tuple[Path, int]:
    """The home of a Java, downloaded into the user's cache (~/.jdk) if this machine has none."""
    with contextlib.suppress(JavaMissing):
        return find_java()
    cache = Path.home() / ".jdk"
    with alone(cache):
        try:
            return find_java()  # another process has installed it
        except JavaMissing as missing:
            print(f"{missing}\nFetching a Java 17 ({SIZE}) into ~/.jdk ...", file=sys.stderr)
        try:
            download(cache)
        except Exception as error:
            raise JavaMissing(f"the download of Java failed: {error}. To fix it: {HINT}") from error
    return find_java()


def download(cache: Path) -> None:
    """Complete or absent: other processes may look into the cache at any time."""
    import jdk

    with tempfile.TemporaryDirectory(prefix=".new-", dir=cache) as folder:
        made = Path(jdk.install("17", path=folder))
        shutil.rmtree(cache / made.name, ignore_errors=True)  # it does not start
        made.rename(cache / made.name)
