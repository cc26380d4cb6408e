"""The proof that what was built is right."""
