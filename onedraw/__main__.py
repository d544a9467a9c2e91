"""`python -m onedraw` is the same as the command `onedraw`, and also works in a source tree that is not installed."""

from onedraw.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
