"""Benchmarks: ratios against peers in one run, each behind its correctness gate."""
