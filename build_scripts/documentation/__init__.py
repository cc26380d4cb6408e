"""The documentation as a site, and the picture of `make demo`."""
