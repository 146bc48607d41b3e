import argparse
import dataclasses
import os

import torch
from megatron.core.transformer import TransformerConfig

WORDS = """num-layers:int hidden-size:int ffn-hidden-size:int num-attention-heads:int num-query-groups:int kv-channels:int
 max-position-embeddings:int seq-length:int rotary-base:int num-experts:int moe-router-topk:int moe-ffn-hidden-size:int moe-aux-loss-coeff:float
 micro-batch-size:int global-batch-size:int train-iters:int lr:float min-lr:float weight-decay:float clip-grad:float seed:int vocab-size:int
 tensor-model-parallel-size:int pipeline-model-parallel-size:int expert-model-parallel-size:int expert-tensor-parallel-size:int context-parallel-size:int
 make-vocab-size-divisible-by:int save-interval:int log-interval:int eval-iters:int eval-interval:int
 normalization:str position-embedding-type:str moe-router-load-balancing-type:str moe-token-dispatcher-type:str lr-decay-style:str tokenizer-type:str
 split:str distributed-backend:str transformer-impl:str load:str save:str yaml-cfg:str attention-dropout:float hidden-dropout:float"""
SWITCHES = """group-query-attention qk-layernorm swiglu untie-embeddings-and-output-weights moe-grouped-gemm bf16 mock-data
 use-cpu-initialization use-distributed-optimizer overlap-grad-reduce sequence-parallel calculate-per-token-loss finetune no-load-rng disable-jit-fuser
 no-persist-layer-norm use-legacy-models reset-attention-mask log-params-norm"""
NEGATIVE = {
    "disable-bias-linear": "add_bias_linear",
    "no-rope-fusion": "apply_rope_fusion",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "no-bias-dropout-fusion": "bias_dropout_fusion",
    "no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "no-masked-softmax-fusion": "masked_softmax_fusion",
    "no-create-attention-mask-in-dataloader": "create_attention_mask_in_dataloader",
}
DEFAULTS = dict(
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    expert_model_parallel_size=1,
    context_parallel_size=1,
    transformer_impl="transformer_engine",
    make_vocab_size_divisible_by=128,
    moe_aux_loss_coeff=0.0,
    rotary_base=10000,
    normalization="LayerNorm",
    distributed_backend="nccl",
    moe_router_topk=2,
    seed=1234,
    clip_grad=1.0,
    weight_decay=0.01,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)


def add_megatron_arguments(parser):
    for word in WORDS.split():
        name, _, kind = word.partition(":")
        parser.add_argument(f"--{name}", type={"int": int, "float": float, "str": str}[kind])
    for name in SWITCHES.split():
        parser.add_argument(f"--{name}", action="store_true")
    for name, dest in NEGATIVE.items():
        parser.add_argument(f"--{name}", action="store_false", dest=dest)
    parser.add_argument("--norm-epsilon", type=float, dest="layernorm_epsilon")
    parser.set_defaults(**DEFAULTS)
    return parser


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = add_megatron_arguments(argparse.ArgumentParser(description="Megatron-LM Arguments (a stand-in)", allow_abbrev=False))
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_args()
    if args.yaml_cfg is not None:
        from megatron.training.yaml_arguments import load_yaml

        args = load_yaml(args.yaml_cfg)
    args.rank, args.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return args


def validate_args(args, defaults=None):
    args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    args.accumulate_allreduce_grads_in_fp32 = args.bf16
    if args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False
    return args


def core_transformer_config_from_args(args):
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    values = {name: value for name, value in vars(args).items() if name in known}
    values |= dict(pipeline_dtype=args.params_dtype, num_moe_experts=args.num_experts, batch_p2p_comm=True, deallocate_pipeline_outputs=True)
    if args.swiglu:
        values |= dict(activation_func=torch.nn.functional.silu, gated_linear_unit=True, bias_activation_fusion=args.bias_swiglu_fusion)
    if not args.group_query_attention:
        values["num_query_groups"] = None
    return TransformerConfig(**values)
