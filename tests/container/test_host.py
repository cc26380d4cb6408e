"""The host as a server meets it: limits of its process."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from container_cases import write_pipeline
from triptych.container.supervisor import server_limits
from triptych.serving.server import check_and_make_flags

LIMITED = """
import subprocess
from triptych.container.supervisor import warn_of_limits
from triptych.serving.process import launched
warn_of_limits()
print(subprocess.check_output(launched(["/bin/sh", "-c", "ulimit -S -n; ulimit -H -n"])).split())
"""


def test_a_server_opens_as_many_files_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = 'ulimit -S -n 256; ulimit -H -n 700; exec "$0" -c "$1"'
    words = ["/bin/sh", "-c", limits, sys.executable, LIMITED]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert done.stdout == "[b'700', b'700']\n"
    assert "warning: a server should have 10,000 open files: with less, as many conn" in done.stderr
    assert "Here: 700. Raise the hard limit: `docker run --ulimit nofile=65536`" in done.stderr
    write_pipeline(tmp_path, backend="onnxruntime", built=False, plan=None)
    unlimited = resource.RLIM_INFINITY
    for files, stack, soft, told in (
        ((1024, 524_288), (8 << 20, unlimited), (65_536, 1 << 30), ""),
        ((10_000, 10_000), (unlimited, unlimited), (10_000, 1 << 30), ""),
        ((300_000, 524_288), (8 << 20, 2 << 30), (300_000, 1 << 30), ""),
        ((9_999, 9_999), (8 << 20, unlimited), (9_999, 1 << 30), "Here: 9,999. "),
        ((1024, 524_288), (8 << 20, 8 << 20), (65_536, 8 << 20), "bytes of stack: with less, a bo"),
    ):
        known = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_STACK: stack}
        monkeypatch.setattr(resource, "getrlimit", known.__getitem__)
        values = {limit.name: value for limit, value in server_limits().items()}
        assert values == {"stack": (soft[1], stack[1]), "nofile": (soft[0], files[1])}, files
        capfd.readouterr()
        check_and_make_flags(tmp_path, production=False)
        said = capfd.readouterr().err
        assert told in said, said
        assert ("warning" in said) == bool(told), said
