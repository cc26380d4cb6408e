"""Programs of the serving image: startup check, flags, entry point and health check.

It imports the standard library and a few small modules of `base` and `runtime` alone, because the
image holds no other file of Triptych.
"""
