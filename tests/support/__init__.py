"""Fakes, models, servers, cases and fixtures that several files of tests use."""
