"""What a pipeline is: its spec, its model, its tasks and the plan that follows from them."""
