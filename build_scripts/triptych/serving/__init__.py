"""Local servers, replicas behind Envoy, and load tests."""
