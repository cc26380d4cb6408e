"""A pipeline as a stage of a data library: batches of columns in, the same with results out."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.base.errors import UserError
from triptych.client.wire import Parameter
from triptych.interface import api
from triptych.interface.bulk.arrow import ArrowColumns, make_chunk, to_table
from triptych.interface.bulk.files import (
    ERROR,
    AnswerColumn,
    Answers,
    RowChunk,
    Scan,
    check_columns,
    name_columns,
)
from triptych.interface.bulk.jobs import JobOptions
from triptych.interface.bulk.session import Session

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray


class Predictor:
    """A served pipeline as a function of batches, alone or in Ray Data.

    >>> ds.map_batches(Predictor, fn_constructor_args=("minilm",), batch_size=1024, concurrency=1)

    It is pickled as its arguments, so that each process has a server or connections of its own.
    Calls from several threads run one after the other.

    Args:
        name: Name of the pipeline.
        repository: Folder of a model repository, which a server is started on until `close`; by
            default ``model_repository``.
        url: gRPC address of a running server instead.
        columns: Column of a batch by input of the pipeline, if its name differs; `text` for the
            prompts of a pipeline that generates text.
        parameters: Parameters of every request.
        timeout_s: Maximum time in seconds for a request, and for the server to be unreachable;
            None for 30, or 600 for a pipeline that generates text.
        fixed_size: Whether vectors are lists of a fixed size. pyarrow reads no such list from a
            Parquet file in which one is null, because its row failed.

    Raises:
        UserError: The pipeline is not built or not served, or an argument is not supported by it.
    """

    def __init__(
        self,
        name: str,
        *,
        repository: Path | str | None = None,
        url: str | None = None,
        columns: Mapping[str, str] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        timeout_s: float | None = None,
        fixed_size: bool = True,
    ) -> None:
        self._make = partial(
            Predictor,
            name,
            repository=repository,
            url=url,
            columns=columns,
            parameters=parameters,
            timeout_s=timeout_s,
            fixed_size=fixed_size,
        )
        if repository is not None and url is not None:
            raise UserError(
                "repository, url",
                "cannot be combined",
                given=f"{repository} and {url}",
                remedy="Remove one of them",
            )
        if url is None:
            repository = repository or api.REPOSITORY
        pairs = [f"{key}={json.dumps(value)}" for key, value in (parameters or {}).items()]
        options = JobOptions(name, url or "", columns or {}, {}, pairs, timeout_s)
        self._session = Session(options, repository)
        self._columns = [*self._session.job.outputs, AnswerColumn(ERROR, ERROR)]
        self._fixed = fixed_size
        self._lock = threading.Lock()
        self._arrow: dict[tuple[str, ...], ArrowColumns] = {}  # By the columns of a batch

    def __call__(self, batch: Mapping[str, NDArray[Any]] | pa.Table) -> pa.Table:
        """Return the rows of a batch with their results, in order, as a table of Arrow.

        Vectors are lists of a fixed size if `fixed_size`, other outputs of several elements lists,
        and entities lists of structs. `error` is null, or the reason why the row has no result. An
        output with the name of a column of the batch comes as ``NAME.output``.

        Args:
            batch: Table of Arrow, or columns of numpy of the shape ``[rows, …]``.

        Raises:
            UserError: A column is missing, or its values have no common type; the server is
                unreachable, or no single row is to blame for an error.
        """
        rows = to_table(batch)
        names = tuple(rows.column_names)
        session = self._session
        wanted = session.job.wanted(Scan(rows.num_rows, names))
        check_columns(wanted, names)
        if names not in self._arrow:
            pipeline = session.options.pipeline
            columns = name_columns(pipeline, self._columns, names)
            self._arrow[names] = ArrowColumns(columns, fixed=self._fixed)
        with self._lock:
            size = session.job.chunk_rows
            chunks = (
                make_chunk(rows.slice(first, size), wanted)
                for first in range(0, rows.num_rows, size)
            )
            answers = session.run(self._send(chunks))
        return self._arrow[names].append(rows, answers)

    def close(self) -> None:
        """Close the connections, and stop the server that was started; also done at exit."""
        self._session.close()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[partial[Predictor], tuple[()]]:
        return self._make, ()

    async def _send(self, chunks: Iterator[RowChunk]) -> Answers:
        whole: dict[str, list[object]] = {column.output: [] for column in self._columns}
        async with aclosing(self._session.send(chunks)) as answered:
            async for _, answers in answered:
                for name, values in answers.items():
                    whole[name] += values
        return whole
