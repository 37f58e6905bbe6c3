"""`multihead bench`: registered shapes against the peers that are installed, in one run, each behind its gate."""
