"""Pipeline stages in other processes, on this machine or others."""
