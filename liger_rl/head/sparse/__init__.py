"""Lists of ids for each token: given by a sampler, or found from bounds of the gradient."""
