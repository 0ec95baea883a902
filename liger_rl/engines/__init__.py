"""How a call is computed: a folder for each engine. `run` is the way from a call to its results."""
