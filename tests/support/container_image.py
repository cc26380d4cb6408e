"""What stands for the serving image: its files and environment around the server of the tests."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.support.container_cases import copy_of_the_images_files
from tests.support.processes import eventually
from triptych.base.cache import cache_root
from triptych.container.supervisor import STARVED
from triptych.serving.embedded import find_installation, find_release
from triptych.serving.orphan_cleanup import PROCESS_TAG_VARIABLE, new_process_tag, remove_orphans
from triptych.serving.ports import reserve_ports
from triptych.serving.readiness import is_cpu_starved

KEY = "a-key-of-the-operators"
USUAL_LIMITS = ("/bin/sh", "-c", 'ulimit -S -n 1024; exec "$0" "$@"')
"""Command that runs another with the usual soft limit of open files."""
WRAPPER = """#!/bin/sh
export {variables}
exec {program} "$@" {flags}
"""


class Image(NamedTuple):
    """What stands for the image: its files, its environment, the container's working directory."""

    files: Path
    variables: dict[str, str]
    folder: Path | None = None

    def run(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        # Without site: nothing of this environment is there but the files of the image.
        return subprocess.Popen(
            [*USUAL_LIMITS, sys.executable, "-S", "-m", f"triptych.container.{module}", *arguments],
            env=self.variables,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def health(self) -> tuple[int, str]:
        with self.run("health") as process:
            said = process.communicate(timeout=60)[0]
        return process.returncode, said.strip()

    def set_seconds(self, constant: str, seconds: float) -> None:
        """Replace a constant of the supervisor in the image's copy of the files."""
        file = self.files / "triptych/container/supervisor.py"
        text, times = re.subn(rf"(?m)^{constant} = .*", f"{constant} = {seconds}", file.read_text())
        assert times == 1
        file.write_text(text)

    def url(self, service: str) -> str:
        return f"127.0.0.1:{self.variables[f'TRIPTYCH_{service}_PORT']}"

    @contextmanager
    def serving(
        self, *arguments: str, is_up: Callable[[], bool] | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """The entry point, once it is healthy; ended for want of CPU it runs again, as in a pod."""
        is_up = is_up or (lambda: self.health()[0] == 0)
        for _ in range(3):
            with self.run("entrypoint", *arguments) as process:
                try:
                    told = eventually(lambda: process.poll() is not None or is_up(), 240)
                    ended = process.poll() is not None
                    if told and not ended:
                        yield process
                        return
                    remove_orphans(self.variables[PROCESS_TAG_VARIABLE])  # they hold its pipe
                    said = process.communicate(timeout=60)[0]
                finally:
                    process.kill()
            if not (ended and (is_cpu_starved(said) or STARVED in said)):
                break
        raise AssertionError(said)


@contextmanager
def image_of(folder: Path, repository: Path) -> Iterator[Image]:
    """An image around the server of the tests; nothing of its server is left behind."""
    folder.mkdir(parents=True)
    mark = new_process_tag()
    server = find_installation(folder / "server")
    flags = [
        f"--backend-config={backend},shm-region-prefix-name={mark}"
        for backend in server.python_backends
    ]
    if server.backend_directory:
        flags.append(f"--backend-directory={server.backend_directory}")
    variables = [f"{name}={value}" for name, value in server.environment.items()]
    wrapper = folder / "tritonserver"
    wrapper.write_text(
        WRAPPER.format(
            variables=shlex.join(variables),
            program=shlex.quote(str(server.executable)),
            flags=shlex.join(flags),
        )
    )
    wrapper.chmod(0o755)
    (folder / "key").write_text(KEY)
    services = {f"TRIPTYCH_{name}_PORT": 0 for name in ("HTTP", "GRPC", "METRICS")}
    environment = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(copy_of_the_images_files(folder / "opt")),
        "PYTHONSAFEPATH": "1",
        "TRIPTYCH_TRITON": str(find_release()),
        "TRIPTYCH_HOST": "127.0.0.1",
        "TRIPTYCH_REPOSITORY": str(repository),
        "TRIPTYCH_RESTRICTED_KEY_FILE": str(folder / "key"),
        "TRIPTYCH_RESTRICTED_KEY": KEY,
        # Only the first container of all tests checks a build on this device.
        "TRIPTYCH_STATE": str(cache_root() / "device-checks"),
        PROCESS_TAG_VARIABLE: mark,
    }
    try:
        with reserve_ports("127.0.0.1", services) as ports:
            environment |= {name: str(port) for name, port in ports.items()}
            yield Image(folder / "opt", environment)
    finally:
        remove_orphans(mark)


def server_of(process: subprocess.Popen[str]) -> int:
    """Process id of the tritonserver that the entry point runs."""
    (server,) = (
        child for child in psutil.Process(process.pid).children() if child.name() == "tritonserver"
    )
    return server.pid
