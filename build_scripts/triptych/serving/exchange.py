"""Pipelines that are built anew while a server runs: put into it, or named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from triptych.base.errors import UserError
from triptych.container.lock_check import check_repository
from triptych.serving.builds import Builds
from triptych.serving.reload import reload
from triptych.serving.server import Server


class Exchange:
    """Keeps a server at what its repository holds.

    Args:
        server: that serves the repository; it exchanges models, or it is of the production profile.
        on_exchange: told in a line what was exchanged.
        on_problem: told in a line what was not, and why.
        only: the one pipeline that it serves; None where it serves all.
        production: whether the server goes on with what it loaded when it started.
    """

    def __init__(
        self,
        server: Server,
        *,
        on_exchange: Callable[[str], None],
        on_problem: Callable[[str], None],
        only: str | None = None,
        production: bool = False,
    ) -> None:
        self._server = server
        self._on_exchange = on_exchange
        self._on_problem = on_problem
        self._production = production
        self._builds = Builds(server.repository, only)

    def look(self) -> None:
        """Exchange what was built since the last look; what does not load is told, and stays old.

        To be called now and then: it reads no file where no lock has changed.
        """
        change = self._builds.look()
        if change is None:
            return
        wrong = wrong_pipelines(self._server.repository)
        for pipeline, changed in change.built.items():
            self._put(pipeline, changed, wrong.get(pipeline))
        for pipeline in change.gone:
            self._on_problem(f"{pipeline} is not in the repository any more, but still served")

    def _put(self, pipeline: str, changed: list[str], wrong: str | None) -> None:
        if self._production:
            self._on_problem(
                f"{pipeline} was built anew: this server goes on with the old one until it is"
                " started again"
            )
            return
        try:
            if wrong is not None:
                raise UserError(pipeline, "must be as it was built", given=wrong)
            reload(self._server, pipeline)
        except UserError as error:
            self._on_problem(f"{error.message} What was loaded before goes on serving.")
        else:
            self._on_exchange(f"{pipeline} was built anew and exchanged: {', '.join(changed)}")


def wrong_pipelines(repository: Path) -> dict[str, str]:
    """Pipelines that are not as they were built, each with what is wrong."""
    return {
        problem.pipeline: problem.line
        for problem in check_repository(repository, None)
        if problem.severity == "error"
    }
