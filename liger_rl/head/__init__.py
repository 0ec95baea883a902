"""Hidden states and a weight in, per-token values out. No RL here."""
