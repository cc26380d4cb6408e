"""Static lint of a whole model repository."""

from triptych.repository.lint.checks import CHECKS, run_checks

__all__ = ["CHECKS", "run_checks"]
