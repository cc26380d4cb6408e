"""One trace from a caller through the gateway and the steps of a pipeline, in a real collector."""

import signal
from pathlib import Path

import openai
import pytest

from client_toy import wait_until
from otlp_receiver import Span, otlp_receiver
from served_command import endpoints_of, serving
from triptych.gateway.traces import export_to

NAME = "minilm_packed"
CALLER = "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = "a" * 32, "b" * 32


def children(spans: list[Span], parent: Span) -> dict[str, Span]:
    """Spans below another by name."""
    return {span.name: span for span in spans if span.parent_id == parent.span_id}


def test_a_share_of_the_requests_without_a_trace_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds
    with otlp_receiver() as (url, spans):
        tracer = export_to(url, 4)
        traces = [tracer.start("GET /health", {}) for _ in range(400)]
        for trace in traces:
            trace.end(503)
        sampled = {trace.trace_id for trace in traces if trace.headers}
        assert 50 < len(sampled) < 150  # 100 expected, with a standard deviation of 9
        wait_until(lambda: len(spans) >= len(sampled), "the spans are exported")
    assert {span.trace_id for span in spans} == sampled
    assert {span.attributes["http.response.status_code"] for span in spans} == {503}


@pytest.mark.server
@pytest.mark.parametrize(
    "options", [(), pytest.param(("--replicas", "2"), marks=pytest.mark.long, id="envoy")]
)
def test_one_trace_has_gateway_ensemble_and_steps(
    options: tuple[str, ...], minilm_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with otlp_receiver() as (url, spans):
        monkeypatch.setenv("TRIPTYCH_TRACE", url)
        monkeypatch.setenv("TRIPTYCH_TRACE_RATE", "1000000")
        words = ("--profile", "production", "--http-api", "0", *options)
        with serving(minilm_repository, *words) as run:
            with openai.OpenAI(
                base_url=f"{endpoints_of(run)['api']}/v1", api_key="none", max_retries=0
            ) as client:
                for trace, flag in ((SAMPLED, "01"), (UNSAMPLED, "00")):
                    made = client.embeddings.with_raw_response.create(
                        model=NAME,
                        input="a private text",
                        extra_headers={"traceparent": f"00-{trace}-{CALLER}-{flag}"},
                    )
                    assert made.headers["x-request-id"] == trace
                with pytest.raises(openai.BadRequestError) as caught:
                    client.embeddings.create(
                        model=NAME,
                        input="",
                        dimensions=9999,
                        extra_headers={"traceparent": f"00-{'c' * 32}-{CALLER}-01"},
                    )
                assert caught.value.request_id == "c" * 32
                client.embeddings.create(model=NAME, input="without a trace")
            names = {"InferRequest", "POST /v1/embeddings"}
            wait_until(lambda: names <= {span.name for span in spans}, "the spans are exported")
            run.send_signal(signal.SIGTERM)
            assert run.wait(timeout=60) == 0
    assert {span.trace_id for span in spans} == {SAMPLED, "c" * 32}  # Triton ignores the flag
    assert "private" not in str(spans)
    (failed,) = [span for span in spans if span.trace_id == "c" * 32 and span.parent_id == CALLER]
    assert failed.attributes["http.response.status_code"] == 400
    (gateway,) = [span for span in spans if span.trace_id == SAMPLED and span.parent_id == CALLER]
    assert gateway.name == "POST /v1/embeddings"
    assert gateway.attributes["http.response.status_code"] == 200
    request = children(spans, gateway)["InferRequest"]
    ensemble = children(spans, request)[NAME]
    steps = children(spans, ensemble)
    assert steps.keys() == {f"{NAME}_{step}" for step in ("preprocess", "core", "postprocess")}
    for step in steps.values():
        compute = children(spans, step)["compute"]
        assert step.events["QUEUE_START"] <= compute.events["COMPUTE_START"]
        assert compute.events["COMPUTE_START"] <= compute.events["COMPUTE_END"]
        assert ensemble.began <= step.began <= step.ended <= ensemble.ended
