"""Find the settings with the highest throughput that meet an SLO.

It writes ``tuned.yaml``, and never into a model repository.
"""
