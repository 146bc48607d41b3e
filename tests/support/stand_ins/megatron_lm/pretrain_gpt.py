import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.global_vars import get_args
from megatron.training.training import pretrain


def model_provider(pre_process, post_process):
    args = get_args()
    config = core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=args.transformer_impl == "transformer_engine", normalization=args.normalization)
    return GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    )


def batches(iteration):
    args = get_args()
    made = torch.Generator().manual_seed(iteration)
    samples = torch.randint(args.vocab_size, (args.global_batch_size, args.seq_length + 1), generator=made)
    mine = samples.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
    return iter(mine.split(args.micro_batch_size))


def forward_step(iterator, model):
    tokens = next(iterator)
    positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
    output = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return output, lambda losses: (losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int), {})


if __name__ == "__main__":
    pretrain(batches, model_provider, forward_step)
