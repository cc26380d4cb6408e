"""What a user writes of a pipeline: spec, tuned values, promises, traffic; it runs no model."""
