"""ONNX graphs as data: files, names, value types, opset, and a session on the CPU."""
