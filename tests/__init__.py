"""Tests of the project; `support` has what several files use."""
