"""What the stand-ins of Triton's backends share, run by their stubs; never talks to Triton."""
