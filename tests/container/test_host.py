"""The host as a server meets it: limits of its process, and files that its user cannot read."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.container_cases import write_pipeline
from tests.support.rights import without_rights
from triptych.container import health, lock_check
from triptych.container.entrypoint import main
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


PROGRAMS: tuple[tuple[Callable[..., int], tuple[list[str], ...], int], ...] = (
    (lock_check.main, ([],), 2),
    (main, ([],), 2),
    (health.main, (), 1),
)
"""Programs of the image, their arguments, and their exit codes where a file cannot be read."""


@pytest.mark.parametrize("settings", [{}, {"TRIPTYCH_LOCK_CHECK": "warn"}])
def test_what_cannot_be_read_is_not_absent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, str],
) -> None:
    repository = write_pipeline(tmp_path / "models", backend="onnxruntime", built=False, plan=None)
    monkeypatch.setenv("TRIPTYCH_REPOSITORY", str(repository))
    monkeypatch.setenv("TRIPTYCH_SERVER", "true")
    monkeypatch.setenv("TRIPTYCH_TRITON", "26.08")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    # What a server does not read may be closed: a document, folders of others, a broken link.
    for name in ("minilm/README.md", ".trash/a", "lost+found/a"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).touch(mode=0)
    (repository / ".trash").chmod(0)
    (repository / "lost+found").chmod(0)
    (repository / "minilm/link").symlink_to("nothing")
    assert without_rights(lock_check.main, []) == 0, capsys.readouterr().err
    for path, mode in (
        (".", 0),
        ("minilm", 0),
        ("minilm", 0o600),  # its names can be listed
        ("minilm_core/1", 0o100),
        ("minilm/config.pbtxt", 0),
        ("minilm/triptych.lock.json", 0o200),
        ("minilm_core/1/model.onnx", 0),
        ("minilm minilm_core", 0),
    ):
        closed = [repository / each for each in path.split()]
        others = "Given: 2 such files and folders. " if len(closed) > 1 else ""
        for each in closed:
            each.chmod(mode)
        wanted = (
            f"`{closed[0]}` cannot be read by user {os.geteuid()}. {others}Run "
            f"`chmod -R a+rX {repository}` as its owner, or run this as that user."
        )
        for program, words, code in PROGRAMS:
            assert without_rights(program, *words) == code, path
            said = "".join(capsys.readouterr())
            assert said == f"{'error' if words else 'unhealthy'}: {wanted}\n", path
        for each in closed:
            each.chmod(0o755)
    assert without_rights(lock_check.main, []) == 0
