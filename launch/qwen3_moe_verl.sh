#!/bin/bash
# GRPO on a tiny Qwen3-MoE model in stock verl, on this CPU: Ray's workers, Megatron, vLLM.
#
#   make verl                                                      (in an environment of its own, .venv-verl)
#   bash launch/qwen3_moe_verl.sh OUT [verl's overrides ...]       PYTHON=.venv-verl/bin/python
#   TIO_CONTRACT=0 bash launch/qwen3_moe_verl.sh OUT               the stock control: the same job without tio_megatron
#
# What a run on GPUs or NPUs needs of this is marked "yours"; all else is what a CPU needs. docs/verl.md explains each line.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$here/.venv-verl/bin/python}
[ $# -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1

# yours: both reach every worker through Ray, because verl's driver exports its environment
export TIO_CONTRACT=${TIO_CONTRACT:-1}
modules=${VERL_USE_EXTERNAL_MODULES:-tio_megatron.auto}
export VERL_USE_EXTERNAL_MODULES="tio_megatron.integrations.verl.cpu,$modules" # yours: tio_megatron.auto alone
# yours, whatever the machine
yours=(actor_rollout_ref.actor.megatron.vanilla_mbridge=True +actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=64 actor_rollout_ref.rollout.enforce_eager=True)

config=actor_rollout_ref.actor.megatron.override_transformer_config
if [ "$TIO_CONTRACT" != 0 ]; then
    # yours: gradients are divided once, by the tokens of the whole batch
    layers=(actor_rollout_ref.model.use_remove_padding=True "+$config.calculate_per_token_loss=True")
else
    # what stock Megatron needs on a CPU, where neither Transformer Engine nor its own fused kernels can be had
    layers=(actor_rollout_ref.model.use_remove_padding=False "$config.attention_backend=unfused" "+$config.moe_grouped_gemm=False"
        "+$config.persist_layer_norm=False" "+$config.masked_softmax_fusion=False" "+$config.bias_dropout_fusion=False" "+$config.bias_activation_fusion=False")
fi

[ -f "$out/train.parquet" ] || "$python" -W ignore -m examples.qwen3_moe.verl_start "$out"

# A short path: Ray puts sockets there. Everything Ray starts ends with this script.
temporary=$(mktemp -d /tmp/tio-ray.XXXXXX)
trap 'rm -rf "$temporary"' EXIT
export RAY_TMPDIR="$temporary" RAY_USAGE_STATS_ENABLED=0 RAY_memory_monitor_refresh_ms=0 RAY_DEDUP_LOGS=0
export VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 HYDRA_FULL_ERROR=1
export VERL_FILE_LOGGER_PATH="$out/metrics.jsonl"
ranks=${RANKS:-1}

cd "$out"
"$python" -W ignore -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo \
    "${yours[@]}" "${layers[@]}" \
    actor_rollout_ref.rollout.name=vllm \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=67108864 \
    actor_rollout_ref.rollout.free_cache_engine=False +actor_rollout_ref.rollout.enable_sleep_mode=False \
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=4 \
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.max_model_len=128 actor_rollout_ref.rollout.max_num_seqs=16 actor_rollout_ref.rollout.max_num_batched_tokens=2048 \
    actor_rollout_ref.rollout.agent.num_workers=1 reward.num_workers=1 transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.megatron.sequence_parallel=False \
    "actor_rollout_ref.model.path=$out/model" "data.train_files=$out/train.parquet" "data.val_files=$out/train.parquet" \
    data.train_batch_size=4 data.max_prompt_length=32 data.max_response_length=12 data.dataloader_num_workers=0 data.shuffle=False \
    "reward.custom_reward_function.path=$here/examples/qwen3_moe/verl_start.py" reward.custom_reward_function.name=compute_score \
    trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node="$ranks" trainer.total_training_steps=3 trainer.total_epochs=1 \
    trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1 "trainer.logger=[console,file]" trainer.project_name=tio \
    trainer.experiment_name=verl "trainer.default_local_dir=$out/checkpoints" \
    ray_kwargs.ray_init.num_cpus=8 "+ray_kwargs.ray_init.num_gpus=$ranks" +ray_kwargs.ray_init.object_store_memory=200000000 \
    +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init._node_ip_address=127.0.0.1 "+ray_kwargs.ray_init._temp_dir=$temporary" \
    "$@"
