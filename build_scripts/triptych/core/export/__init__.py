"""torch models -> fp32 ONNX graphs proven on random rows; never lowers their precision."""
