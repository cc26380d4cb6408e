"""Figures of a candidate: against the reference, and against the truth of labelled rows."""
