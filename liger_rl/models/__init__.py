"""HuggingFace models: read a head, swap it, turn adapters and DTensors into plain tensors."""
