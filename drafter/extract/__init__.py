"""Stage 02: rows in, the target's hidden states out, one file a row."""
