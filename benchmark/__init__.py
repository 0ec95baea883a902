"""Memory, time and error of the fused head beside what users would take instead: `python -m benchmark.run`."""
