"""Call logic shared by `Client` and `AsyncClient`, without I/O.

A flow is a generator. It yields a `UnaryCall` (whose response is sent into the generator), a `Work`
(which collects its responses) or a `Pause`, and returns the result of the call. The clients differ
only in how they send.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import WeakSet

from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from triptych.base.errors import UserError
from triptych.client.connection import (
    CREDENTIALS,
    MAX_MESSAGE_BYTES,
    ChannelFactory,
    Connection,
    Credentials,
    KeepAlive,
    Tls,
    read_target,
)
from triptych.client.errors import (
    CanceledError,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    RowError,
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
    check_inputs,
    encode_rows,
    has_typed_rows,
    read_config,
)
from triptych.client.work import Work

if TYPE_CHECKING:
    import grpc  # type: ignore[import-untyped]

P = ParamSpec("P")
Result = TypeVar("Result")

# Each request has a quarter of the batch limit, so these are two full batches: one that runs and
# one that forms.
_MAX_IN_FLIGHT = 8
_KEEP_ALIVE = KeepAlive()
_RETRY = Retry()
_DNS_REFRESH_S = 30.0


PRIORITY = "priority"
"""Request parameter of Triton with the level of a request, 1 for the first."""


CALL_HEADERS: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("call_headers", default=())
"""Headers of the calls of an `AsyncClient` in this context, in addition to those of the client."""


CALL_PARAMETERS: ContextVar[Mapping[str, Parameter] | None] = ContextVar(
    "call_parameters", default=None
)
"""Parameters of the rows that clients send in this context, unless a call has its own."""


class UnaryCall(NamedTuple):
    """A request other than inference: method of the gRPC stub, message and time limit."""

    method: str
    request: object
    remaining_s: float | None


class Pause(NamedTuple):
    """Pause of `s` seconds before the next request."""

    s: float


Flow = Generator[UnaryCall | Work | Pause, Any, Result]


class PipelineClient:
    """Base class of `Client` and `AsyncClient`. Do not instantiate it."""

    def __init__(  # noqa: PLR0913  (settings of users, by keyword)
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
        dns_refresh_s: float | None = _DNS_REFRESH_S,
    ) -> None:
        """Create a client of a pipeline; it connects at the first call.

        Args:
            pipeline: Name of the pipeline.
            url: ``host:port`` of the server's gRPC endpoint. For several equal servers, among which
                requests are balanced: a name with several addresses (``dns:///name:port``), or IP
                addresses in a list or separated by commas.
            tls: Encryption; None for plain text.
            headers: Headers of every request, such as ``triton-grpc-protocol-<key>`` for a server
                with restricted protocols, or the authorization for a proxy.
            timeout_s: Default deadline of a call in seconds; None for no deadline.
            rows_per_request: Maximum number of rows in a request. None: a quarter of the pipeline's
                limit.
            max_in_flight: Maximum number of concurrent requests of one call.
            retry: Policy for requests that met a full queue or lost their server, within the
                deadline of the call; None raises such errors at once.
            keep_alive: Keep-alive pings; None for none.
            max_message_bytes: Maximum size of a request or response in bytes.
            dns_refresh_s: Interval in seconds at which a name is resolved again, to find new
                servers. None: gRPC resolves it when a connection breaks.

        Raises:
            UserError: A setting is invalid.
        """
        for name, value in (
            ("rows_per_request", rows_per_request),
            ("max_in_flight", max_in_flight),
        ):
            if value is not None and value < 1:
                raise UserError(
                    name, "must be at least 1", given=value, remedy="Raise it, or omit it"
                )
        if dns_refresh_s is not None and dns_refresh_s <= 0:
            raise UserError(
                "dns_refresh_s",
                "must be above 0",
                given=dns_refresh_s,
                remedy="Give None for no refresh",
            )
        credentials = CREDENTIALS.get() or Credentials()
        tls = credentials.tls if tls is None else tls
        headers = credentials.headers if headers is None else headers
        self.pipeline = pipeline
        self._target = read_target(url)
        self.url = self._target.shown
        self._channels = ChannelFactory(self._target, tls, keep_alive, max_message_bytes)
        self._dns_refresh_s = dns_refresh_s if self._target.is_named else None
        # gRPC rejects capital letters in header names.
        self._metadata = tuple((name.lower(), value) for name, value in headers.items())
        self._timeout_s = timeout_s
        self._rows_per_request = rows_per_request
        self._max_in_flight = max_in_flight
        self._retries = Retries(retry, is_several=self._target.is_several)
        self._config: PipelineConfig | None = None
        self._has_priorities = False
        self._label_vectors: dict[tuple[str, str], NDArray[Any]] = {}
        self._closed = False
        self._generations: WeakSet[Any] = WeakSet()
        # Freeing one generation may begin another while the lock is held, so it is reentrant.
        self._generations_lock = threading.RLock()
        self._connection = self._connect()

    def _connect(self) -> Connection:
        """Return the connection of this kind of client."""
        raise NotImplementedError

    def _request(self, method: str, request: object, deadline: Deadline) -> Flow[Any]:
        addresses: tuple[str, ...] = ()
        while True:
            try:
                answer = yield UnaryCall(method, request, deadline.remaining_s())
            except DeadlineExceededError:
                raise deadline.exceeded_error() from None
            except InferenceError as error:
                addresses += (error.address,)
                yield Pause(self._retries.pause_s(error, addresses, deadline))
            else:
                self._retries.answered()
                return answer

    def _finish_in_background(self, work: Any) -> None:
        """Let `work` read the rest of a generation; `close` waits for it."""
        raise NotImplementedError

    def _register(self, generation: Any) -> None:
        with self._generations_lock:
            self._generations.add(generation)

    def _end_generations(self) -> None:
        with self._generations_lock:
            generations = list(self._generations)
        for generation in generations:
            generation._end()

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(self._timeout_s if timeout_s is None else timeout_s)

    def _known_config(self, deadline: Deadline) -> Flow[PipelineConfig]:
        config = self._config
        if config is None:
            config = self._config = yield from self._read_config(deadline)
        return config

    def _read_config(self, deadline: Deadline) -> Flow[PipelineConfig]:
        request = service_pb2.ModelConfigRequest(name=self.pipeline)
        return read_config((yield from self._request("ModelConfig", request, deadline)))

    def _perform(
        self,
        encoded: EncodedRows,
        parameters: Mapping[str, Parameter] | None,
        deadline: Deadline,
        *,
        keep_going: bool,
        call: TaskCall[Any, Any] | None = None,
    ) -> Flow[Work]:
        own = parameters or {}
        parameters = {**(CALL_PARAMETERS.get() or {}), **own}
        # One row cannot exceed the batch limit, so it needs no second round trip. Without rows only
        # `infer`, which does not keep going, returns something: the outputs' shapes. Parameters
        # need one, because a pipeline with a response cache takes them as inputs.
        if parameters or (encoded.count != 1 and (encoded.count or not keep_going)):
            try:
                config = yield from self._known_config(deadline)
            except DeadlineExceededError:
                raise deadline.exceeded_error(answered=(0, encoded.count)) from None
            config.check_takes_rows(self.pipeline)
            if PRIORITY in own and not self._has_priorities:
                yield from self._check_priorities(config, deadline)
        work = Work(
            self.pipeline,
            encoded,
            parameters,
            config=self._config,
            rows_per_request=self._rows_per_request,
            deadline=deadline,
            retries=self._retries,
            keep_going=keep_going,
        )
        if call is not None:
            work.requested = call.requested_of(self._config)
        yield work
        return work

    def _check_priorities(self, config: PipelineConfig, deadline: Deadline) -> Flow[None]:
        """Raise `InvalidRequestError` if no step has priority levels: Triton ignores a priority."""
        for step in config.steps:
            request = service_pb2.ModelConfigRequest(name=step)
            found = (yield from self._request("ModelConfig", request, deadline)).config
            if found.dynamic_batching.priority_levels:
                self._has_priorities = True
                return
        raise InvalidRequestError(
            f"`{PRIORITY}` has no effect: `{self.pipeline}` has no priority levels. Omit it, or "
            "set serving.priority in the pipeline and build it again."
        )

    def _perform_task(self, call: TaskCall[Any, Any], *, keep_going: bool) -> Flow[Work]:
        encoded, deadline = encode_rows(call.inputs), self._deadline(call.timeout_s)
        flow = self._perform(encoded, call.parameters, deadline, keep_going=keep_going, call=call)
        try:
            return (yield from flow)
        except InvalidRequestError as error:
            mismatch = None
            if error.row not in encoded.refused:
                # A pipeline of another task rejects an input or a parameter.
                with suppress(InferenceError):
                    mismatch = call.mismatch((yield from self._known_config(deadline)))
            if mismatch:
                raise mismatch from error
            raise

    def _error(
        self, code: grpc.StatusCode, details: str | None, rows: Sequence[int] = ()
    ) -> InferenceError:
        error = status_error(code.name, details or "", url=self.url, rows=rows)
        if isinstance(error, InvalidRequestError) and error.row is None:
            # The pipeline may have been rebuilt with a lower batch limit, so read it again.
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

    `inputs` has a list per input name, all of the same length, with one element per row: text or
    bytes, or a number, a list or an array for a typed input. Rows of an output of variable size are
    filled up with 0, false or an empty text. The `parameters` `priority` and `timeout` are Triton's
    own; a `priority` needs a pipeline with priority levels. `timeout_s` is the deadline of the
    whole call; None takes the client's own.

    Returns:
        Array [rows, …] by output name, in the order of the rows; texts are objects, each `str`.

    Raises:
        InferenceError: See its subclasses; `row` is the faulty row, if one is known.
    """
    return (yield from _infer(self, inputs, parameters, timeout_s, keep_going=False)).outputs()


def infer_each(
    self: PipelineClient,
    inputs: Rows,
    *,
    parameters: Mapping[str, Parameter] | None = None,
    timeout_s: float | None = None,
) -> Flow[list[RowOutputs | RowError]]:
    """Return for each row its outputs, or the error why it was rejected.

    Arguments and errors are those of `infer`, but a rejected row, or one that fails alone, does not
    raise: the other rows of its request are sent again without it.
    """
    return (yield from _infer(self, inputs, parameters, timeout_s, keep_going=True)).each()


def _infer(
    self: PipelineClient,
    inputs: Rows,
    parameters: Mapping[str, Parameter] | None,
    timeout_s: float | None,
    *,
    keep_going: bool,
) -> Flow[Work]:
    check_inputs(inputs)
    deadline = self._deadline(timeout_s)
    config = self._config
    if config is None and has_typed_rows(inputs):
        config = yield from self._known_config(deadline)
    encoded = encode_rows(inputs, config)
    return (yield from self._perform(encoded, parameters, deadline, keep_going=keep_going))


def interface(self: PipelineClient, *, timeout_s: float | None = None) -> Flow[PipelineConfig]:
    """Return the pipeline's batch limit, inputs, outputs and steps; requested from the server once.

    Raises:
        InferenceError: See its subclasses.
    """
    return (yield from self._known_config(self._deadline(timeout_s)))


def ready(self: PipelineClient, *, timeout_s: float | None = None) -> Flow[bool]:
    """Return whether the server has loaded all models of the pipeline.

    Raises:
        InferenceError: See its subclasses.
    """
    request = service_pb2.ModelReadyRequest(name=self.pipeline)
    answer = yield from self._request("ModelReady", request, self._deadline(timeout_s))
    return bool(answer.ready)


def step_statistics(
    self: PipelineClient, *, timeout_s: float | None = None
) -> Flow[list[StepStatistics]]:
    """Return the statistics of each step since the server loaded it, in order.

    Subtract an earlier value for a period of time.

    Raises:
        InvalidRequestError: The client has several servers, each with its own statistics.
        InferenceError: See its subclasses.
    """
    if self._target.is_several:
        raise InvalidRequestError(
            f"Statistics are those of one server. Given: {self.url}. Open a client of one server."
        )
    deadline = self._deadline(timeout_s)
    statistics = []
    for step in (yield from self._known_config(deadline)).steps:
        request = service_pb2.ModelStatisticsRequest(name=step)
        answer = yield from self._request("ModelStatistics", request, deadline)
        statistics.append(read_statistics(step, answer))
    return statistics


def task_flows(
    make: Callable[P, TaskCall[Whole, Row]],
) -> tuple[
    Callable[Concatenate[PipelineClient, P], Flow[Whole]],
    Callable[Concatenate[PipelineClient, P], Flow[list[Row | RowError]]],
]:
    """Return two flows for the calls that `make` describes: all rows at once, and row by row."""

    def whole(self: PipelineClient, /, *args: P.args, **kwargs: P.kwargs) -> Flow[Whole]:
        call = make(*args, **kwargs)
        return call.whole((yield from self._perform_task(call, keep_going=False)).outputs())

    def each(
        self: PipelineClient, /, *args: P.args, **kwargs: P.kwargs
    ) -> Flow[list[Row | RowError]]:
        call = make(*args, **kwargs)
        if call.is_placeholder:
            return []
        return call.each((yield from self._perform_task(call, keep_going=True)).each())

    name, signature = make.__name__, inspect.signature(make)
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = signature.replace(parameters=[self_parameter, *signature.parameters.values()])
    whole.__name__, each.__name__ = name, f"{name}_each"
    whole.__doc__ = (
        f"{inspect.getdoc(make)}\n\nRaises:\n    InferenceError: See its subclasses; `row` of "
        "an `InvalidRequestError` is the faulty row."
    )
    each.__doc__ = (
        f"Return for each row the result of `{name}`, or the error why it was rejected.\n\n"
        f"Arguments and errors are those of `{name}`, but a rejected row does not raise."
    )
    flow: Any
    for flow in (whole, each):
        flow.__signature__ = signature
    return whole, each


def make_method(method: Callable[..., Any], flow: Callable[..., Any], client: str) -> None:
    """Give `method` of the class `client` the name, arguments and docstring of `flow`."""
    signature = inspect.signature(flow).replace(return_annotation=inspect.Signature.empty)
    method.__name__, method.__doc__ = flow.__name__, flow.__doc__
    method.__qualname__ = f"{client}.{flow.__name__}"
    method.__signature__ = signature  # type: ignore[attr-defined]
