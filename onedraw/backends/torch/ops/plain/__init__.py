"""Operations in plain torch: they serve where no kernel does, and tests compare kernels with them."""
