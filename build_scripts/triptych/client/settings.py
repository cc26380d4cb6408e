"""A client's settings, and the decisions that need no I/O: what the two clients share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triptych.client.channel import LARGEST_MESSAGE_BYTES, Connection, KeepAlive, Tls
from triptych.client.errors import Cancelled, InferenceError, InvalidRequest, status_error
from triptych.client.wire import EncodedRows, Parameter, PipelineConfig
from triptych.client.work import Deadline, Retry, Work
from triptych.errors import UserError

# With a quarter of the batch limit in each request these are two full batches: one that runs and
# one that forms meanwhile.
_MAX_IN_FLIGHT = 8
_KEEP_ALIVE = KeepAlive()


class PipelineClient:
    """The base of `Client` and `AsyncClient`; of no use alone."""

    def __init__(
        self,
        pipeline: str,
        url: str = "127.0.0.1:8001",
        *,
        tls: Tls | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = 30.0,
        rows_per_request: int | None = None,
        max_in_flight: int = _MAX_IN_FLIGHT,
        retry: Retry | None = None,
        keep_alive: KeepAlive | None = _KEEP_ALIVE,
        max_message_bytes: int = LARGEST_MESSAGE_BYTES,
    ) -> None:
        """Prepare a client; it connects at the first call.

        Args:
            pipeline: name of the ensemble.
            url: ``host:port`` of the server's gRPC endpoint.
            tls: None talks in the clear.
            headers: sent with every request, such as ``triton-grpc-protocol-<key>`` for a server
                with restricted protocols, or an authorization for a proxy.
            timeout_s: deadline of a call that gives none of its own; None waits for ever.
            rows_per_request: most rows of one request, never above the pipeline's own limit; None
                takes a quarter of that limit.
            max_in_flight: most requests that one call has under way at once.
            retry: how to send a request again that met a full queue; None raises `Overloaded`.
            keep_alive: None never pings.
            max_message_bytes: most that one request or one response may carry.

        Raises:
            UserError: a setting makes no sense.
        """
        for name, value in (
            ("rows_per_request", rows_per_request),
            ("max_in_flight", max_in_flight),
        ):
            if value is not None and value < 1:
                raise UserError(name, "must be 1 or more", given=value)
        self.pipeline = pipeline
        self.url = url
        self._connection = Connection(url, tls, headers or {}, keep_alive, max_message_bytes)
        self._metadata = self._connection.metadata
        self._timeout_s = timeout_s
        self._rows_per_request = rows_per_request
        self._max_in_flight = max_in_flight
        self._retry = retry
        self._config: PipelineConfig | None = None
        self._closed = False
        self._channel: Any = None
        self._open()

    def _open(self) -> None:
        """Prepare the channel, as far as that can be done where the client is made."""
        raise NotImplementedError

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(self._timeout_s if timeout_s is None else timeout_s)

    def _needs_config(self, encoded: EncodedRows, *, keep_going: bool) -> bool:
        # One row cannot break the batch limit, so it costs no second round trip. Without rows only
        # `infer`, which does not keep going, has something to tell: the outputs' shapes.
        least = 1 if keep_going else 0
        return self._config is None and encoded.count != 1 and encoded.count >= least

    def _work(
        self,
        encoded: EncodedRows,
        parameters: Mapping[str, Parameter] | None,
        deadline: Deadline,
        *,
        keep_going: bool,
    ) -> Work:
        return Work(
            self.pipeline,
            encoded,
            parameters or {},
            config=self._config,
            rows_per_request=self._rows_per_request,
            deadline=deadline,
            retry=self._retry,
            keep_going=keep_going,
        )

    def _error(self, code: Any, details: str | None, rows: Sequence[int] = ()) -> InferenceError:
        error = status_error(code.name, details or "", url=self.url, rows=rows)
        if isinstance(error, InvalidRequest) and error.row is None:
            # Perhaps the pipeline was built anew with a lower batch limit; ask again next time.
            self._config = None
        return error

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Cancelled(f"The client of `{self.pipeline}` is closed. Open another.") from None
