"""GPU test: engines built, checked, timed with other systems, and served; see README.md."""
