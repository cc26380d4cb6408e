"""From a gated ONNX graph to a TensorRT engine, with one code path for TensorRT 8.6, 10 and 11."""
