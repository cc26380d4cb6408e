"""Templates of pipelines: the built-in ones, folders of a company and git repositories.

Built-in templates are filled by `scaffold`. Every other template is rendered by copier: files that
end in ``.jinja`` are Jinja templates with the variables ``name`` and ``folder`` and the answers to
the questions of its ``copier.yml``; other files are copied. Nothing of a template is executed
unless the user trusts it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from triptych.base.errors import UserError, closest
from triptych.base.extras import install_command
from triptych.base.files import expand_home, parse_yaml
from triptych.spec.spec import SPEC_FILE, check_folder

BUILT_IN = Path(__file__).parent / "templates"
SPEC_FILES = (SPEC_FILE, f"{SPEC_FILE}.jinja")
ANSWERS_FILE = ".copier-answers.yml"
"""File in a pipeline's folder with address, version and answers, which `update` reads."""
CONFLICT = b"<<<<<<< before updating"
"""First line of a conflict that copier leaves in a file."""


@dataclass(frozen=True)
class Template:
    """A template that `new --template` finds by its name.

    Attributes:
        folder: Folder of the template.
        description: Sentence in the first line of the spec, which says what a pipeline does.
    """

    name: str
    folder: Path
    description: str

    @property
    def is_built_in(self) -> bool:
        """Whether the template is one of this package."""
        return self.folder.parent == BUILT_IN

    def as_dict(self) -> dict[str, object]:
        """Return plain data for ``--json``."""
        return {**asdict(self), "folder": str(self.folder), "built_in": self.is_built_in}


@dataclass(frozen=True, kw_only=True)
class TemplateChoice:
    """The template of a new pipeline, and how it is rendered.

    Attributes:
        template: Name, folder, or address of a git repository.
        folder: Folder with templates of a company. None: only the built-in ones have names.
        answers: Answers to the questions of the template, by the names of the questions.
        ref: Tag, branch or commit of a git repository. None: its latest tag.
        trust: Whether tasks and Jinja extensions of the template may run.
    """

    template: str
    folder: Path | None = None
    answers: Mapping[str, str] = field(default_factory=dict)
    ref: str | None = None
    trust: bool = False


@dataclass(frozen=True)
class Update:
    """Result of updating a pipeline to a later version of its template.

    Attributes:
        template: Address of the template.
        before: Version of the template before, as git describes it.
        after: Version of the template now.
        files: Changed files, relative to the folder.
        conflicts: Changed files that contain conflicts.
    """

    folder: str
    template: str
    before: str
    after: str
    files: list[str]
    conflicts: list[str]

    def as_dict(self) -> dict[str, object]:
        """Return plain data for ``--json``."""
        return asdict(self)


def list_templates(folder: Path | None = None) -> list[Template]:
    """Return the templates of `folder` and the built-in ones, sorted by name.

    A template of `folder` replaces a built-in one of the same name.

    Raises:
        UserError: The folder is missing.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(
            "--templates", "must be an existing folder", given=folder, remedy="Correct the path"
        )
    found = {}
    for parent in (BUILT_IN, *([] if folder is None else [folder.resolve()])):
        for path in parent.iterdir():
            specs = [path / name for name in SPEC_FILES if (path / name).is_file()]
            if specs or any(path.glob("copier.y*ml")):
                found[path.name] = Template(path.name, path, _describe(path, specs))
    return [found[name] for name in sorted(found)]


def _describe(folder: Path, specs: list[Path]) -> str:
    """Return the text of the first line of the spec after the name, or an empty text."""
    for path in specs or sorted(folder.glob(f"*/{SPEC_FILE}*")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        return re.sub(r"^#\s*(?:@name@: |\{\{ ?name ?\}\}: )?", "", first).strip()
    return ""


def find_template(choice: TemplateChoice) -> Path | str:
    """Return the folder of a template, or its address if it is not on this machine.

    Raises:
        UserError: There is no such template.
    """
    given = choice.template
    path = expand_home(given)
    if re.search(r"[/:\\]", given) or given.startswith((".", "~")):
        if path.is_dir():
            return path.resolve()
        if ":" in given:
            return given
        raise UserError(
            "--template",
            "is not an existing folder",
            given=given,
            remedy="Correct the path, or give a git address such as gh:OWNER/NAME or git+https://…",
        )
    known = {template.name: template.folder for template in list_templates(choice.folder)}
    if given not in known:
        raise UserError(
            "--template",
            "is not a known template",
            given=given or "an empty text",
            remedy=f"{closest(given, known)}List them with `triptych templates`; a folder needs a "
            f"slash: ./{given}",
        )
    return known[given]


def render(choice: TemplateChoice, name: str, shown: Path, target: Path) -> None:
    """Render a template that is not built in into the folder `target`.

    Args:
        choice: The template and the answers to its questions.
        name: Name of the pipeline: the variable ``name`` of the template.
        shown: Folder of the pipeline: the variable ``folder`` of the template.
        target: Folder that is written, which is moved to `shown` later.

    Raises:
        UserError: The template cannot be read, or needs an answer or the user's trust.
    """
    source = str(find_template(choice))
    answers = {"name": name, "folder": str(shown), **choice.answers}
    with _copier_errors(source):
        from copier import Settings, run_copy

        worker = run_copy(
            source,
            target,
            answers,
            answers_file=ANSWERS_FILE,
            vcs_ref=choice.ref,
            settings=Settings(),  # The user's own file of settings may trust addresses.
            defaults=True,
            quiet=True,
            unsafe=choice.trust,
        )
    _check_answers(worker.template, choice.answers)
    if not (target / SPEC_FILE).is_file():
        raise UserError(
            "--template",
            f"must write a {SPEC_FILE}",
            given=f"{choice.template}, without {' or '.join(SPEC_FILES)}",
            remedy="Name the folder or the repository of a pipeline's template",
        )
    _write_answers(worker.template, target, answers)


def update(
    folder: Path, *, answers: Mapping[str, str], ref: str | None = None, trust: bool = False
) -> Update:
    """Bring a pipeline to a later version of its template, and keep the changes of the user.

    The differences between the two versions of the template are merged into the files of the
    folder, as `copier update` does. Where both changed the same lines, the file has both, between
    marks of conflicts. Nothing is committed.

    Args:
        folder: Folder of the pipeline, under git and without uncommitted changes.
        answers: New answers to questions of the template; the others stay.
        ref: Tag, branch or commit of the template. None: its latest tag.
        trust: Whether tasks, migrations and Jinja extensions of the template may run.

    Raises:
        UserError: The folder is not under git or has changes, or the template is not under git.
    """
    check_folder(folder, folder / SPEC_FILE)
    recorded = _read_answers(folder)
    _check_clean(folder)
    source = recorded["_src_path"]
    kept = {key: value for key, value in recorded.items() if not key.startswith("_")}
    with _copier_errors(source):
        from copier import Settings, run_update

        worker = run_update(
            folder.resolve(),
            dict(answers),
            answers_file=ANSWERS_FILE,
            vcs_ref=ref,
            settings=Settings(),
            defaults=True,
            overwrite=True,
            quiet=True,
            unsafe=trust,
        )
    _write_answers(worker.template, folder, {**kept, **answers})
    lines = _git(folder, "status", "--porcelain", "--untracked-files=all", "-z", "--", ".")
    top = Path(_git(folder, "rev-parse", "--show-toplevel").strip())
    paths = [top / line[3:] for line in lines.split("\0") if line]
    names = {str(path.relative_to(folder.resolve())): path for path in paths}
    conflicts = [
        name for name, path in names.items() if path.is_file() and CONFLICT in path.read_bytes()
    ]
    return Update(
        folder=str(folder),
        template=source,
        before=str(recorded["_commit"]),
        after=str(worker.template.commit),
        files=sorted(names),
        conflicts=sorted(conflicts),
    )


def _read_answers(folder: Path) -> dict[str, Any]:
    """Return what `render` wrote into the folder of a pipeline."""
    path = folder / ANSWERS_FILE
    try:
        found = parse_yaml(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError as error:
        raise UserError(
            str(path), "must be YAML", given=error, remedy="Restore the file from git"
        ) from error
    if not isinstance(found, dict) or not {"_src_path", "_commit"} <= found.keys():
        raise UserError(
            str(folder),
            "is not a pipeline of a template under git",
            given=f"no {ANSWERS_FILE} with `_src_path` and `_commit`",
            remedy="Only a pipeline that `triptych new --template` made from a git repository can "
            "be updated; change this one by hand",
        )
    return found


def _check_clean(folder: Path) -> None:
    """Check that git can show and undo what an update changes in `folder`."""
    why = "so that git shows what the update changes and can undo it"
    try:
        tracked = _git(folder, "ls-files", "--", SPEC_FILE)
        changes = _git(folder, "status", "--porcelain", "--", ".").splitlines()
    except subprocess.CalledProcessError as error:
        raise UserError(
            str(folder),
            f"must be in a git repository, {why}",
            given=error.stderr.strip().partition("\n")[0],
            remedy="Run `git init`, `git add` and `git commit` in the folder of your project",
        ) from error
    if changes or not tracked:
        raise UserError(
            str(folder),
            f"must be committed, {why}",
            given=", ".join(line.strip() for line in changes[:3]) or f"{SPEC_FILE} not in git",
            remedy="Commit or stash the changes in this folder",
        )


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
    )
    return done.stdout


def _check_answers(template: Any, answers: Mapping[str, str]) -> None:
    """Check that each answer has a question in a template of copier."""
    questions = template.questions_data
    for key in answers.keys() - questions.keys():
        raise UserError(
            f"--answer {key}",
            "is not a question of the template",
            given=key,
            remedy=f"{closest(key, questions)}Questions: {', '.join(questions) or 'none'}",
        )


def _write_answers(template: Any, folder: Path, answers: Mapping[str, Any]) -> None:
    """Record template, version and answers, but no secret ones, if the template is under git."""
    if template.commit is None:
        return
    path = folder / ANSWERS_FILE
    recorded = parse_yaml(path.read_text(encoding="utf-8")) if path.is_file() else None
    recorded = {
        **(recorded or {}),
        "_commit": template.commit,
        "_src_path": template.url,
        **answers,
    }
    for secret in template.secret_questions:
        recorded.pop(secret, None)
    text = yaml.safe_dump(recorded, allow_unicode=True)
    path.write_text(f"# Read by `triptych update`; do not edit.\n{text}", encoding="utf-8")


@contextmanager
def _copier_errors(source: str) -> Iterator[None]:
    """Raise errors of copier, git and Jinja as `UserError` while the block runs."""
    try:
        from copier.errors import CopierError, UnsafeTemplateError
        from jinja2 import TemplateError
        from plumbum import ProcessExecutionError
    except ImportError as error:
        raise UserError(
            "--template",
            "needs the package copier if the template is not built in",
            given=error,
            remedy=f"Run `{install_command('templates')}`",
        ) from error
    if shutil.which("git") is None:
        raise UserError(
            "--template",
            "needs git if the template is not built in",
            given="no `git` on PATH",
            remedy="Install git",
        )
    try:
        yield
    except UnsafeTemplateError as error:
        features = re.findall("tasks|migrations|jinja_extensions", str(error))
        raise UserError(
            "--trust",
            "is required for this template, because it runs code on this machine",
            given=f"{source}: {', '.join(features)}",
            remedy="Read its copier.yml; repeat the command with --trust if you trust its author",
        ) from error
    except ProcessExecutionError as error:
        lines = str(error.stderr or error).strip().splitlines()
        raise UserError(
            "--template",
            "cannot be read with git",
            given=f"{source}: {lines[-1] if lines else error}",
            remedy="Correct the address or the version, and check that `git clone` can read it",
        ) from error
    except (CopierError, TemplateError, ValueError, OSError, yaml.YAMLError) as error:
        raise UserError(
            "--template",
            "cannot be rendered",
            given=f"{source}: {error}",
            remedy="Give missing answers with --answer KEY=VALUE, or correct the template",
        ) from error
