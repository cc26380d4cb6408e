"""The calls of both clients without their I/O: what is sent, in which order, what comes of it.

A flow is a generator. It yields what is to be sent, a `UnaryCall` (whose answer is sent back into
it) or a `Work` (which collects its own answers), or a `Pause` to make, and returns the result of
the call. `Client` and `AsyncClient` differ only in how they send.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import WeakSet

from numpy.typing import NDArray

from triptych.base.errors import UserError
from triptych.client.address import read_target
from triptych.client.channel import MAX_MESSAGE_BYTES, KeepAlive, Tls, open_channel
from triptych.client.connection import Connection
from triptych.client.errors import (
    CanceledError,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    status_error,
)
from triptych.client.retry import Deadline, Retries, Retry
from triptych.client.server_info import StepStatistics, read_statistics
from triptych.client.tasks import Row, RowOutputs, TaskCall, Whole
from triptych.client.wire import (
    EncodedRows,
    Parameter,
    PipelineConfig,
    Rows,
    config_request,
    encode_rows,
    read_config,
    statistics_request,
)
from triptych.client.work import Work

P = ParamSpec("P")
Result = TypeVar("Result")

# With a quarter of the batch limit in each request these are two full batches: one that runs and
# one that forms meanwhile.
_MAX_IN_FLIGHT = 8
_KEEP_ALIVE = KeepAlive()
_RETRY = Retry()
_RENEW_S = 30.0


class UnaryCall(NamedTuple):
    """One request besides inference: the method of the gRPC stub, its message, its time limit."""

    method: str
    request: Any
    left_s: float | None


class Pause(NamedTuple):
    """So long nothing is sent."""

    s: float


Flow = Generator[UnaryCall | Work | Pause, Any, Result]


class PipelineClient:
    """The base of `Client` and `AsyncClient`; of no use alone."""

    def __init__(
        self,
        pipeline: str,
        url: str | Sequence[str] = "127.0.0.1:8001",
        *,
        tls: Tls | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = 30.0,
        rows_per_request: int | None = None,
        max_in_flight: int = _MAX_IN_FLIGHT,
        retry: Retry | None = _RETRY,
        keep_alive: KeepAlive | None = _KEEP_ALIVE,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        renew_s: float | None = _RENEW_S,
    ) -> None:
        """Prepare a client of an ensemble; it connects at the first call.

        Args:
            pipeline: name of the ensemble.
            url: ``host:port`` of the server's gRPC endpoint. Of servers that serve the same, each
                gets its turn: a name with several addresses (``dns:///name:port``), or IP addresses
                in a list or with commas between them.
            tls: None talks in the clear.
            headers: sent with every request, such as ``triton-grpc-protocol-<key>`` for a server
                with restricted protocols, or an authorization for a proxy.
            timeout_s: deadline of a call that gives none of its own; None waits for ever.
            rows_per_request: at most, never above the pipeline's limit; None: a quarter of that.
            max_in_flight: most requests that one call has under way at once.
            retry: how to send a request again that met a full queue or lost its server; None raises
                the error at once. A call's deadline covers all of it.
            keep_alive: None never pings.
            max_message_bytes: most that one request or one response may carry.
            renew_s: how often a name is looked up again, for new servers to get their turn; None
                leaves it to gRPC, which waits for a connection to break.

        Raises:
            UserError: a setting makes no sense.
        """
        for name, value in (
            ("rows_per_request", rows_per_request),
            ("max_in_flight", max_in_flight),
        ):
            if value is not None and value < 1:
                raise UserError(name, "must be 1 or more", given=value)
        if renew_s is not None and renew_s <= 0:
            raise UserError("renew_s", "must be above 0", given=renew_s, remedy="Or None: never")
        self.pipeline = pipeline
        self._target = read_target(url)
        self.url = self._target.shown
        if tls is not None and tls.server_name is None and self._target.authority:
            raise UserError(
                "tls.server_name",
                "must be given where `url` is several addresses",
                given="nothing",
                remedy="Say which name the servers' certificate has",
            )
        self._tls = tls
        self._keep_alive = keep_alive
        self._max_message_bytes = max_message_bytes
        self._renew_s = renew_s if self._target.is_named else None
        # gRPC refuses capital letters in a name.
        self._metadata = tuple((name.lower(), value) for name, value in (headers or {}).items())
        self._timeout_s = timeout_s
        self._rows_per_request = rows_per_request
        self._max_in_flight = max_in_flight
        self._retries = Retries(retry, is_several=self._target.is_several)
        self._config: PipelineConfig | None = None
        self._closed = False
        self._generations: WeakSet[Any] = WeakSet()
        # One may be freed, and another begun by that, while it is held.
        self._generations_turn = threading.RLock()
        # Read once: channels of the same credentials share connections.
        self._credentials = None if tls is None else tls.credentials()
        self._connection = self._connect()

    def _connect(self) -> Connection:
        """How this kind of client opens and closes channels."""
        raise NotImplementedError

    def _open_channel(self, library: Any) -> Any:
        return open_channel(
            library,
            self._target,
            self._credentials,
            None if self._tls is None else self._tls.server_name,
            self._keep_alive,
            self._max_message_bytes,
        )

    def _ask_for(self, method: str, request: Any, deadline: Deadline) -> Flow[Any]:
        tried: tuple[str, ...] = ()
        while True:
            try:
                answer = yield UnaryCall(method, request, deadline.left_s())
            except DeadlineExceededError:
                raise deadline.passed() from None
            except InferenceError as error:
                tried += (error.address,)
                yield Pause(self._retries.pause_s(error, tried, deadline))
            else:
                self._retries.answered()
                return answer

    def _leave_behind(self, work: Any) -> None:
        """Let `work` read what is left of a generation; `close` waits for it."""
        raise NotImplementedError

    def _remember(self, generation: Any) -> None:
        with self._generations_turn:
            self._generations.add(generation)

    def _end_generations(self) -> None:
        with self._generations_turn:
            begun = list(self._generations)
        for generation in begun:
            generation._end()

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(self._timeout_s if timeout_s is None else timeout_s)

    def _known_config(self, deadline: Deadline) -> Flow[PipelineConfig]:
        config = self._config
        if config is None:
            request = config_request(self.pipeline)
            config = read_config((yield from self._ask_for("ModelConfig", request, deadline)))
            self._config = config
        return config

    def _perform(
        self,
        encoded: EncodedRows,
        parameters: Mapping[str, Parameter] | None,
        deadline: Deadline,
        *,
        keep_going: bool,
        only: Sequence[str] = (),
    ) -> Flow[Work]:
        # One row cannot break the batch limit, so it costs no second round trip. Without rows only
        # `infer`, which does not keep going, has something to tell: the outputs' shapes.
        if encoded.count != 1 and (encoded.count or not keep_going):
            try:
                config = yield from self._known_config(deadline)
            except DeadlineExceededError:
                raise deadline.passed(answered=(0, encoded.count)) from None
            config.check_takes_rows(self.pipeline)
        work = Work(
            self.pipeline,
            encoded,
            parameters or {},
            config=self._config,
            rows_per_request=self._rows_per_request,
            deadline=deadline,
            retries=self._retries,
            keep_going=keep_going,
            only=only,
        )
        yield work
        return work

    def _perform_task(self, call: TaskCall[Any, Any], *, keep_going: bool) -> Flow[Work]:
        encoded, deadline = encode_rows(call.inputs), self._deadline(call.timeout_s)
        try:
            return (
                yield from self._perform(
                    encoded, call.parameters, deadline, keep_going=keep_going, only=call.only
                )
            )
        except InvalidRequestError as error:
            misfit = None
            if error.row not in encoded.refused:
                # A pipeline of another task complains of an input or a parameter.
                with suppress(InferenceError):
                    misfit = call.misfit((yield from self._known_config(deadline)))
            if misfit:
                raise misfit from error
            raise

    def _error(self, code: Any, details: str | None, rows: Sequence[int] = ()) -> InferenceError:
        error = status_error(code.name, details or "", url=self.url, rows=rows)
        if isinstance(error, InvalidRequestError) and error.row is None:
            # Perhaps the pipeline was built anew with a lower batch limit; ask again next time.
            self._config = None
        return error

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise CanceledError(
                f"The client of `{self.pipeline}` is closed. Open another."
            ) from None


def infer(
    self: PipelineClient,
    inputs: Rows,
    *,
    parameters: Mapping[str, Parameter] | None = None,
    timeout_s: float | None = None,
) -> Flow[dict[str, NDArray[Any]]]:
    """Send rows of any inputs and return every output.

    `inputs` has one element a row by name, all of the same length. Of the `parameters`, `priority`
    and `timeout` are Triton's own. `timeout_s` is the deadline of the whole call; None takes the
    client's own.

    Returns:
        Name -> array [rows, …] in the order of the rows; BYTES are objects, each `bytes`.

    Raises:
        InferenceError: one of its kinds; an `InvalidRequestError` names the row at fault in `row`.
    """
    encoded, deadline = encode_rows(inputs), self._deadline(timeout_s)
    return (yield from self._perform(encoded, parameters, deadline, keep_going=False)).outputs()


def infer_each(
    self: PipelineClient,
    inputs: Rows,
    *,
    parameters: Mapping[str, Parameter] | None = None,
    timeout_s: float | None = None,
) -> Flow[list[RowOutputs | InvalidRequestError]]:
    """For each row its outputs, or why it was refused.

    Arguments and errors are those of `infer`, but a refused row does not raise: the other rows of
    its request are sent again without it.
    """
    encoded, deadline = encode_rows(inputs), self._deadline(timeout_s)
    return (yield from self._perform(encoded, parameters, deadline, keep_going=True)).each()


def interface(self: PipelineClient, *, timeout_s: float | None = None) -> Flow[PipelineConfig]:
    """The pipeline's batch limit, inputs, outputs and steps; asked of the server once.

    Raises:
        InferenceError: one of its kinds.
    """
    return (yield from self._known_config(self._deadline(timeout_s)))


def step_statistics(
    self: PipelineClient, *, timeout_s: float | None = None
) -> Flow[list[StepStatistics]]:
    """What each step of the pipeline has done since the server loaded it, in order.

    Subtract an earlier value to see a span of time.

    Raises:
        InvalidRequestError: the client has several servers, each with counts of its own.
        InferenceError: another of its kinds.
    """
    if self._target.is_several:
        raise InvalidRequestError(
            f"`url` must be one server's for its counts. Given: {self.url}. Open a client of one."
        )
    deadline = self._deadline(timeout_s)
    found = []
    for step in (yield from self._known_config(deadline)).steps:
        request = statistics_request(step)
        answer = yield from self._ask_for("ModelStatistics", request, deadline)
        found.append(read_statistics(step, answer))
    return found


def task_flows(
    make: Callable[P, TaskCall[Whole, Row]],
) -> tuple[
    Callable[Concatenate[PipelineClient, P], Flow[Whole]],
    Callable[Concatenate[PipelineClient, P], Flow[list[Row | InvalidRequestError]]],
]:
    """The two flows of the calls that `make` describes: all rows or an error, and row by row."""

    def whole(self: PipelineClient, /, *args: P.args, **kwargs: P.kwargs) -> Flow[Whole]:
        call = make(*args, **kwargs)
        return call.whole((yield from self._perform_task(call, keep_going=False)).outputs())

    def each(
        self: PipelineClient, /, *args: P.args, **kwargs: P.kwargs
    ) -> Flow[list[Row | InvalidRequestError]]:
        call = make(*args, **kwargs)
        if call.stand_in:
            return []
        return call.each((yield from self._perform_task(call, keep_going=True)).each())

    name, own = make.__name__, inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    asked = inspect.signature(make)
    signature = asked.replace(parameters=[own, *asked.parameters.values()])
    flow: Any
    for flow, flow_name, words in (
        (
            *(whole, name),
            f"{inspect.getdoc(make)}\n\nRaises:\n    InferenceError: one of its kinds; an "
            "`InvalidRequestError` names the row at fault in `row`.",
        ),
        (
            *(each, f"{name}_each"),
            f"For each row what `{name}` returns of it, or why the row was refused.\n\n"
            f"Arguments and errors are those of `{name}`, but a refused row does not raise.",
        ),
    ):
        flow.__name__, flow.__doc__ = flow_name, words
        flow.__signature__ = signature
    return whole, each


def make_method(method: Callable[..., Any], flow: Callable[..., Any], client: str) -> None:
    """Give `method` of the class `client` the name, arguments and words of `flow`."""
    signature = inspect.signature(flow).replace(return_annotation=inspect.Signature.empty)
    method.__name__, method.__doc__ = flow.__name__, flow.__doc__
    method.__qualname__ = f"{client}.{flow.__name__}"
    method.__signature__ = signature  # type: ignore[attr-defined]
