"""Command line, Python functions, demo page and reports."""
