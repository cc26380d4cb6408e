"""Lower precision: an fp32 graph in, an ordinary ONNX graph of the wanted precision out."""
