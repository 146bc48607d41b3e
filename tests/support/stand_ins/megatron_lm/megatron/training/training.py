import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.global_vars import get_args
from megatron.training.initialize import initialize_megatron


def get_device_arch_version():
    return torch.cuda.get_device_properties(torch.device("cuda:0")).major


def reported(value):
    return torch.tensor([value], dtype=torch.float, device="cuda")


def get_model(provider):
    args = get_args()
    model = provider(parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage())
    model.cuda(torch.cuda.current_device())
    config = get_model_config(model)
    if args.bf16:
        model = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
    )
    return [DistributedDataParallel(config, ddp, model)]


def pretrain(batches, provider, forward_step, extra_args_provider=None):
    initialize_megatron(extra_args_provider)
    args = get_args()
    assert get_device_arch_version() >= 8
    model = get_model(provider)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            bf16=args.bf16,
            params_dtype=args.params_dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        model,
    )
    if args.load is not None:
        load_checkpoint(model, optimizer, args.load)
    get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
    number = args.global_batch_size // args.micro_batch_size // parallel_state.get_data_parallel_world_size()
    for iteration in range(args.train_iters):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(iteration),
            model=model,
            num_microbatches=number,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        done, norm, _ = optimizer.step()
        assert done and float(reported(norm)) > 0
        if args.rank == 0:
            print(f" iteration {iteration + 1:8d}/{args.train_iters:8d} | grad norm: {norm!r} |", flush=True)
    if args.save is not None:
        save_checkpoint(args.train_iters, model, args.save)
