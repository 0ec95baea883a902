"""Lists of ids for each token: given by a sampler, or found by a certificate of the gradient."""
