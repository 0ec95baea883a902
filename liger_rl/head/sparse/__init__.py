"""Engines with a list of ids for each token: from bounds of the gradient, or from a sampler."""
