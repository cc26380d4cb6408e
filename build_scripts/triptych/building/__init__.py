"""The order of a build, for every kind of pipeline."""
