"""Names of the steps of a pipeline."""

STEP_SUFFIXES = ("_preprocess", "_core", "_postprocess")
"""Ends of the names of a pipeline's steps, which no pipeline's own name has."""
