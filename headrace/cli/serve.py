"""`headrace run`, `headrace call` and `headrace rescale`: an app behind HTTP, and requests to it."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from rich import markup
from rich.console import Console

from headrace.config import Config
from headrace.errors import BadRequest, Stuck, Unreachable
from headrace.gateway.server import LOOPBACK, gateway, listen, server_of
from headrace.runtime import gc_settings
from headrace.runtime.cluster import Cluster
from headrace.runtime.driver import Driver
from headrace.runtime.inprocess import Runtime
from headrace.runtime.loading import load

if TYPE_CHECKING:
    from headrace.spark.kafka.pipeline import Pipeline

CLOSE_PATIENCE_S = 2.0  # for a function that runs when the process is to end
LISTENER = "HEADRACE_LISTENER"  # an environment variable: process and file descriptor
NAMED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)  # an argument by name


@dataclasses.dataclass(frozen=True)
class FromKafka:
    """The values of `--kafka` and its options."""

    brokers: str
    requests: str
    replies: str
    properties: str | None = None
    checkpoint: str | None = None


@dataclasses.dataclass(frozen=True)
class OnSpark:
    """The values of `--master` and `--conf`."""

    master: str
    settings: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, master: str, settings: list[str]) -> OnSpark:
        pairs = [setting.partition("=") for setting in settings]
        for name, equals, _ in pairs:
            if not (equals and name.startswith("spark.")):
                raise BadRequest(f"--conf {name}: give a Spark setting with its value, as in spark.cores.max=8")
        return cls(master, {name: value for name, _, value in pairs})

    @property
    def is_local(self) -> bool:
        from headrace.spark.session import is_local

        return is_local(self.master)


def serve(
    target: str,
    host: str,
    port: int,
    workers: int,
    mode: str,
    store: str | None = None,
    kafka: FromKafka | None = None,
    on: OnSpark | None = None,
    config: Config | None = None,
    *,
    check: bool = False,
    accept_logged: bool = False,
) -> None:
    """Run the app named by `target` and serve it until it is interrupted. SIGTERM ends it cleanly, too."""
    signal.signal(signal.SIGTERM, leave)
    app = load(target)
    listener = inherited_listener() or listen(host, port)
    spare = listener.dup()  # for this command started again: requests wait in it meanwhile
    url = f"http://{host}:{listener.getsockname()[1]}"
    if workers == 1 and mode == "ordered":
        raise BadRequest("the ordered mode needs several workers: add --workers 2")
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        if kafka is not None and store is None:
            raise BadRequest("requests from Kafka go through a store: add --store, a folder or s3://bucket/prefix")
        is_hosted = on is not None and not on.is_local  # otherwise workers are processes beside Spark
        if on is not None and on.settings and kafka is None and not is_hosted:
            raise BadRequest(f"--master {on.master} without --kafka does not start Spark: remove --conf")
        spark = stack.enter_context(in_spark(kafka, on)) if kafka is not None or is_hosted else None
        pipeline = None if kafka is None else stack.enter_context(piped(kafka, str(store), spark))
        if is_hosted:
            from headrace.spark.hosting.spark_cluster import SparkCluster

            runtime: Driver = SparkCluster(
                target, workers, config, mode=mode, store=store, spark=spark, accept_logged=accept_logged
            )
        elif workers == 1:
            runtime = Runtime(app, config, store=store, check=check, accept_logged=accept_logged)
        else:
            runtime = Cluster(target, workers, config, mode=mode, store=store, accept_logged=accept_logged)
        stack.callback(runtime.close, CLOSE_PATIENCE_S)
        if pipeline is not None:
            stack.callback(pipeline.stop_requests)
            pipeline.start(runtime.metrics()["epochs"])
        explain(runtime, url, store)
        if kafka is not None:
            print(
                f"Reading requests from {kafka.requests} at {kafka.brokers}, writing replies to {kafka.replies}.",
                flush=True,
            )
        web = gateway(runtime, hosts=(*LOOPBACK, host))
        gc_settings.freeze_gc()
        server = server_of(web)
        for each in (runtime, pipeline):
            if each is not None:
                threading.Thread(target=end_with, args=(each, server, pipeline), daemon=True).start()
        server.run(sockets=[listener])
    try:
        runtime.wait()
    except Stuck as stuck:
        if store is None:
            raise
        start_again(spare, stuck)
    if pipeline is not None:
        pipeline.wait()


def inherited_listener() -> socket.socket | None:
    """The socket that this process listened on before it started itself again."""
    pid, _, fd = os.environ.pop(LISTENER, "").partition(":")
    return socket.socket(fileno=int(fd)) if pid == str(os.getpid()) else None


def start_again(listener: socket.socket, stuck: Stuck) -> None:
    """Start this command again, in the same process and on the same port. The function that does not return is gone
    with its thread, and its transaction aborts by decree in the replay."""
    print(f"{stuck.code}: {stuck}", "Starting again.", sep="\n", file=sys.stderr, flush=True)
    os.set_inheritable(listener.fileno(), True)
    os.execve(sys.executable, sys.orig_argv, os.environ | {LISTENER: f"{os.getpid()}:{listener.fileno()}"})


@contextlib.contextmanager
def in_spark(kafka: FromKafka | None, on: OnSpark | None) -> Iterator[Any]:
    """A Spark session of its own."""
    from headrace.spark import session
    from headrace.spark.kafka import connector

    found = None if kafka is None else connector.find()  # otherwise your own Spark settings may name it
    settings = {} if kafka is None else {"spark.task.maxFailures": "1"}  # a task that is tried again writes again
    settings |= (found.settings if found else {}) | (on.settings if on else {})
    master = f"local[{max(2, os.cpu_count() or 2)}]" if on is None else on.master
    interrupted = signal.getsignal(signal.SIGINT)
    spark = session("headrace", master=master, **settings)
    signal.signal(signal.SIGINT, interrupted)  # Spark would stop all jobs at once, the workers' too
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def piped(kafka: FromKafka, store: str, spark: Any) -> Iterator[Pipeline]:
    """A pipeline, to be started when the app runs."""
    from headrace.spark.kafka.pipeline import Pipeline
    from headrace.spark.kafka.topics import Kafka, read_properties

    client = {} if kafka.properties is None else read_properties(kafka.properties)
    topics = tuple(topic.strip() for topic in kafka.requests.split(","))
    wanted = Kafka(kafka.brokers, topics, kafka.replies, client)
    logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)  # the pipeline reports failures
    with Pipeline(wanted, store, spark, checkpoint=kafka.checkpoint) as pipeline:
        yield pipeline


def leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def end_with(part: Driver | Pipeline, server: uvicorn.Server, pipeline: Pipeline | None) -> None:
    """Stop serving a runtime that has stopped itself (another one took over, the disk is full). Its successor writes
    the replies that are not in Kafka yet."""
    try:
        part.wait()
    except BaseException:  # reported when the server has ended
        if pipeline is not None:
            pipeline.abandon()
    server.should_exit = True


def explain(runtime: Driver, url: str, store: str | None) -> None:
    out = Console(highlight=False, soft_wrap=True)
    out.print(
        f"[bold]{runtime.app.name}[/] is served at [cyan]{url}[/]  "
        f"(Ctrl-C stops it; its state is in {'memory' if store is None else markup.escape(store)})"
    )
    figures = runtime.metrics()
    if figures["workers"] > 1:
        out.print(
            f"{figures['workers']} workers, {figures['mode']} mode: headrace rescale <workers> --url {url}",
            markup=False,
        )
    functions = [runtime.engine.program.functions[function].signature for function in runtime.app.functions]
    for signature in functions:
        out.print(f"  {signature}", markup=False)
    if functions:
        example = " ".join(f"<{name}>" for name in functions[0].names)
        out.print(f"Try: headrace call {functions[0].name} <key> {example} --url {url}", markup=False)


def call(
    url: str, function: str, key: str | int, args: list[str], request_id: str | None
) -> tuple[str, dict[str, Any]]:
    """The status and the answer of one call."""
    wanted = json.dumps({"function": function, "key": key, "request_id": request_id})
    return post(url, "/v1/call", f'{wanted[:-1]}, "args": {arguments(args)}}}')


def arguments(given: list[str]) -> str:
    """The arguments in JSON, by position, or by name if they are name=value. Numbers are sent as they were written."""
    named = [(found[1], found[2]) for found in map(NAMED.match, given) if found]
    if not named:
        return f"[{', '.join(map(in_json, given))}]"
    if len(named) < len(given) or len(dict(named)) < len(named):
        raise BadRequest(
            "give all arguments by position, or each once by name; text with = in it is written as JSON, in quotes: "
            "'\"a=b\"'"
        )
    return f"{{{', '.join(f'{json.dumps(name)}: {in_json(value)}' for name, value in named)}}}"


def post(url: str, path: str, body: str) -> tuple[str, dict[str, Any]]:
    """The status and the answer of a request with a body in JSON."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise BadRequest(f"{url!r} is not a valid URL; give one such as http://127.0.0.1:8090")
    request = urllib.request.Request(url.rstrip("/") + path, body.encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        answer = json.load(error)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(f"nothing answers at {url}: {reason}. Is `headrace run` running?") from None
    return answer["status"], answer


def in_json(text: str) -> str:
    """An argument that is not JSON is a text."""
    try:
        json.loads(text, parse_constant=no_json)
    except (ValueError, RecursionError):
        return json.dumps(text)
    return text


def no_json(name: str) -> None:
    raise ValueError(f"{name} is Python's, not JSON's")
