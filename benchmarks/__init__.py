"""What produced the figures of docs/measurements.md; each module is a program: `python -m benchmarks.train`."""
