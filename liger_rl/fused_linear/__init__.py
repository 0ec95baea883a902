"""A head and a loss in one module."""
