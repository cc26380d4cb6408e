"""Load and its measurement."""
