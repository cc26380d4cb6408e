"""Pipelines that generate text: read, rendered, checked, built, measured. No models of its own."""
