"""Stage 04: hidden states in, checkpoints of the drafter out."""
