"""``python -m triptych.cli``."""

from triptych.cli import main

main()
