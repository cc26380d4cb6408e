"""Findings on a whole model repository, from its files alone: no server, no GPU, nothing mended."""

from triptych.repository.lint.checks import CHECKS, OLDEST, run_checks

__all__ = ["CHECKS", "OLDEST", "run_checks"]
