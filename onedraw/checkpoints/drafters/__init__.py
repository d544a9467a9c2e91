"""DFlash drafters that ship with the package, as GGUF files. `build/drafters.py` says which model each belongs to."""
