class CudaRNGStatesTracker:
    pass


def activation_recompute_forward(*_, **__):
    raise RuntimeError("a stand-in computes nothing")


checkpoint = activation_recompute_forward
