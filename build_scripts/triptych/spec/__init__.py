"""Definition of a pipeline: spec, model information, tasks, and the plan derived from them."""
