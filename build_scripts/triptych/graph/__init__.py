"""ONNX graphs as data: files, nodes, value types and a CPU session; never what a graph is for."""
