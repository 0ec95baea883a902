"""The vocabulary side: log-probabilities and their gradients from an lm_head. It knows no RL."""
