"""The exact engines: two passes, one pass, several targets."""
