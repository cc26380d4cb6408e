"""The model repository: its configs, its files, and the checks on them."""
