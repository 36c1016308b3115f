"""Stage 05: the best checkpoint in, a drafter folder that vLLM serves out."""
