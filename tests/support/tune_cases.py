"""Made-up measurements, a pipeline's evidence with them, and searches on made-up scores."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triptych.operate.tune.fields import FIELDS, Observation, Propose
from triptych.operate.tune.kinds import Setting
from triptych.operate.tune.objective import ScoredRound
from triptych.operate.tune.search import Search, TrialCache
from triptych.serving.bench.results import Measurement, StepUse
from triptych.spec.spec import EncoderSpec


def step(name: str, *, busy: float | None, batch: int = 4) -> StepUse:
    return StepUse(
        name, f"m_{name}", 1, 0, 100, 0, 100 * batch, 100, {batch: 100}, 1, 1, 1, 1, busy
    )


def measurement(rate: float, p99_us: float = 1e3, **fields: Any) -> Measurement:
    values: dict[str, Any] = {
        "seconds": 1.0,
        "requests": max(1, int(rate)),
        "errors": {},
        "throughput_per_s": rate,
        "is_stable": True,
        "steps": tuple(
            step(name, busy=busy)
            for name, busy in (("preprocess", 0.1), ("core", 1.0), ("postprocess", 0.1))
        ),
        **dict.fromkeys(("mean_us", "p50_us", "p90_us", "p95_us"), p99_us / 2),
        **dict.fromkeys(("p99_us", "p99_9_us"), p99_us),
    }
    return Measurement(**{**values, **fields})


def evidence(one: Measurement | None = None, cores: int = 2, **fields: Any) -> Observation[Any]:
    """Of a pipeline with the defaults; `fields` are those of its core."""
    named = {"name": "texts", "folder": Path(), "task": "text-embedding"}
    spec = EncoderSpec.model_validate({**named, "model": {"source": "x"}, "core": fields})
    plan: Any = SimpleNamespace(
        spec=spec,
        layout="packed" if spec.core.layout == "auto" else spec.core.layout,
        max_batch_size=spec.core.max_batch_size,
        lengths=SimpleNamespace(mean=10.0),
        bucket_edges=(8, 16),
        padding_share=0.1,
    )
    return Observation(plan, one or measurement(100.0), cores, {})


class Surface:
    """Trial servers whose plans and scores come from functions of a setting's overrides.

    Attributes:
        rounds: Number of rounds that were measured.
        now: Time of the clock, in seconds; a round takes `round_s`.
    """

    def __init__(
        self,
        plan: Callable[[Mapping[str, Any]], Any],
        score: Callable[[Mapping[str, Any]], ScoredRound],
        *,
        start: Callable[[Mapping[str, Any]], None] = lambda _overrides: None,
        round_s: float = 0.0,
    ) -> None:
        self._plan, self._score, self._start, self._round_s = plan, score, start, round_s
        self._present = self._other = Setting()
        self.rounds, self.now = 0, 0.0

    def begin(self, present: Setting) -> tuple[Any, ScoredRound]:
        self._present = present
        self.now += self._round_s / 2
        return self._plan(present.overrides), self._score(present.overrides)

    def start_trial(self, other: Setting) -> None:
        self._start(other.overrides)
        self._other = other

    def round(self) -> tuple[ScoredRound, ScoredRound]:
        self.rounds += 1
        self.now += self._round_s
        return self._score(self._present.overrides), self._score(self._other.overrides)

    def accept_trial(self) -> Any:
        self._present = self._other
        return self._plan(self._present.overrides)

    def next_round_s(self) -> float:
        return self._round_s

    def final_s(self) -> float:
        return 2 * self._round_s

    def search(
        self,
        cache: TrialCache,
        fields: Sequence[Propose[Any]] = FIELDS,
        known: Setting | None = None,
        **more: Any,
    ) -> Search[Any]:
        """Search with these fields; `more` are other settings of the search."""
        told: list[str] = []
        servers: Any = self
        usual = {"deadline": 1e9, "limits_us": {}, "progress": lambda _, line: told.append(line)}
        clock = {"cores": 2, "fields": fields, "clock": lambda: self.now}
        search = Search(servers, cache, **{**usual, **clock, **more})
        search.run(Setting(), known)
        assert len(told) == len(search.trials) + 1
        return search
