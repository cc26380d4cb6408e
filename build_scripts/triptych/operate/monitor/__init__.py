"""Quality monitoring: compare sampled live answers with the original model, run after run.

Monitoring changes a pipeline and its repository only with ``--apply``, and never a running server.
"""
