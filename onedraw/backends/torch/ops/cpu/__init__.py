"""Operations on a CPU: kernels in C."""
