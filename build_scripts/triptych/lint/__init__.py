"""Static lint of a whole model repository."""

from triptych.lint.checks import CHECKS, OLDEST, run_checks

__all__ = ["CHECKS", "OLDEST", "run_checks"]
