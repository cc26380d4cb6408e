"""What `import triptych` offers: `new`, `build` and `serve` as functions; prints nothing."""
