"""Ways to compute the head's statistics and gradients."""
