"""Adapters to other libraries, one module each; the only modules that import them."""
