"""Policy losses on per-token log-probabilities in plain PyTorch: no vocabulary, no chunks, any device."""
