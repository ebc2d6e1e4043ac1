"""Benchmarks that maintainers run: `python -m benchmarks.NAME` from the root of the repository."""
