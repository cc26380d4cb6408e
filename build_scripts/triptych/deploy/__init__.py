"""Manifests that run a built pipeline as a fleet: every number in them with its reason.

It reads the lock, the promise and what `bench` measured, and writes files; it talks to no cluster.
"""
