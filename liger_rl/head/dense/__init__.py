"""The exact engines: two passes, several targets."""
