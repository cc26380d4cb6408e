"""Code without domain logic: errors, files, cache, numbers in words, releases, ONNX files."""
