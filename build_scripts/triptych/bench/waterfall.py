"""Where a request's mean time goes: parts that add up to what the client saw."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.bench.points import Part, StepUse

TRANSPORT = "transport"
SCHEDULING = "scheduling"


def waterfall(client_us: float, server_us: float, steps: Sequence[StepUse]) -> tuple[Part, ...]:
    """The mean latency of the client, taken apart.

    `transport` is what the server does not see: the network, gRPC, and the wait for a processor on
    both sides. `scheduling` is what the server sees and no step does: the hops between the steps.

    A backend that answers rows before their batch ends (the local stand-in for ONNX Runtime) keeps
    the request until then, and Triton counts it up to there, in the step and in the ensemble: both
    may come out longer than what the client saw. What is too long is taken off the core's compute,
    because only a step that runs on after its answer can be counted so.

    Args:
        client_us: mean latency seen by the client.
        server_us: mean time from a request's arrival to its answer, seen by the server.
        steps: of the pipeline.
    """
    server_us = min(server_us, client_us)
    times_us = [us for step in steps for us in (step.queue_us, step.compute_us)]
    excess_us = max(0.0, sum(times_us) - server_us)
    if excess_us:
        at = 1 + 2 * next((at for at, step in enumerate(steps) if step.step == "core"), 0)
        taken_us = min(excess_us, times_us[at])
        times_us[at] -= taken_us
        scale = 1 - (excess_us - taken_us) / (sum(times_us) or 1.0)
        times_us = [us * scale for us in times_us]
    names = [(step.step, what) for step in steps for what in ("queue", "compute")]
    return (
        Part("client", TRANSPORT, client_us - server_us),
        *(Part(*name, us) for name, us in zip(names, times_us, strict=True)),
        Part("server", SCHEDULING, max(0.0, server_us - sum(times_us))),
    )
