"""What only a GPU can tell: engines built, checked, timed against others, served; see README.md."""
