"""Operations on a GPU: kernels in Triton and CUDA C++."""
