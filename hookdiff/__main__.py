"""`python -m hookdiff` is the command `hookdiff`."""

from hookdiff.cli import main

if __name__ == "__main__":
    main()
