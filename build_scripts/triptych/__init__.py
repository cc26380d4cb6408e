"""Triptych: a Hugging Face model becomes a Triton ensemble that tokenizes, infers and decodes."""
