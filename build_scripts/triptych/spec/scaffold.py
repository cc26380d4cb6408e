"""Create new pipelines from the templates of a task, atomically.

``templates/TASK/`` has the files of a new folder, ``templates/TASK/hooks/`` those added with
hooks. Python files there end in ``.txt``, so that they are not modules of this package.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError, closest
from triptych.base.files import parse_yaml
from triptych.spec.kind import GENERATING, GENERATION
from triptych.spec.model_source import check_model_files
from triptych.spec.spec import SPEC_FILE, check_folder
from triptych.spec.traffic import TRAFFIC_FILE

TEMPLATES = Path(__file__).parent / "templates"
HOOKS = "hooks"
STAGING = ".new"
MASK_TOKEN = "<mask>"
LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Config keys under which models store their maximum sequence length."""
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Scaffold:
    """Result of creating a pipeline.

    Attributes:
        files: Paths of the files, relative to the folder.
        commands: Commands to run next, in order.
    """

    folder: str
    files: list[str]
    commands: list[str]

    def as_dict(self) -> dict[str, object]:
        """Return plain data for ``--json``."""
        return asdict(self)


def scaffold(
    name: str, *, task: str | None, model: str | None, with_hooks: bool, pipelines: Path
) -> Scaffold:
    """Create the folder ``pipelines/name`` with a spec, traffic and, optionally, hooks.

    Args:
        name: Name of the pipeline.
        task: Task whose templates are used.
        model: Source of the model: a Hub id, ``package:…``, or a folder relative to the working
            directory. None: a public model for the task.
        with_hooks: Whether to add ``hooks.py`` and its tests if the task does not need them.
        pipelines: Folder of the pipelines; created if missing.

    Raises:
        UserError: The name or task is invalid, the model folder is missing, or the pipeline exists.
    """
    folder = pipelines / name
    if folder.name != name:
        raise UserError(
            "NAME",
            "must be a name without a path",
            given=name,
            remedy="Give the parent folder with --pipelines",
        )
    if task is None or task not in tasks():
        raise UserError(
            "TASK",
            "is not a known task" if task else "is required",
            given=task or "nothing",
            remedy=f"{closest(task or '', tasks())}Choose one of: {', '.join(tasks())}",
        )
    # The spec does not exist yet: the template's spec takes its place in the check.
    check_folder(folder, TEMPLATES / task / SPEC_FILE)
    local = None if model is None else _local_folder(model)
    if local is not None:
        check_model_files(local, "--model", str(model))
    marks = {
        "@name@": name,
        "@folder@": shlex.quote(str(folder)),
        "@mask@": _mask_token(local) or MASK_TOKEN,
    }
    contents = _fill(TEMPLATES / task, with_hooks=with_hooks, marks=marks)
    if task == GENERATION and local is not None:
        _fit_model(contents, local)
    spec = contents[SPEC_FILE].decode()
    if model is not None:
        source = model
        if local is not None and Path(model).expanduser().is_absolute():
            source = str(local)
        elif local is not None:
            # `..` of a linked folder is not its parent in the path, so links are resolved.
            source = os.path.relpath(local.resolve(), pipelines.resolve() / name)
        line = f"  source: {_yaml_scalar(source)}"
        spec = re.sub(r"(?m)^  source: \S+", lambda _: line, spec, count=1)
        contents[SPEC_FILE] = spec.encode()
    _write_whole(folder, contents)
    where = "" if pipelines == Path("pipelines") else f" --pipelines {shlex.quote(str(pipelines))}"
    example = re.findall(r"(?m)^# Try it: (.+)$", spec)
    commands = [f"triptych build {name}{where}", "triptych serve"]
    if task not in GENERATING:
        commands.insert(0, f"triptych test {name}{where}")
    return Scaffold(str(folder), sorted(contents), commands + example[:1])


def tasks() -> list[str]:
    """Return the tasks that have templates."""
    return sorted(path.parent.name for path in TEMPLATES.glob(f"*/{SPEC_FILE}"))


def _fill(template: Path, *, with_hooks: bool, marks: Mapping[str, str]) -> dict[str, bytes]:
    """Return path and content of each new file, with the template's placeholders replaced."""
    files = {}
    for source in sorted(path for path in template.rglob("*") if path.is_file()):
        path, content = source.relative_to(template), source.read_bytes()
        if path.parts[0] == HOOKS:
            path = path.relative_to(HOOKS)
            if not with_hooks:
                continue
        if path.suffix != ".png":
            for mark, value in marks.items():
                content = content.replace(mark.encode(), value.encode())
        files[path.as_posix().removesuffix(".txt")] = content
    return files


def _local_folder(model: str) -> Path | None:
    """Return the folder that `model` names; None for a Hub id or a package."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model.startswith((".", "/", "~")) or path.exists():
        raise UserError(
            "--model",
            "must be a folder, a Hub id `owner/name`, or `package:<module>/<folder>`",
            given=f"{model}: no such folder",
            remedy="Correct the path; relative paths start at the working directory",
        )
    return None


def _yaml_scalar(value: str) -> str:
    """Return `value` as YAML, quoted if YAML would read it as something else."""
    try:
        if parse_yaml(f"source: {value}") == {"source": value}:
            return value
    except ValueError:
        pass
    return json.dumps(value, ensure_ascii=False)


def _mask_token(folder: Path | None) -> str | None:
    """Return the mask token from the tokenizer's files in `folder`, or None."""
    for file in TOKENIZER_FILES if folder is not None else ():
        token = _read_object(Path(folder or "") / file).get("mask_token")
        if isinstance(token, dict):  # an AddedToken
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def _fit_model(contents: dict[str, bytes], folder: Path) -> None:
    """Lower `max_model_len` to the model's limit; remove chats where it has no chat template."""
    spec, config = contents[SPEC_FILE].decode(), _read_object(folder / "config.json")
    config = {**config, **(config.get("text_config") or {})}
    limits = [config[name] for name in LIMITS if isinstance(config.get(name), int)]
    spec = re.sub(
        r"(?m)(?<=^  max_model_len: )\d+",
        lambda found: str(min([int(found[0]), *limits])).ljust(len(found[0])),
        spec,
    )
    tokenizer = _read_object(folder / TOKENIZER_FILES[0])
    if not ("chat_template" in tokenizer or (folder / "chat_template.jinja").is_file()):
        spec = spec.replace("--chat", "--prompt")
        rows = map(json.loads, contents[TRAFFIC_FILE].decode().splitlines())
        texts = [row.get("text_input") or row["messages"][-1]["content"] for row in rows]
        lines = [json.dumps({"text_input": text}, ensure_ascii=False) for text in texts]
        contents[TRAFFIC_FILE] = "\n".join([*lines, ""]).encode()
    contents[SPEC_FILE] = spec.encode()


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_whole(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write `contents`, bytes by path, into a temporary folder and rename it to `folder`."""
    try:
        with _only_writer(folder.parent) as staging:
            if folder.exists() or folder.is_symlink():
                raise UserError(
                    str(folder),
                    "already exists, and existing folders are never overwritten",
                    given="a folder of that name",
                    remedy="Choose another name, or remove the folder",
                )
            for path, content in contents.items():
                (staging / path).parent.mkdir(parents=True, exist_ok=True)
                (staging / path).write_bytes(content)
            staging.rename(folder)
    except OSError as error:
        raise UserError(
            "--pipelines",
            "is not a writable folder",
            given=error,
            remedy="Change its permissions, or give another folder",
        ) from error


@contextmanager
def _only_writer(pipelines: Path) -> Iterator[Path]:
    """Lock a temporary folder for one process, without leftovers of killed processes."""
    pipelines.mkdir(parents=True, exist_ok=True)
    lock = os.open(pipelines, os.O_RDONLY | os.O_DIRECTORY)
    staging = pipelines / STAGING
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(staging, ignore_errors=True)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)
