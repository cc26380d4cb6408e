"""The health check: the server is up and every ensemble, with each of its steps, is ready.

Usage: ``python3 -m triptych.container.health``. One line; exit code 0 healthy, 1 not. The models
are asked one by one: that a Python step has died is told by its own readiness from 25.12 on, by
``/v2/health/ready`` only from 26.04 on.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

from triptych.container.locks import Pipeline, find_pipelines
from triptych.container.settings import read_settings
from triptych.errors import UserError

_TIMEOUT_S = 3.0


def find_fault(url: str, pipelines: list[Pipeline]) -> str | None:
    """What is not in order at the server of `url`, in a few words; None where all is."""
    if not pipelines:
        return "the repository holds no ensemble"
    # The probe talks to its own machine; a proxy meant for the outside must not come between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    models = dict.fromkeys(name for p in pipelines for name in (p.name, *p.steps))
    for what, path in (
        ("the server", "/v2/health/live"),
        ("the server", "/v2/health/ready"),
        *((name, f"/v2/models/{name}/ready") for name in models),
    ):
        try:
            with opener.open(url + path, timeout=_TIMEOUT_S):
                pass
        except urllib.error.HTTPError as error:
            error.close()
            return f"{what} is not ready (HTTP {error.code})"
        except OSError as error:
            return f"{what} does not answer ({getattr(error, 'reason', error)})"
    return None


def main() -> int:
    """Prints one line; returns the exit code."""
    try:
        settings = read_settings()
        pipelines = find_pipelines(settings.repository)
    except UserError as error:
        print(f"unhealthy: {error.message}")
        return 1
    fault = find_fault(settings.health_url, pipelines)
    names = ", ".join(pipeline.name for pipeline in pipelines)
    print(f"unhealthy: {fault}" if fault else f"healthy: {names}")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
