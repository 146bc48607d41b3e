def load(args):
    raise RuntimeError("no CUDA compiler")
