"""What the local stand-ins of Triton's backends share; imported by the stubs that run them."""
