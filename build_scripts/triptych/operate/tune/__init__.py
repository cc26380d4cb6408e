"""Finds the numbers that keep a promise best, and tells when they no longer fit the traffic.

It writes ``tuned.yaml``, and never into a model repository.
"""
