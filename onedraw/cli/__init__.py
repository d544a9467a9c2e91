"""The command line: `main.py` finds the command, each command has a module, and `flags.py` makes the options."""
