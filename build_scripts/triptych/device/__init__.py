"""Running TensorRT engines on a GPU: the one place that talks to CUDA."""
