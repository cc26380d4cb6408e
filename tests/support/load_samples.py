"""Results to report on: a usual one, and all that a report must also bear."""

from dataclasses import replace
from typing import Any

from triptych.operate.tune.results import Outcome, Trial, TuneResult
from triptych.serving.bench.comparison import Price
from triptych.serving.bench.results import (
    BenchResult,
    Bottleneck,
    GpuUse,
    LoadPoint,
    Measurement,
    OfferedLoad,
    Part,
    ProcessUse,
    RateSearch,
    Resources,
    StepUse,
    Subject,
)
from triptych.spec.slo import Slo

PROMISE = Slo(p99_ms=80.0)
TIMES = ("mean_us", "p50_us", "p90_us", "p95_us", "p99_us", "p99_9_us")


def step(name: str, queue_us: float, infer_us: float, mean_batch: int, runs: int) -> StepUse:
    """A step that ran `runs` batches, most of them of `mean_batch` rows."""
    sizes = {max(2, mean_batch): runs - runs // 4, max(1, mean_batch - 1): runs // 4}
    rows = sum(size * times for size, times in sizes.items())
    return StepUse(
        step=name,
        model=f"minilm_{name}",
        instances=2 if name != "core" else 1,
        max_delay_us=500,
        requests=rows,
        failures=0,
        rows=rows,
        executions=runs,
        batch_sizes=sizes,
        queue_us=queue_us,
        compute_input_us=40.0,
        compute_infer_us=infer_us,
        compute_output_us=30.0,
        busy=0.93 if name == "core" else 0.2,
    )


def measurement(clients: float, *, drift: float = 1.0, **changes: Any) -> Measurement:
    """One round of a server that is full at about 230 requests a second."""
    rate = 232 * clients / (clients + 2.4) * drift
    mean = clients / rate * 1e6
    steps = (
        step("preprocess", 120 + 8 * clients, 450.0, 1 + int(clients / 8), 600),
        step("core", mean * 0.55, mean * 0.30, max(1, int(clients * 0.6)), 400),
        step("postprocess", 90 + 2 * clients, 160.0, 1 + int(clients / 10), 500),
    )
    told = [
        Part(use.step, what, us)
        for use in steps
        for what, us in (("queue", use.queue_us), ("compute", use.compute_us))
    ]
    rest = mean - sum(part.us for part in told)
    told += [Part("client", "transport", rest * 0.7), Part("server", "scheduling", rest * 0.3)]
    values = {
        "seconds": 3.0,
        "requests": int(rate * 3),
        "errors": {},
        "throughput_per_s": rate,
        "mean_us": mean,
        "p50_us": mean * 0.94,
        "p90_us": mean * 1.22,
        "p95_us": mean * 1.41,
        "p99_us": mean * 1.83 * (2 - drift),
        "p99_9_us": mean * 2.4,
        "is_stable": True,
        "histogram_us": {1000.0: 10, 1100.0: 20},
        "steps": steps,
        "parts": tuple(told),
        "resources": Resources(
            cores=2,
            machine_cpu=0.97,
            client_cpu_cores=0.12,
            processes=(
                ProcessUse("tritonserver", 0.21, 141.2),
                ProcessUse("minilm_preprocess", 0.09, 96.4),
                ProcessUse("minilm_core", 1.48, 402.7),
                ProcessUse("minilm_postprocess", 0.04, 61.0),
            ),
        ),
    }
    return Measurement(**{**values, **changes})


FULL = Bottleneck(
    "compute",
    "core",
    "The machine's 2 cores are 97 % busy, and minilm_core takes 1.48 of them.",
    "Try precision int8, or a machine with more cores.",
)


def point(clients: float, *, drift: float = 1.0, **changes: Any) -> LoadPoint:
    """Three rounds of the pipeline, 2 % apart."""
    rounds = tuple(measurement(clients, drift=drift * d, **changes) for d in (0.99, 1.0, 1.01))
    return LoadPoint(OfferedLoad("concurrency", clients), rounds, FULL)


def arrivals(rate: float, p99_ms: float) -> LoadPoint:
    """One round of requests that arrive at random."""
    parts = (400, 350, 600, 750, 1e3, 1.3e3)
    times = {name: p99_ms * part for name, part in zip(TIMES, parts, strict=True)}
    one = measurement(1 + rate / 20, throughput_per_s=rate * 0.998, **times)
    return LoadPoint(OfferedLoad("poisson", rate), (one,), FULL)


def rate_search(slo: Slo = PROMISE) -> RateSearch:
    """Holds up to 150/s, breaks at 165/s."""
    tried = ((80, 24.0), (120, 35.0), (150, 61.0), (165, 92.0), (180, 240.0))
    return RateSearch(slo, 150.0, 165.0, tuple(arrivals(*each) for each in tried))


def subject(**changes: Any) -> Subject:
    """A text embedding on two cores, but for `changes`."""
    values: dict[str, Any] = {
        "pipeline": "minilm",
        "task": "text-embedding",
        "architecture": "BertModel",
        "precision": "fp32",
        "layout": "packed",
        "overrides": {"core.instances": 1},
        "server": "tritonserver 2.51.0, embedded",
        "machine": {"processor": "Some Xeon", "cores": "2", "memory": "8 GiB"},
        "versions": {"onnxruntime": "1.22.0", "tokenizers": "0.22.0"},
        "measured_at": "2026-01-02T03:04:05Z",
        "requests": 300,
        "lengths": {length: max(1, 60 - abs(length - 24) * 2) for length in range(5, 90)},
        "padding": 0.073,
    }
    return Subject(**{**values, **changes})


def bench(*, drift: float = 1.0, **changes: Any) -> BenchResult:
    """Six loads, a rate search and a cost; but for `changes`."""
    values: dict[str, Any] = {
        "subject": subject(),
        "points": tuple(point(clients, drift=drift) for clients in (1, 2, 4, 8, 16, 32)),
        "slo": PROMISE,
        "rate": rate_search(),
        "cost": Price(0.34, 5e6, 900, currency="USD", headroom=0.3).cost(150),
    }
    return BenchResult(**{**values, **changes})


NOTHING_ANSWERED: dict[str, Any] = {
    "requests": 0,
    "errors": {"Unavailable: Exceeds maximum queue size": 4812, "deadline": 3},
    "throughput_per_s": 0.0,
    **dict.fromkeys(TIMES, 0.0),
    "is_stable": None,
    "histogram_us": {},
    "steps": (),
    "parts": (),
    "resources": None,
}


def hostile(word: str) -> BenchResult:
    """`word` wherever a text may stand."""
    use = replace(step("core", 10.0, 20.0, 2, 8), step=word, model=word)
    one = measurement(
        2,
        errors={word: 2},
        warnings=(word,),
        steps=(use,),
        parts=(Part(word, "queue", 5.0), Part(word, word, 7.0)),
        resources=Resources(2, None, 0.1, (ProcessUse(word, 1.0, 2.0),), (GpuUse(word, 0.5, 9.0),)),
    )
    held = Bottleneck("compute", word, word, word)
    return bench(
        subject=subject(
            **dict.fromkeys(("pipeline", "task", "architecture", "precision"), word),
            **dict.fromkeys(("layout", "server", "measured_at"), word),
            overrides={word: word},
            machine={word: word},
            versions={word: word},
        ),
        points=(LoadPoint(OfferedLoad("concurrency", 2), (one,), held),),
        rate=RateSearch(PROMISE, 1.0, None, (LoadPoint(OfferedLoad("poisson", 1), (one,), held),)),
        cost=Price(1, currency=word, headroom=0.3).cost(1),
    )


def _scaled(factor: float) -> BenchResult:
    """Times and rates of another order."""
    one = measurement(4)
    other = replace(
        one,
        throughput_per_s=one.throughput_per_s / factor,
        parts=tuple(replace(part, us=part.us * factor) for part in one.parts),
        **{name: getattr(one, name) * factor for name in TIMES},
    )
    return bench(points=(LoadPoint(OfferedLoad("concurrency", 4), (one, other)),), rate=None)


NASTY: dict[str, BenchResult] = {
    "one point": bench(points=(point(8),), rate=None, cost=None, slo=Slo()),
    "no point": bench(points=(), rate=None, cost=None),
    "one round": bench(points=(replace(point(8), rounds=(measurement(8),)),)),
    "errors only": bench(
        points=tuple(point(clients, **NOTHING_ANSWERED) for clients in (1, 8)),
        rate=RateSearch(
            PROMISE, 0.0, 5.0,
            (replace(point(1, **NOTHING_ANSWERED), load=OfferedLoad("poisson", 5)),),
        ),
        cost=None,
    ),
    "nothing stable": bench(
        points=tuple(
            point(clients, is_stable=False, warnings=("the windows differ by 31 %",))
            for clients in (1, 8)
        )
    ),
    "no details": bench(
        points=tuple(point(c, steps=(), parts=(), resources=None) for c in (1, 8)), rate=None
    ),
    "images": bench(subject=subject(lengths={}, padding=0.0, task="image-classification")),
    "twenty points": bench(points=tuple(point(float(clients)) for clients in range(1, 60, 3))),
    "open only": bench(
        points=tuple(
            replace(arrivals(r, p), load=OfferedLoad("burst", r, 8))
            for r, p in ((50, 30.0), (90, 99.0))
        ),
        rate=None,
    ),
    "fast": _scaled(1e-6),
    "slow": _scaled(1e6),
    "broken promise": bench(slo=Slo(p99_ms=1.0, p50_ms=0.5, throughput=1e6), rate=None),
    "a GPU": bench(
        points=(
            point(
                8,
                resources=Resources(
                    16, 0.2, 1.1, (ProcessUse("tritonserver", 1.0, 900.0),),
                    (GpuUse("NVIDIA L4", 0.81, 3100.0),),
                ),
            ),
        )
    ),
}  # fmt: skip
"""Name to a result that is nothing like the usual one."""


def trial(number: int, verdict: Any, **changes: Any) -> Trial:
    """A trial of one more core instance, but for `changes`."""
    values: dict[str, Any] = {
        "number": number,
        "change": {"core.instances": number + 1},
        "before": {"core.instances": 1},
        "reason": "core's only instance is busy 93 % of the time while a core is idle",
        "verdict": verdict,
        "says": "231/s against 198/s in 3 rounds, all of them better",
        "score": 198.0 + 20 * number,
        "against": 198.0,
        "rounds": 3,
        "points": tuple(point(c, drift=0.9 + 0.05 * number) for c in (4, 8, 16)),
        "seconds": 41.0,
    }
    return Trial(**{**values, **changes})


def outcome(drift: float, **changes: Any) -> Outcome:
    """A setting that is `drift` times as fast as the usual one."""
    values: dict[str, Any] = {
        "overrides": {},
        "score": 150 * drift,
        "points": tuple(point(c, drift=drift) for c in (1, 2, 4, 8, 16, 32)),
        "bottleneck": FULL,
        "rate": replace(rate_search(), highest_per_s=150 * drift, lowest_broken_per_s=165 * drift),
        "cost": Price(0.34, 5e6, currency="USD", headroom=0.3).cost(150 * drift),
    }
    return Outcome(**{**values, **changes})


def tuned(**changes: Any) -> TuneResult:
    """Four trials, one of them better; but for `changes`."""
    larger = {"core.max_batch_size": 64}
    failing = {"core.queue_delay_us": 0, "preprocess.instances": 4}
    nothing: dict[str, Any] = {"score": None, "against": None, "rounds": 0, "points": ()}
    values: dict[str, Any] = {
        "subject": subject(overrides={"core.instances": 2}),
        "slo": PROMISE,
        "objective": "the highest Poisson rate at which p99 <= 80 ms holds",
        "trials": (
            trial(1, "better"),
            trial(2, "no difference", says="233/s against 231/s: within the rounds' spread"),
            trial(3, "worse", change=larger, before={"core.max_batch_size": 32}),
            trial(4, "failed", change=failing, says="the server did not become ready", **nothing),
        ),
        "skipped": {"postprocess.instances": "it is busy 4 % of the time"},
        "baseline": outcome(0.9),
        "winner": outcome(1.08, overrides={"core.instances": 2}),
        "met": True,
        "slo_kind": "met",
        "verdict": "p99 <= 80 ms holds up to 162/s, 20 % more than before",
        "advice": ("precision int8 would halve the core's time",),
        "stopped": "no knob is left that the last measurement speaks for",
        "seconds": 412.0,
    }
    return TuneResult(**{**values, **changes})
