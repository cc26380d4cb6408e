"""The watch: live answers, sampled by the server, held against the original model, look after look.

It changes a pipeline and its repository only where it is told to, and a running server never.
"""
