"""A pipeline while it is written: its folder watched, tested and built again; prints nothing."""
