"""Create new pipelines from templates, atomically."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError, closest
from triptych.base.files import expand_home, os_errors_as_user_errors, parse_yaml
from triptych.models.source import check_model_files
from triptych.spec.kind import GENERATING, GENERATION
from triptych.spec.scaffold_graph import Described, fit_graph
from triptych.spec.spec import SPEC_FILE, check_folder
from triptych.spec.template import BUILT_IN, PAIR, SIDES, fill, find_template, tasks
from triptych.spec.traffic import TRAFFIC_FILE

STAGING = ".new"
MASK_TOKEN = "<mask>"
PAIR_MODEL = "openai/clip-vit-base-patch32"
"""Example of a model of texts and images."""
LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Config keys under which models store their maximum sequence length."""
MODULE = re.compile(r"(.+\.py):([A-Za-z_]\w*)")
"""Form of a module: a Python file, and the function or class in it that makes the module."""
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
    name: str,
    *,
    task: str | None,
    model: str | None,
    with_hooks: bool,
    pipelines: Path,
    describe: Callable[[Path, str], Described] | None = None,
    template: str | None = None,
    templates: Path | None = None,
) -> Scaffold:
    """Create the folder ``pipelines/name`` with a spec, traffic and, optionally, hooks.

    The task `PAIR` has a folder for each side, with its ending in the name.

    Args:
        name: Name of the pipeline.
        task: Name of the built-in template: a task, for most of them. None with an ONNX file or a
            module takes `onnx`.
        model: Source of the model: a Hub id, ``package:…``, or a folder, an ONNX file or a module
            ``FILE.py:NAME``, relative to the working directory. None: the example of the template.
        with_hooks: Whether to add ``hooks.py`` and its tests if the task does not need them.
        pipelines: Folder of the pipelines; created if missing.
        describe: Returns the interface of an ONNX file, or of the module that a function or class
            of a Python file makes, by the path of the file and the name. None: the inputs and
            outputs are those of the template.
        template: Name or folder of a template in place of `task`.
        templates: Folder with templates of a company, which have names then, too.

    Raises:
        UserError: The name, task or template is invalid, the model folder is missing, or the
            pipeline exists.
    """
    if task == PAIR and template is None:
        return _scaffold_pair(name, model, pipelines, with_hooks=with_hooks)
    folder = pipelines / name
    if folder.name != name:
        raise UserError(
            "NAME",
            "must be a name without a path",
            given=name,
            remedy="Give the parent folder with --pipelines",
        )
    source = _choose(task, model) if template is None else find_template(template, templates)
    if template is not None and task is not None:
        raise UserError(
            "--template",
            "takes the place of TASK",
            given=f"{task} and {template}",
            remedy="Omit one of them",
        )
    # The spec does not exist yet: the built-in spec of a task takes its place in the check.
    check_folder(folder, BUILT_IN / GENERATION / SPEC_FILE)
    local, factory = (None, "") if model is None else _local_model(model)
    if local is not None and local.is_dir():
        check_model_files(local, "--model", str(model))
    with _new_folder(folder) as staging:
        marks = {
            "@name@": name,
            "@folder@": shlex.quote(str(folder)),
            "@mask@": MASK_TOKEN if local is None else _mask_token(local),
        }
        fill(source, staging, with_hooks=with_hooks, marks=marks)
        spec = (staging / SPEC_FILE).read_text(encoding="utf-8")
        task = "".join(re.findall(r"(?m)^task: *(\S+)", spec)[:1])
        if model is not None:
            is_file = local is not None and local.is_file()
            written = _written_source(model, local, folder) + (f":{factory}" if factory else "")
            spec = _with_source(spec, written, is_file=is_file, is_module=bool(factory))
            if is_file and local and describe is not None and source.parent == BUILT_IN:
                samples = BUILT_IN / "image-classification/samples"
                spec = fit_graph(spec, staging, folder, describe(local, factory), samples)
        if task == GENERATION and local is not None:
            spec = _fit_model(spec, staging, local)
        (staging / SPEC_FILE).write_text(spec, encoding="utf-8")
        files = sorted(
            path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file()
        )
    where = "" if pipelines == Path("pipelines") else f" --pipelines {shlex.quote(str(pipelines))}"
    example = re.findall(r"(?m)^# Try it: (.+)$", spec)
    commands = [f"triptych build {name}{where}", "triptych serve"]
    if task not in GENERATING:
        commands.insert(0, f"triptych test {name}{where}")
    return Scaffold(str(folder), files, commands + example[:1])


def _scaffold_pair(name: str, model: str | None, pipelines: Path, *, with_hooks: bool) -> Scaffold:
    """Create the folders of both sides of a model of texts and images; see `scaffold`."""
    names = [f"{name}_{side}" for side in SIDES]
    for each in names:
        _check_new(pipelines / each)
    made = []
    for each, other, task in zip(names, names[::-1], SIDES.values(), strict=True):
        made.append(
            scaffold(
                each,
                task=task,
                model=model or PAIR_MODEL,
                with_hooks=with_hooks,
                pipelines=pipelines,
            )
        )
        spec = pipelines / each / SPEC_FILE
        line = f"pair_with: {other}   # the other side of the model, in the folder beside this one"
        text = re.sub(r"(?m)^task: .+$", rf"\g<0>\n{line}", spec.read_text(encoding="utf-8"))
        spec.write_text(text, encoding="utf-8")
    files = [f"{Path(each.folder).name}/{file}" for each in made for file in each.files]
    tests, builds, serve, *examples = zip(*(each.commands for each in made), strict=True)
    build = builds[0].replace(names[0], " ".join(names), 1)
    commands = [*tests, build, serve[0], *(line for lines in examples for line in lines)]
    return Scaffold(str(pipelines), files, commands)


def _choose(task: str | None, model: str | None) -> Path:
    """Return the folder of a built-in template."""
    is_module = model is not None and MODULE.fullmatch(model) is not None
    if is_module and task in (None, "pytorch"):
        task = "onnx"  # the functions of `pytorch` are those of its example
    if task is None and model is not None and Path(model).suffix == ".onnx":
        task = "onnx"
    if task is None or task not in tasks():
        known = sorted([*tasks(), PAIR])
        raise UserError(
            "TASK",
            "is not a known task" if task else "is required",
            given=task or "",
            remedy=f"{closest(task or '', known)}Choose one of: {', '.join(known)}",
        )
    return BUILT_IN / task


def _with_source(spec: str, source: str, *, is_file: bool, is_module: bool) -> str:
    """Return the text of a spec with another source, ONNX file or module of the model."""
    key, kind = ("onnx", "an ONNX file or module") if is_file else ("source", "a folder or Hub id")
    line, old = f"  {key}: {_yaml_scalar(source)}", rf"(?m)^  {key}: \S+"
    if is_module:  # the comment of the line is about ONNX files
        line = (
            f"  module: {_yaml_scalar(source)}\n"
            "  # weights: FILE            # .safetensors or a state dict; if the module has none"
        )
        old += ".*"
    spec, count = re.subn(old, lambda _: line, spec, count=1)
    if not count:
        raise UserError(
            "--model",
            f"must not be {kind} for this template",
            given=source,
            remedy=f"Omit the option and edit the {SPEC_FILE} of the new folder",
        )
    return spec


def _written_source(model: str, local: Path | None, folder: Path) -> str:
    """Return the source of a model as the spec in `folder` has it."""
    if local is None:
        return model
    if expand_home(model).is_absolute():
        return str(local)
    # `..` of a linked folder is not its parent in the path, so links are resolved.
    return os.path.relpath(local.resolve(), folder.parent.resolve() / folder.name)


def _local_model(model: str) -> tuple[Path | None, str]:
    """Return the folder, ONNX file or Python file that `model` names, and the name in the latter.

    The path is None for a Hub id or a package.
    """
    path, module = expand_home(model), MODULE.fullmatch(model)
    if module and expand_home(module[1]).is_file():
        return expand_home(module[1]), module[2]
    if path.is_dir() or (path.suffix == ".onnx" and path.is_file()):
        return path, ""
    if module or model.startswith((".", "/", "~")) or path.exists():
        raise UserError(
            "--model",
            "must be a folder, an ONNX file, a module `FILE.py:NAME`, a Hub id `owner/name`, or "
            "`package:<module>/<folder>`",
            given=f"{model}: no such folder or file",
            remedy="Correct the path; relative paths start at the working directory",
        )
    return None, ""


def _yaml_scalar(value: str) -> str:
    """Return `value` as YAML, quoted if YAML would read it as something else."""
    try:
        if parse_yaml(f"source: {value}") == {"source": value}:
            return value
    except ValueError:
        pass
    return json.dumps(value, ensure_ascii=False)


def _mask_token(folder: Path) -> str:
    """Return the mask token from the tokenizer's files in `folder`; `MASK_TOKEN` without one."""
    for file in TOKENIZER_FILES:
        token = _read_object(folder / file).get("mask_token")
        if isinstance(token, dict):  # an AddedToken
            token = token.get("content")
        if isinstance(token, str):
            return token
    return MASK_TOKEN


def _fit_model(spec: str, target: Path, folder: Path) -> str:
    """Return the spec with the model's limit of tokens; remove chats where it has no template."""
    config = _read_object(folder / "config.json")
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
        traffic = target / TRAFFIC_FILE
        rows = map(json.loads, traffic.read_text(encoding="utf-8").splitlines())
        texts = [row.get("text_input") or row["messages"][-1]["content"] for row in rows]
        lines = [json.dumps({"text_input": text}, ensure_ascii=False) for text in texts]
        traffic.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return spec


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `folder` if the block raises no error."""
    try:
        with (
            os_errors_as_user_errors(folder.parent, "--pipelines"),
            _only_writer(folder.parent) as staging,
        ):
            _check_new(folder)
            staging.mkdir()
            yield staging
            staging.rename(folder)
    except OSError as error:
        raise UserError(
            "--pipelines",
            "is not a writable folder",
            given=error,
            remedy="Change its permissions, or give another folder",
        ) from error


def _check_new(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        raise UserError(
            str(folder),
            "already exists, and existing folders are never overwritten",
            given="a folder of that name",
            remedy="Choose another name, or remove the folder",
        )


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
