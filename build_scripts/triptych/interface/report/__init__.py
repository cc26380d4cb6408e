"""Stand-alone pages and their records: templates, plots as SVG; measures and judges nothing."""
