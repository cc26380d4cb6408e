"""Pages that stand alone: HTML, plots as SVG, the style sheet, and writing them whole."""
