"""Program that prints by how many MiB its process grows at most while a graph computes a batch."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from triptych.graph.session import open_session


def main(artifact: str, feed_file: str) -> None:
    """Print the MiB by which this process grows at most while it computes a batch."""
    import onnxruntime

    options, run_options = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
    # As the core's config says; see `repository.core_config.CPU_MEMORY`.
    options.enable_mem_pattern = False
    run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    session = open_session(Path(artifact), options)
    with np.load(feed_file) as loaded:
        feed = {name: loaded[name] for name in loaded.files}
    # The first run of a session allocates what later ones keep.
    session.run(None, feed, run_options)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
    before = _status_mib("VmRSS")
    session.run(None, feed, run_options)
    print(_status_mib("VmHWM") - before)


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main(*sys.argv[1:])
