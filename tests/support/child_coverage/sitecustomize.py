"""Record coverage in every Python process that inherits the PYTHONPATH of `make coverage`."""

from tests.support import line_coverage

line_coverage.start()
