"""Checks of manifests for Triton, generated or hand-written, for faults at run time."""

from triptych.deploy.checks.checks import CHECKS, check_manifests

__all__ = ["CHECKS", "check_manifests"]
