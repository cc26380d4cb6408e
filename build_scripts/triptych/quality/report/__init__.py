"""The page that shows what the gate found."""
