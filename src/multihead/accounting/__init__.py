"""What a model costs before it runs: parameters, multiplications, bytes, and which of them bounds it."""
