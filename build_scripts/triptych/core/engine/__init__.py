"""TensorRT engines: ONNX -> plan, built, inspected, checked and run; never changes the graph."""
