"""The names that TRL imports from vLLM. Nothing of them is called: they belong to the transfer of weights over NCCL."""

__version__ = "0.31.0"
