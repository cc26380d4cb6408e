"""What a user would have without Triton: the same model called in process, measured in turns."""
