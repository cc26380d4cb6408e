"""Measure what a key at ten times its limit costs the others, at the Envoy of `serve --replicas`.

Other keys send requests at a fixed rate, in turns without the key, with it at its limit and with it
at ten times its limit. Two turns without it show the noise of the machine.

Usage: ``python build_scripts/benchmarks/key_limits.py [--limit 10] [--rounds 7]``.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2

from benchmarks.harness import Metrics, Turn, finish, make_parser, run_rounds, tabulate
from benchmarks.model import CACHE, PIPELINE, build
from triptych.base.api_keys import KeyEntry, KeyFile, make_key, print_keys
from triptych.serving.fleet.access import Access
from triptych.serving.fleet.envoy import Listen, proxy_settings
from triptych.serving.fleet.proxy import Proxy
from triptych.serving.ports import reserve_ports
from triptych.serving.server import Server

_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_LOOPBACK = "127.0.0.1"
_OTHERS = 4
TURNS = {
    "without the key": 0,
    "without it again": 0,
    "at its limit": 1,
    "at ten times its limit": 10,
}


def main() -> int:
    """Measure the turns in rounds, and compare the latencies of the other keys."""
    parser = make_parser(__doc__, "key_limits", "Limits of keys", rounds=7, seconds=10.0)
    parser.add_argument("--limit", type=float, default=10.0, help="requests/s of the key")
    parser.add_argument("--rate", type=float, default=20.0, help="requests/s of the other keys")
    parser.add_argument("--repository", type=Path, help="repository with minilm; else it is built")
    options = parser.parse_args()
    (secret, digest), *others = [make_key() for _ in range(1 + _OTHERS)]
    entries = {"limited": KeyEntry(sha256=digest, requests_per_s=options.limit)}
    entries |= {f"other-{n}": KeyEntry(sha256=sha) for n, (_, sha) in enumerate(others)}
    repository = options.repository or build(CACHE / "key-limits")
    with tempfile.TemporaryDirectory() as folder, Server(repository) as server:
        keys = Path(folder) / "keys.yaml"
        keys.write_text(print_keys(KeyFile(keys=entries)))
        ports = reserve_ports(
            _LOOPBACK, dict.fromkeys(("grpc_port", "http_port", "metrics_port"), 0)
        )
        proxy = Proxy(
            proxy_settings(replicas=1, max_request_mib=1),
            Listen(_LOOPBACK, **ports),
            log_file=Path(folder) / "envoy.log",
            access=Access(keys=keys),
        )
        proxy.start([server], [PIPELINE.name])
        try:
            proxy.wait_healthy([server], 60)

            def turn(name: str) -> Turn:
                def measure() -> list[tuple[str, Metrics]]:
                    rate = TURNS[name] * options.limit
                    with multiprocessing.get_context("spawn").Pool(1) as pool:
                        limited = (proxy.grpc_url, [secret], rate, options.seconds)
                        sent = pool.apply_async(send, limited)
                        keys = [key for key, _ in others]
                        found = send(proxy.grpc_url, keys, options.rate, options.seconds)
                        refused = sent.get()["refused"]
                    return [("", {**found, "refused of the key": refused})]

                return Turn(name, measure)

            series = run_rounds([[turn(name) for name in TURNS]], options.rounds)
        finally:
            proxy.stop()
    base = series[0]
    table = tabulate(
        f"Other keys at {options.rate:g} requests/s, beside a key limited to {options.limit:g}",
        series,
        {
            "the key": lambda one: one.system,
            "p50 ms": lambda one: f"{one.text('p50_ms', 1)} ({one.range('p50_ms', 1)})",
            "p99 ms": lambda one: f"{one.text('p99_ms', 1)} ({one.range('p99_ms', 1)})",
            "p99, ratio of rounds": lambda one: _ratio(one.values("p99_ms"), base.values("p99_ms")),
            "refused others": lambda one: one.text("refused"),
            "refused of the key": lambda one: one.text("refused of the key"),
        },
    )
    finish(options, [table], {"series": series})
    return 0


def _ratio(values: Sequence[float], base: Sequence[float]) -> str:
    ratios = np.array(values) / np.array(base)
    return f"{np.median(ratios):.2f} ({ratios.min():.2f}-{ratios.max():.2f})"


def send(url: str, keys: Sequence[str], rate: float, seconds: float) -> Metrics:
    """Send requests at a fixed rate with the keys in turn; return latencies and refusals."""
    return asyncio.run(_send(url, keys, rate, seconds))


async def _send(url: str, keys: Sequence[str], rate: float, seconds: float) -> Metrics:
    request = service_pb2.ModelInferRequest(model_name=PIPELINE.name)
    request.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
    text = b"my delivery is late, and nobody answers"
    request.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    message = request.SerializeToString()
    latencies: list[float] = []
    refused = 0

    async def ask(number: int) -> None:
        nonlocal refused
        began = time.perf_counter()
        try:
            metadata = (("authorization", f"Bearer {keys[number % len(keys)]}"),)
            await infer(message, metadata=metadata, timeout=60)
            latencies.append(time.perf_counter() - began)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            refused += 1

    async with grpc.aio.insecure_channel(url, [("grpc.enable_retries", 0)]) as channel:
        infer = channel.unary_unary(_METHOD)
        began, tasks = time.perf_counter(), []
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(number)))
        await asyncio.gather(*tasks)
    p50, p99 = np.percentile(latencies, (50, 99)) * 1e3 if latencies else (0.0, 0.0)
    return {"p50_ms": float(p50), "p99_ms": float(p99), "refused": float(refused)}


if __name__ == "__main__":
    raise SystemExit(main())
