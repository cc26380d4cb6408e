"""Bulk run on a cluster: Ray Data gives the parts of a corpus to processes that infer and write.

A process that ends is replaced, and its part is written again under the same name.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.base.cache import sha256_of
from triptych.base.errors import UserError
from triptych.base.extras import imports_of_extra
from triptych.client import ServerUnreachableError
from triptych.interface.bulk.arrow import (
    ArrowColumns,
    Parquet,
    RowGroups,
    original_rows,
    read_schema,
)
from triptych.interface.bulk.corpus import (
    CorpusPart,
    Output,
    PartRecord,
    open_store,
    plan_parts,
    unreadable,
)
from triptych.interface.bulk.files import (
    ERROR,
    AnswerColumn,
    RowChunk,
    Table,
    name_columns,
    open_rows,
)
from triptych.interface.bulk.jobs import JobOptions, prepare, wanted_columns
from triptych.interface.bulk.session import Session
from triptych.repository.manifest import build_id

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ATTEMPTS = 3
"""Number of attempts at a part while the server of its process ends, or no file can be written."""
_PAUSE_S = 5.0
_MAX_BLOCKS = 10_000
_STORE_BYTES = 100_000_000
"""Memory of Ray's object store in a local cluster; rows do not pass through it."""
_MAX_REASONS = 3
_SCRATCH = "triptych-part-"


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(JobOptions):
    """Options of a bulk run on a cluster."""

    file: str  # Path or URI of the files, with ``*``
    out: str  # Path or URI of the folder of results
    address: str  # Address of the cluster; `auto`, or `local` for a cluster on this machine
    repository: Path | None = None  # Folder of the model repository on each node; None: use `url`
    build: str = ""  # ID of the build in the repository
    max_errors: int | None = None  # Maximum number of failed rows; None for any number
    part_bytes: int = 32 << 20  # Size from which a Parquet file is divided
    price_per_hour: float | None = None  # Price of a process per hour; None for no cost


@dataclass
class ClusterProgress:
    """Progress of a bulk run on a cluster."""

    parts: int  # Number of parts
    done: int = 0  # Number of parts written, by earlier runs too
    earlier: int = 0  # Number of rows written by earlier runs
    rows: int = 0  # Number of rows written, by earlier runs too
    failed: int = 0  # Number of rows without a result
    seconds: float = 0.0  # Time since this run began
    cost_per_million: float | None = None  # Price of a million rows; None without a price
    tokens: int = 0  # Number of their tokens; 0 if unknown
    processes: int = 0  # Number of processes that infer
    times: dict[str, float] = field(default_factory=dict)  # Seconds of all processes by their use

    @property
    def rows_per_s(self) -> float:
        """Rows per second of this run, of all processes."""
        return (self.rows - self.earlier) / self.seconds if self.seconds else 0.0

    def add(self, record: PartRecord) -> None:
        """Add a written part."""
        self.done += 1
        self.rows += record.rows
        self.failed += record.failed
        self.tokens += record.tokens
        for name, spent in record.times.items():
            self.times[name] = self.times.get(name, 0.0) + spent

    def describe(self) -> str:
        """Return the rates of this run, the shares of its time, and its cost, as a text."""
        texts, whole = [f"{self.rows_per_s:,.0f} rows/s"], sum(self.times.values())
        if self.tokens:
            texts.append(f"{self.rows_per_s * self.tokens / self.rows:,.0f} tokens/s")
        texts += [f"{name} {spent / whole:.0%}" for name, spent in self.times.items()]
        if self.cost_per_million is not None:
            texts.append(f"{self.cost_per_million:.3g} per million rows")
        return ", ".join(texts)


def run_on_cluster(
    options: ClusterOptions, report: Callable[[ClusterProgress], None]
) -> ClusterProgress:
    """Infer a corpus on a cluster of Ray; `report` is called after each part.

    A run that was interrupted is continued: parts that are written are not read again.

    Raises:
        UserError: The corpus, the output, the cluster or the pipeline cannot be used, or there are
            more than `max_errors` failed rows.
    """
    if options.repository is not None:
        options = replace(options, build=build_id(options.repository, options.pipeline))
    parts, files = plan_parts(options.file, options.part_bytes)
    output = Output(options.out)
    records = output.start({**options.identity(), "files": files, "build": options.build})
    output.abort_uploads()
    progress = ClusterProgress(len(parts))
    for record in records.values():
        progress.add(record)
    progress.earlier, began = progress.rows, time.monotonic()
    waiting = [part for part in parts if part.number not in records]
    reasons: list[str] = []
    if waiting:
        with _cluster(options.address) as ray:
            for told in _results(ray, options, waiting, progress):
                if "record" not in told:
                    raise UserError(**told)
                progress.add(PartRecord(*told["record"]))
                progress.seconds = time.monotonic() - began
                if options.price_per_hour is not None and progress.rows_per_s:
                    node_s = progress.processes / progress.rows_per_s
                    progress.cost_per_million = options.price_per_hour / 3600 * 1e6 * node_s
                report(progress)
                reasons = [*reasons, *told["reasons"]][:_MAX_REASONS]
                if options.max_errors is not None and progress.failed > options.max_errors:
                    raise UserError(
                        "--max-errors",
                        "is less than the number of failed rows",
                        given=f"{progress.failed:,} failed rows. The first: {'; '.join(reasons)}",
                        remedy="Correct the rows, or allow more, and run the same command again",
                    )
    return progress


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Yield Ray, connected while the block runs. A cluster of this machine listens on loopback."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else its notes are among ours
    with imports_of_extra("ray", "--ray"):
        import ray
        import ray.data
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address != "local":
            ray.init(address, **quiet)
    except ConnectionError as error:
        if address != "auto":
            remedy = "Give the address of a running cluster, auto, or local"
            given = f"{address}: {error!s:.300}"
            raise UserError("--ray", "is not reached", given=given, remedy=remedy) from error
    try:
        if not ray.is_initialized():
            ray.init(
                "local",
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield ray
    except Exception as error:
        # Ray raises plain exceptions where a node ends early.
        if type(error) is not Exception and not isinstance(error, ray.exceptions.RayError):
            raise
        remedy = "Run the same command again: parts with a record are not read again"
        given = f"{error!s:.300}"
        raise UserError("--ray", "lost its cluster", given=given, remedy=remedy) from error
    finally:
        ray.shutdown()


def _results(
    ray: Any, options: ClusterOptions, parts: list[CorpusPart], progress: ClusterProgress
) -> Iterator[dict[str, Any]]:
    """Yield a record with reasons of failed rows for each part, or the fields of a `UserError`.

    There is one process for each GPU, or for each node of a cluster without GPUs.
    """
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = [node for node in alive if node.get("CPU")]  # without a head that runs nothing
    if not nodes:  # Ray would wait without end
        raise UserError(
            "--ray",
            "must be a cluster with a node that has CPUs",
            given=f"{options.address}, whose nodes have none",
            remedy="Start its nodes first: there is one process for each node or GPU",
        )
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if gpus and options.repository is not None:
        count, needed = gpus, {"num_gpus": 1}
    else:
        most = min(int(node["CPU"]) for node in nodes)
        count, needed = len(nodes), {"num_cpus": most // 2 + 1}
    rows = ray.data.from_items(
        [{"part": json.dumps(part)} for part in parts],
        override_num_blocks=min(len(parts), _MAX_BLOCKS),
    )
    progress.processes = count
    pool = ray.data.ActorPoolStrategy(size=count)
    done = rows.map_batches(
        PartWorker, fn_constructor_args=(options,), batch_size=1, compute=pool, **needed
    )
    for row in done.iter_rows():
        yield json.loads(row["result"])


class PartWorker:
    """Process of a cluster: one server or connection, and one part after the other."""

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self._session: Session | None = None
        self._used: dict[str, float] = {}  # `Session.use` at the end of the part before

    def __call__(self, batch: dict[str, NDArray[np.object_]]) -> dict[str, list[str]]:
        """Return the results of parts as JSON; see `_results`."""
        return {"result": [json.dumps(self._told(text)) for text in batch["part"]]}

    def _told(self, text: str) -> dict[str, Any]:
        number, path, groups = json.loads(text)
        for attempt in range(_ATTEMPTS):
            try:
                return self._write(CorpusPart(number, path, groups and tuple(groups)))
            except (UserError, OSError) as error:
                # A full disk, or a store that is away.
                of_files = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
                own = self._options.repository is not None
                of_server = own and isinstance(error.__cause__, ServerUnreachableError)
                if not (of_files or of_server) or attempt == _ATTEMPTS - 1:
                    if isinstance(error, OSError):
                        error = unreadable("--out", self._options.out, error)
                    told = dict(error.as_dict())
                    told["field"] = re.sub(rf".*/{_SCRATCH}[^/]*/[^:]*", path, told["field"])
                    return told
                if of_files:
                    time.sleep(_PAUSE_S)
                elif self._session is not None:
                    self._session.close()
                    self._session = None
        raise AssertionError("unreachable")

    def _write(self, part: CorpusPart) -> dict[str, Any]:
        began, options = time.monotonic(), self._options
        if self._session is None:
            folder = options.repository
            if folder is not None and build_id(folder, options.pipeline) != options.build:
                raise UserError(
                    "--repository",
                    "has another build than the one that the run began with",
                    given=folder,
                    remedy="Give every node the same model repository",
                )
            self._session = Session(options, folder)
            self._used = self._session.use()
        times = dict.fromkeys(("read", "tokenize", "core", "write"), 0.0)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH) as scratch:
            results = Path(scratch, "results")
            with _timed(times, "read"):
                table = self._open(part, Path(scratch))
            rows, reasons = self._session.run(self._infer(self._session, table, results, times))
            output = Output(options.out)
            with _timed(times, "write"), results.open("rb") as file:
                size, digest = results.stat().st_size, sha256_of(results)
                output.publish(f"{part.name}.parquet", file)
        seconds = time.monotonic() - began
        before, self._used = self._used, self._session.use()
        used = {name: value - before.get(name, 0.0) for name, value in self._used.items()}
        tokens = int(used.pop("tokens", 0))
        waited = seconds - sum(times.values())
        for name, busy in used.items():
            times[name] = busy / (sum(used.values()) or 1.0) * waited
        record = PartRecord(rows, len(reasons), seconds, size, digest, tokens, times)
        output.add(part, record)
        return {"record": record, "reasons": reasons[:_MAX_REASONS]}

    def _open(self, part: CorpusPart, scratch: Path) -> Table:
        """Return the rows of a part; a text file of another file system is copied first."""
        options = self._options
        store, _ = open_store("--file", options.file)
        suffix = Path(part.path).suffix.lower() if options.suffix is None else options.suffix
        path = scratch / Path(part.path).name
        try:
            if suffix == ".parquet":
                return Parquet(Path(part.path), store, part.groups)
            with store.open_input_stream(part.path) as source, path.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        except OSError as error:
            raise unreadable("--file", part.path, error) from error
        return open_rows(path, options.encoding, suffix)

    async def _infer(
        self, session: Session, table: Table, out: Path, times: dict[str, float]
    ) -> tuple[int, list[str]]:
        """Write rows with their results, and return their number and the reasons of failed ones."""
        options, job = self._options, session.job
        scan = table.scan()
        wanted = wanted_columns(job, options, scan, table.path) if scan.rows else {}
        columns = [*job.outputs, AnswerColumn(ERROR, ERROR)]
        named = name_columns(options.pipeline, columns, scan.columns)
        results = ArrowColumns(named, fixed=False)
        read = _timed_each(table.chunks(wanted, job.chunk_rows, 0), times)
        chunks = (prepare(chunk, options) for chunk in read)
        rows, reasons = 0, list[str]()
        with RowGroups(out, read_schema(table, scan.columns)) as groups:
            async with aclosing(session.send(chunks)) as answered:
                async for chunk, answers in answered:
                    with _timed(times, "write"):
                        original = original_rows(chunk, scan.columns)
                        groups.add(results.append(original, answers))
                    rows += chunk.count
                    reasons += [str(error) for error in answers[ERROR] if error is not None]
        return rows, reasons


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of the block to those of a name."""
    began = time.monotonic()
    yield
    times[name] += time.monotonic() - began


def _timed_each(chunks: Iterator[RowChunk], times: dict[str, float]) -> Iterator[RowChunk]:
    while True:
        with _timed(times, "read"):
            chunk = next(chunks, None)
        if chunk is None:
            return
        yield chunk
