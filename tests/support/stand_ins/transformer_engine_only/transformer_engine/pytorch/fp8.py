class FP8GlobalStateManager:
    pass


def fp8_autocast(*_, **__):
    raise RuntimeError("a stand-in computes nothing")
