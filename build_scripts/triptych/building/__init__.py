"""Build, check, verify and measure pipelines of every kind."""
