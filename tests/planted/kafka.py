"""Mistakes that break the promises of the section "Kafka"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "Each request of a topic runs once and is answered once in the reply topic, even if the process is killed in "
        "the middle.",
        "headrace/spark/kafka/pipeline.py",
        'f"{self.checkpoint}/requests"',
        'f"{self.checkpoint}/requests-{time.time_ns()}"',
    ),
    Mistake(
        "A micro-batch of replies that was partly written is completed, and no reply is there twice.",
        "headrace/spark/kafka/pipeline.py",
        "                rows = without(rows, known)\n",
        "",
    ),
    Mistake(
        "What was written of the last batch is found, however far back it starts.",
        "headrace/spark/kafka/topics.py",
        "is_done[mark.partition] |= int(number) < batch",
        "is_done[mark.partition] |= int(number) <= batch",
    ),
    Mistake(
        "A message that is not a call is refused by itself, with the reason in its reply and in the dead letters.",
        "headrace/durability/inbox/batch_calls.py",
        "    if isinstance(call, BadRequest):\n        return given, call\n",
        "    if isinstance(call, BadRequest):\n        raise call\n",
    ),
    Mistake(
        "A query that fails is started again, until it fails without having made progress.",
        "headrace/spark/kafka/pipeline.py",
        'self._batch, self._tries = done["batchId"], 0',
        'self._batch = done["batchId"]',
    ),
)
