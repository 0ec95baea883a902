"""What a call is: its tensors and options, checked once."""
