"""Lines of files as requests and core rows, and which of them decide; it never runs a model."""
