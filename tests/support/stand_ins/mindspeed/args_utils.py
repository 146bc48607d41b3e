"""Arguments: one namespace that lives as long as the process."""

from __future__ import annotations

from argparse import Namespace

DEFAULTS = {"optimization_level": 2, "context_parallel_algo": "megatron_cp_algo", "use_fused_rmsnorm": False, "tp_2d": False, "pre_tockens": 65536}

_args = Namespace(**DEFAULTS)


def get_full_args() -> Namespace:
    return _args


def get_mindspeed_args(get_defaults: bool = False) -> Namespace:
    return Namespace(**DEFAULTS) if get_defaults else _args
