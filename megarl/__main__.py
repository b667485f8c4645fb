"""`python -m megarl`: the command line without an installed script."""

from megarl.cli import main

if __name__ == "__main__":
    main()
