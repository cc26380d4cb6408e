"""Findings on manifests for Triton, ours or hand-written: what will hurt once they are applied."""

from triptych.deploy.checks.checks import CHECKS, check_manifests

__all__ = ["CHECKS", "check_manifests"]
