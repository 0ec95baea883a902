"""The engines that compute a call, a folder for each kind. `run.log_probs` takes a call and returns its results."""
