"""Entry point of the container: check the build manifests, make the flags, run the server.

Usage: ``python3 -m triptych.container.entrypoint [--machine=NAME] [FLAG…]``; flags given here come
last and win. The machine replaces that of ``TRIPTYCH_MACHINE``; else it is the one found.
Exit codes before the server runs: 1 a pipeline cannot be served on this machine, 2 a setting is
wrong or there is no repository or server. Afterwards: 0 after a stop signal, 1 if a pipeline fails
the accuracy gate on this device, else the server or one of its steps has died, and the container
should be restarted.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from triptych.base.errors import UserError, print_line
from triptych.base.release_changes import defects_of
from triptych.base.releases import Release, parse_release
from triptych.container.device_check import (
    MODE_VARIABLE,
    DeviceChecks,
    PassedChecks,
    find_checks,
    unchecked_mark,
)
from triptych.container.flags import (
    ServerFlags,
    absolute_paths,
    cache_flags,
    production_flags,
    uses_rate_limiter,
)
from triptych.container.health import HealthCheck, find_server_fault
from triptych.container.lock_check import (
    EXIT_MISTAKE,
    EXIT_REFUSED,
    enforce,
    has_version_compatible_plans,
)
from triptych.container.machine import Machine, read_machine
from triptych.container.manifests import core_variables, find_pipelines, largest_request_mib
from triptych.container.serving_machine import choose_variant, find_machine
from triptych.container.settings import KEY_VARIABLE, Settings, read_settings
from triptych.container.shared_memory import SharedRegions, new_prefix
from triptych.container.supervisor import supervise
from triptych.runtime.in_flight import PREFIX_VARIABLE

PLAIN = "letters, digits and any of @%+=:,./_-"


def is_plain(text: str | Path) -> bool:
    """Whether a shell reads `text` as one word without quoting.

    The Python backend (24.10 at least) passes the path of each step to ``bash -c``.
    """
    return shlex.quote(str(text)) == str(text)


def check_model_names(repository: Path) -> None:
    """Raise `UserError` for the first model's folder whose name needs quoting in a shell."""
    for folder in sorted(repository.iterdir()):
        if folder.is_dir() and not is_plain(folder.name):
            raise UserError(
                "repository",
                f"must hold models whose names are of {PLAIN}",
                given=repr(folder.name),
                remedy="Rename the folder, or move it out of the repository",
            )


# Each step is a separate process, whose tokenizer threads would compete for the cores.
_STEPS = {"TOKENIZERS_PARALLELISM": "false"}
_VERSION_FILE = Path("/opt/tritonserver/TRITON_VERSION")


def server_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the server and its steps, without the operators' key."""
    kept = {name: value for name, value in variables.items() if name != KEY_VARIABLE}
    if samples := kept.get("TRIPTYCH_SAMPLES"):  # the server has another working directory
        kept["TRIPTYCH_SAMPLES"] = str(Path(samples).absolute())
    return {**kept, **_STEPS}


def describe_loader(variables: Mapping[str, str]) -> str:
    """Return a line for each variable that loads foreign libraries into the server."""
    names = ("LD_PRELOAD", "LD_LIBRARY_PATH")
    return "".join(
        f"note: the server and its steps load libraries of {name}={variables[name]}\n"
        for name in names
        if variables.get(name)
    )


def find_release(variables: Mapping[str, str], version_file: Path = _VERSION_FILE) -> Release:
    """Return the release of the image's server, from its variables or the server's own file.

    NVIDIA sets ``NVIDIA_TRITON_SERVER_VERSION``, this project's images ``TRIPTYCH_TRITON``.

    Raises:
        UserError: The release is not set, or is not a release.
    """
    named = variables.get("NVIDIA_TRITON_SERVER_VERSION")
    if not named and version_file.is_file():
        named = version_file.read_text(encoding="utf-8")
    named = named or variables.get("TRIPTYCH_TRITON")
    if not named:
        raise UserError(
            "TRIPTYCH_TRITON",
            "must name the server's release where the image does not",
            remedy="Set it to the image's tag, such as 26.11",
        )
    return parse_release(named)


def flags_for(
    repository: Path, options: ServerFlags, machine: Machine, release: Release
) -> list[str]:
    """Return the production flags, with those that the repository's configs and plans need."""
    complete = replace(
        options,
        gpus=tuple(range(len(machine.gpus))),
        rate_limit=uses_rate_limiter(repository),
        version_compatible=has_version_compatible_plans(repository),
        max_request_mib=options.max_request_mib or largest_request_mib(repository),
    )
    cache = cache_flags(repository, options.cache_mib, options.cache)
    return [*production_flags(release, complete), *cache]


def command(settings: Settings, machine: Machine, release: Release) -> list[str]:
    """Return the server's command line without the flags that the operator adds.

    Raises:
        UserError: The program does not exist, or a model's name cannot be served.
    """
    if not is_plain(settings.repository):
        raise UserError(
            "TRIPTYCH_REPOSITORY",
            f"must be a path of {PLAIN}",
            given=repr(str(settings.repository)),
            remedy="Mount the repository elsewhere",
        )
    check_model_names(settings.repository)
    program = shutil.which(settings.server)
    if program is None:
        raise UserError(
            "TRIPTYCH_SERVER",
            "is not an installed program",
            given=settings.server,
            remedy="Use an image of tritonserver",
        )
    return [
        str(Path(program).absolute()),
        f"--model-repository={settings.repository}",
        f"--http-address={settings.host}",
        f"--grpc-address={settings.host}",
        f"--http-port={settings.http_port}",
        f"--grpc-port={settings.grpc_port}",
        f"--metrics-port={settings.metrics_port}",
        *flags_for(settings.repository, settings.options, machine, release),
    ]


def variant_flags(settings: Settings, machine: str) -> list[str]:
    """Return the flag that selects the plan for this machine, and print which one it is."""
    chosen = choose_variant(settings.repository, find_machine(settings.cores), machine)
    for line in chosen.lines:
        print_line(line)
    return [f"--model-config-name={chosen.name}"] if chosen.name else []


def warn_of(release: Release) -> None:
    """Print the defects of this release that every server has."""
    for defect in defects_of(release, {"any server"}):
        print_line(f"warning: in Triton {release}, {defect.effect} ({defect.source})")


def find_device_checks(settings: Settings, machine: Machine, release: Release) -> DeviceChecks:
    """Return the checks that the server has to pass on this device before it is ready."""
    return DeviceChecks(
        find_checks(settings.repository, machine, str(release)),
        PassedChecks(settings.state or Path(f"/dev/shm/triptych-checks-{os.getuid()}")),
        settings.device_check,
        print_line,
    )


def main(arguments: Sequence[str]) -> int:
    """Run the server with additional flags until a stop signal comes or a step dies."""
    try:
        settings = read_settings()
        named = [one.partition("=")[2] for one in arguments if one.startswith("--machine=")]
        arguments = [one for one in arguments if not one.startswith("--machine=")]
        machine = read_machine()
        if not enforce(settings, machine):
            return EXIT_REFUSED
        release = find_release(os.environ)
        prefix = os.environ.setdefault(PREFIX_VARIABLE, new_prefix())
        words = [
            *command(settings, machine, release),
            *variant_flags(settings, (named or [settings.machine])[-1]),
            f"--backend-config=python,shm-region-prefix-name={prefix}",
            *absolute_paths(arguments),
        ]
        warn_of(release)
        print(describe_loader(os.environ), end="", file=sys.stderr, flush=True)
        checks = find_device_checks(settings, machine, release)
    except UserError as error:
        print_line(f"error: {error.message}")
        return EXIT_MISTAKE
    os.umask(0o077)  # shared memory has user data, which must be private
    regions = SharedRegions(prefix)
    health = HealthCheck(find_pipelines(settings.repository), settings.metrics_url)
    mark = unchecked_mark(settings.http_port)
    mark.unlink(missing_ok=True)
    if checks.pending:
        mark.touch()

    def is_ready() -> bool:
        url = settings.health_url
        if find_server_fault(url) is not None or not checks.is_done(url):
            return False
        if not checks.refusal:
            mark.unlink(missing_ok=True)
        return True

    try:
        return supervise(
            words,
            core_variables(settings.repository) | server_variables(os.environ),
            is_ready=is_ready,
            find_fault=lambda: health.find_fault(settings.health_url),
            ask=lambda: health.ask(settings.health_url),
            grace_s=settings.options.exit_timeout_s,
            is_refused=lambda: bool(checks.refusal),
        )
    finally:
        if checks.refusal:
            print_line(f"error: {checks.refusal}: build it there, or set {MODE_VARIABLE}=warn")
        mark.unlink(missing_ok=True)
        regions.remove()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
