"""Reads model folders and drafter folders: architecture, weights, the format that vLLM serves."""
