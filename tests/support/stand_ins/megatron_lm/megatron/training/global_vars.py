from types import SimpleNamespace

ARGS = None


def get_args():
    return ARGS


def set_global_variables(args):
    global ARGS
    ARGS = args
    _build_tokenizer(args)


def _build_tokenizer(args):
    assert args.tokenizer_type == "NullTokenizer"
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-(args.vocab_size + 1) // multiple) * multiple
    return SimpleNamespace(vocab_size=args.vocab_size + 1)
