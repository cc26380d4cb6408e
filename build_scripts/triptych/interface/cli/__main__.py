"""``python -m triptych.interface.cli``."""

from triptych.interface.cli import main

main()
