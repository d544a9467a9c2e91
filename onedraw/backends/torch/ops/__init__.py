"""Operations that layers call, one implementation per kind of device."""
