"""Offers load and measures it: rates, latencies, bottleneck, cost; it never changes a pipeline."""
