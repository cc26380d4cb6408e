"""The watch: live answers, sampled by the server, held against the original model, look after look.

It never changes a pipeline, a repository or a server.
"""
