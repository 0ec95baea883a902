"""The whole training step: live rows, packing, micro-batches, ranks."""
