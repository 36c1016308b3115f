"""Stage 06: drafters in, measured acceptance lengths and a verdict out."""
