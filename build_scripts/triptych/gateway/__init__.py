"""HTTP gateway: the APIs of OpenAI, Cohere, Jina and TEI in front of any Triton with pipelines."""

PORT = 8080
"""Default port of HTTP."""

MAX_BODY_MIB = 8
"""Default maximum size of the body of a request, in MiB."""

MAX_ITEMS = 10_000
"""Default maximum number of texts, pairs or images in a request."""

GRACE_S = 30
"""Maximum time in which requests in flight are answered at the end, in seconds."""
