"""From a model's files to the core artifact: source, export, packing, lock."""
