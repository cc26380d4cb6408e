"""Code copied verbatim into the repository and run by Triton's Python stub.

It imports the standard library, numpy, tokenizers and `triton_python_backend_utils`, nothing else.
"""
