"""The vLLM servers of a run: start them, check that they are ready, send them requests, stop them."""
