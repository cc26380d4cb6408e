"""``python -m triptych.interface.cli``."""

from triptych.interface import main

main()
