"""Operations on a CPU: C kernels, compiled at first use."""
