"""Stage 01b: prompts in, the target's own answers out, one row a request."""
