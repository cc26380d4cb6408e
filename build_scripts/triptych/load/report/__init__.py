"""The page that shows what a load did, with the same as JSON and as CSV."""
