"""Log-probabilities and losses for callers who hold the logits."""
