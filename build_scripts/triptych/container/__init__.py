"""What runs inside the serving image: start-up check, flags, entry point and health check.

It never imports anything but the standard library, `triptych.releases` and `triptych.errors`: the
image gets these files and nothing else of Triptych.
"""
