"""Training of the example pipelines: MiniLM fine-tuned on the small data in their folders."""
