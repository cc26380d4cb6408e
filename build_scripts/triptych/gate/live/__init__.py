"""The gate on a served pipeline: the same requests over the wire, held to the same limits."""
