import random

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.legacy import fused_kernels
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import get_args, set_global_variables
from megatron.training.yaml_arguments import validate_yaml


def initialize_megatron(extra_args_provider=None, args_defaults=None):
    assert torch.cuda.is_available(), "Megatron requires CUDA."
    args = parse_args(extra_args_provider)
    args = validate_args(args, args_defaults) if args.yaml_cfg is None else validate_yaml(args, args_defaults)
    set_global_variables(args)
    torch.cuda.set_device(0)
    torch.distributed.init_process_group(args.distributed_backend)
    if torch.cuda.device_count():
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        )
    fused_kernels.load(args)
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    _warmup_jit_function()


def _warmup_jit_function():
    torch.rand(get_args().hidden_size, device="cuda")
    raise RuntimeError("fused kernels cannot be compiled here")
