"""Tasks, one module each, and their metrics. Nothing here runs a model or a server."""
