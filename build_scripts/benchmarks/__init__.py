"""Triptych compared with other servers on this machine; nothing of the package imports it."""
