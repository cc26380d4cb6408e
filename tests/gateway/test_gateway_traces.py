"""Which requests are traced, and one trace through Envoy, in a real collector."""

import signal
from pathlib import Path

import pytest

from client_toy import wait_until
from otlp_receiver import check_trace, otlp_receiver
from served_command import endpoints_of, serving
from triptych.gateway.traces import export_to


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
@pytest.mark.long
def test_one_trace_goes_through_envoy(
    minilm_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with otlp_receiver() as (url, spans):
        monkeypatch.setenv("TRIPTYCH_TRACE", url)
        monkeypatch.setenv("TRIPTYCH_TRACE_RATE", "1000000")
        words = ("--profile", "production", "--http-api", "0", "--replicas", "2")
        with serving(minilm_repository, *words) as run:
            trace = check_trace(endpoints_of(run)["api"], "minilm_packed", spans)
            exported = (trace, "ingress")
            wait_until(
                lambda: exported in {(span.trace_id, span.name) for span in spans}, "Envoy exports"
            )
            run.send_signal(signal.SIGTERM)
            assert run.wait(timeout=300) == 0
    sampled = {span.name: span for span in spans if span.trace_id == trace}
    gateway, envoy = sampled["POST /v1/embeddings"], sampled["ingress"]
    assert envoy.parent_id == gateway.span_id
    assert gateway.began <= envoy.began <= sampled["InferRequest"].began
    assert envoy.attributes["upstream_cluster"] == "triton_grpc"
