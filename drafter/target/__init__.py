"""What a model folder or a drafter folder holds: architecture, weights, the format that vLLM serves."""
