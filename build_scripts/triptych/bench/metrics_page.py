"""The server's metrics page: the Prometheus text format as plain samples."""

from __future__ import annotations

import re
import urllib.request

from triptych.errors import UserError

Sample = tuple[str, dict[str, str], float]
"""Name of the metric, its labels, its value."""

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = {r"\n": "\n", r"\"": '"', r"\\": "\\"}
_TIMEOUT_S = 5.0


def read_samples(text: str) -> list[Sample]:
    """Every sample of a metrics page, in its order; lines that are none are left out.

    The format: https://prometheus.io/docs/instrumenting/exposition_formats/.

    Args:
        text: the page; ``name{label="value"} 1.5`` a line.
    """
    samples: list[Sample] = []
    for line in text.splitlines():
        found = _SAMPLE.fullmatch(line.strip())
        if found is None:
            continue
        name, labels, value = found.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        named = {key: _unescape(raw) for key, raw in _LABEL.findall(labels or "")}
        samples.append((name, named, number))
    return samples


def fetch_samples(metrics_url: str) -> list[Sample]:
    """The samples of the page at `metrics_url`.

    Args:
        metrics_url: the whole address, as `Server.metrics_url`.

    Raises:
        UserError: nothing answers there.
    """
    # No proxy stands between this and the server, as for gRPC.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(metrics_url, timeout=_TIMEOUT_S) as response:
            return read_samples(response.read().decode("utf-8", errors="replace"))
    except (OSError, ValueError) as error:
        raise UserError(
            "metrics_url",
            "must be the address of a metrics page that answers",
            given=f"{metrics_url}: {error}",
            remedy="Write for example http://127.0.0.1:8002/metrics",
        ) from error


def _unescape(raw: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPED.get(found[0], found[0]), raw)
