"""Read, check, build, verify and measure pipelines that generate text."""
