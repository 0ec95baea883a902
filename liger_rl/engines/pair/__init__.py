"""Two heads: divergences and the exact KL penalty."""
