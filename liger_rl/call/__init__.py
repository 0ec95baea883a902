"""A call: its tensors and options, checked once."""
