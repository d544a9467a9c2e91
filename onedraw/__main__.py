"""`python -m onedraw` is the command `onedraw`, for a tree that is not installed."""

from onedraw.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
