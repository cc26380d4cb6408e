"""Findings on a whole model repository, from its files alone, without a server or a GPU."""

from triptych.repository.lint.checks import CHECKS, run_checks

__all__ = ["CHECKS", "run_checks"]
