"""Findings on a whole model repository, from its files alone: no server, no GPU, nothing mended."""

from triptych.repository.lint.checks import CHECKS, run_checks

__all__ = ["CHECKS", "run_checks"]
