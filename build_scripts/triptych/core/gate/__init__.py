"""Accuracy gate of an artifact and of a live server. The gate never changes what it checks."""
