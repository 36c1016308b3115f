"""Programs that produced the figures of docs/measurements.md; each module is one: `python -m benchmarks.train`."""
