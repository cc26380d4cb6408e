"""The verdict on an artifact and on a live server; it never changes what it judges."""
