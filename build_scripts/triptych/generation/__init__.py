"""Pipelines that generate text: read, rendered, checked and built. Never a model of its own."""
