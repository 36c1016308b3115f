"""Turn a served reasoning model into a better EAGLE-3 drafter, overnight."""
