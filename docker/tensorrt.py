"""The name that NVIDIA's `tensorrt` package gives to the bindings.

The package itself also fetches the libraries, which the image has already.
"""

from tensorrt_bindings import *  # noqa: F403
from tensorrt_bindings import __version__ as __version__
