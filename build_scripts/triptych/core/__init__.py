"""The compiled model: export, precision, TensorRT engines and the accuracy gate."""
