"""`python -m hookdiff` is the command `hookdiff`."""

from hookdiff.cli import main

main()
