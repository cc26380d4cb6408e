"""A real tritonserver on this machine, what it needs, what it leaves behind; never asks a model."""
