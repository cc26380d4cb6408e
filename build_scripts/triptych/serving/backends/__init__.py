"""Local replacements of Triton's backends, run by Python stubs."""
