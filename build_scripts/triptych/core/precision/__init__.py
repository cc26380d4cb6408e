"""Lower precision: converts fp32 graphs, chooses layers to keep and the best; never exports."""
