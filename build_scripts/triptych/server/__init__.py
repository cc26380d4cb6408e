"""Running what was built: the local server and the client."""
