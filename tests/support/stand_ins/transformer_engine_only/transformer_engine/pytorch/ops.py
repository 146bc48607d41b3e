class Sequential:
    pass


class FusibleOperation:
    pass
