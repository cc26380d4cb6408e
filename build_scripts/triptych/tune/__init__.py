"""Tuning: which numbers of a served pipeline are best for a promise, found by measuring."""
