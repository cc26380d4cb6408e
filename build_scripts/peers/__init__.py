"""Triptych against its peers on this machine; nothing of the package imports it."""
