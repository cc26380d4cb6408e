"""Models: where their files are, and what the files say. Nothing here needs a pipeline."""
