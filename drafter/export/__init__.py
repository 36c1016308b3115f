"""Stage 05: exports the best checkpoint as a drafter folder that vLLM serves."""
