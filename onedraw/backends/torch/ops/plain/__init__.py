"""Operations in plain torch: for devices without kernels, and as the reference that tests compare kernels with."""
