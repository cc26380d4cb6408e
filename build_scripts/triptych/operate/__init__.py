"""Tuning, and monitoring of quality."""
