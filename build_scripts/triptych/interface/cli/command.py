"""Turn functions into verbs: options from dataclasses, help in groups of verbs.

A verb is a function under `@verb()`. Each parameter that is a dataclass stands for its fields, so
that an option is declared once, where its value is used.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

VERBS = {
    "Create": ("new", "templates", "fields", "test", "dev"),
    "Build": ("inspect", "build", "engine", "lint", "list", "history", "rollback"),
    "Serve": ("serve", "infer", "ui", "gateway", "key", "doctor"),
    "Measure": ("verify", "bench", "bench-diff", "tune", "shadow"),
    "Operate": ("deploy", "monitor", "traffic"),
}
"""Verbs in the order of the help, by their group."""
EXIT_INTERRUPTED = 130
KEPT = {
    "build": ": finished stages are cached, and the repository is as it was. "
    "Run the same command to continue.",
    "bench": ": no result was written.",
    "tune": ": finished trials are kept; of tuned.yaml, only what a line above says has changed. "
    "Run the same command to continue.",
    "shadow": ": no result was written.",
    "monitor": ": the rows of earlier runs are kept, those of this run are compared by the next.",
    "verify": ": no result was written.",
}
"""Text about the results of a verb that was interrupted."""
MAX_HELP_WIDTH = 120
"""Maximum width of the help, in columns; a narrower terminal has narrower help."""
WORDS = {Path: "PATH", str: "TEXT", int: "N", float: "N"}
"""Words in the help for the values of options, by type."""
_Function = TypeVar("_Function", bound=Callable[..., None])


class _Program(TyperGroup):
    """The program, which lists the verbs in groups."""

    def list_commands(self, ctx: object) -> list[str]:
        return [name for names in VERBS.values() for name in names]

    def format_commands(self, ctx: object, formatter: Any) -> None:
        for group, names in VERBS.items():
            with formatter.section(group):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(80)) for name in names]
                )


class _Verb(TyperCommand):
    """A verb, whose interruption says what it has kept."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument):  # Typer would add a type such as <list[Path]>.
                parameter.display_type_rich = lambda ctx: ""  # type: ignore[method-assign]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print(f"interrupted{KEPT.get(str(self.name), '')}", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    cls=_Program,
    help="Build, serve and operate Triton ensembles of Hugging Face models.",
    epilog="Exit codes: 0 success; 1 findings, a failed check, a missed SLO or an alarm; 2 a "
    "mistake in the command, the files or the environment.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_HELP_WIDTH},
)


def verb(name: str | None = None) -> Callable[[_Function], _Function]:
    """Register a function as the verb `name`; its docstring is the help."""

    def register(function: _Function) -> _Function:
        app.command(name, cls=_Verb)(_expand(function))
        return function

    return register


def _expand(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` with each dataclass among its parameters replaced by its fields."""
    hints = get_type_hints(function, include_extras=True)
    classes: dict[str, Any] = {}
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint):
            classes[parameter.name] = hint
            parameters += _parameters_of(hint)
        else:
            parameters.append(
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint)
            )

    def command(**values: object) -> None:
        made = {
            name: cls(**{field.name: values.pop(field.name) for field in fields(cls)})
            for name, cls in classes.items()
        }
        # Variables of the context that a verb sets, such as its credentials, end with it.
        copy_context().run(function, **values, **made)

    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    for parameter in parameters:
        _set_metavar(parameter)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _set_metavar(parameter: inspect.Parameter) -> None:
    """Let the help show a word for the value of an option."""
    word = next((WORDS[each] for each in _parts(parameter.annotation) if each in WORDS), None)
    for info in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(info, typer.models.OptionInfo):
            info.metavar = info.metavar or word


def _parts(hint: object) -> Iterator[Any]:
    """Yield a type hint and its arguments, such as the type of the elements of a list."""
    yield hint
    for each in get_args(hint):
        yield from _parts(each)


def _parameters_of(cls: Any) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters of a function."""
    hints = get_type_hints(cls, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(cls)
    ]
