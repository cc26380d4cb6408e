"""The server's metrics page: the Prometheus text format as plain samples."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from triptych.base.errors import UserError

MetricSample = tuple[str, dict[str, str], float]
"""Name of the metric, its labels, its value."""

_TIMEOUT_S = 5.0


def read_metrics(text: str) -> list[MetricSample]:
    """Every sample of a metrics page, in its order; lines that are none are left out.

    Args:
        text: the page; ``name{label="value"} 1.5`` a line.
    """
    samples: list[MetricSample] = []
    for line in text.splitlines():  # the parser gives up a page at the first line that is broken
        if line.strip() and not line.startswith("#"):
            try:
                (family,) = text_string_to_metric_families(line)
            except ValueError:
                continue
            samples += [(one.name, one.labels, float(one.value)) for one in family.samples]
    return samples


def fetch_metrics(metrics_url: str) -> list[MetricSample]:
    """The samples of the page at `metrics_url`, the whole address, as `Server.metrics_url`.

    Raises:
        UserError: nothing answers there.
    """
    # No proxy stands between this and the server, as for gRPC.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(metrics_url, timeout=_TIMEOUT_S) as response:
            return read_metrics(response.read().decode("utf-8", errors="replace"))
    except (OSError, ValueError) as error:
        raise UserError(
            "metrics_url",
            "must be the address of a metrics page that answers",
            given=f"{metrics_url}: {error}",
            remedy="Write for example http://127.0.0.1:8002/metrics",
        ) from error
