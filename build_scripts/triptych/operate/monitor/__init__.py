"""Quality monitoring: compare sampled live answers with the original model, run after run.

Monitoring changes neither the pipeline nor its repository; `traffic` writes sampled rows into the
pipeline's traffic.
"""
