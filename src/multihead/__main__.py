"""`python -m multihead` is the command line."""

from multihead.cli import main

main()
