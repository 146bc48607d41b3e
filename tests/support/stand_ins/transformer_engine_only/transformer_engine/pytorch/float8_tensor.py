class Float8Tensor:
    pass
