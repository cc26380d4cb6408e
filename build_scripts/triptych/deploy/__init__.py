"""Manifests that run a built pipeline as a fleet, with a reason for every number.

The package reads the build manifest, the SLO and the result of `bench`. It accesses no cluster.
"""
