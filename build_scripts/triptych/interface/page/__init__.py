"""The demo page of one pipeline: a form in plain HTML, its answer, and where the time went."""
