"""Mistakes that break the promises of the section "Structure of the code"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "A folder imports only those below it.",
        "headrace/core/ledger.py",
        "from headrace.errors import RequestIdReused\n",
        "from headrace.durability.store import check_name\nfrom headrace.errors import RequestIdReused\n",
    ),
    Mistake(
        "Only the Spark folder imports pyspark.",
        "headrace/runtime/hosts.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\nfrom pyspark.sql import SparkSession\n",
    ),
    Mistake(
        "The pure folders import no clock, socket, thread or file.",
        "headrace/core/journal.py",
        "from collections import deque\n",
        "import time\nfrom collections import deque\n",
    ),
)
