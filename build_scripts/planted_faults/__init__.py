"""A development tool: faults planted in the code, and the tests that find them."""
