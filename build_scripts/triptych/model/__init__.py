"""The facts that the files of a Hugging Face model tell; never runs or exports the model."""
