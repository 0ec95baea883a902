"""The engine of calls with a support: a list of ids for each token."""
