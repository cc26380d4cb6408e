"""Local servers and load tests."""
