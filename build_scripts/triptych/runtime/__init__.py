"""Code of which the used parts are copied into the repository, and run by Triton's Python stub.

It imports only the standard library, numpy, tokenizers, Pillow and `triton_python_backend_utils`;
text generation also imports its engine and jinja2.
"""
