import json
from types import SimpleNamespace

import torch
import yaml


def load_yaml(path):
    with open(path) as file:
        found = json.loads(json.dumps(yaml.safe_load(file)), object_hook=lambda item: SimpleNamespace(**item))
    found.yaml_cfg = path
    return found


def validate_yaml(args, defaults=None):
    args.model_parallel.params_dtype = torch.bfloat16 if args.model_parallel.bf16 else torch.float32
    args.accumulate_allreduce_grads_in_fp32 = args.model_parallel.bf16
    args = SimpleNamespace(**vars(args), **vars(args.model_parallel), **vars(args.language_model))
    args.num_experts = args.num_moe_experts
    args.add_bias_linear = not args.disable_bias_linear
    return args
