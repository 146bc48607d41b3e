#!/bin/sh
# Qwen3-30B-A3B by reinforcement learning on Ascend NPUs: Megatron through MindSpeed, vLLM through vllm-ascend, verl around both.
# Not run on an NPU by those who wrote it. docs/ascend.md is the guide.
#
#   bash launch/qwen3_moe_30b_npu.sh --check                        everything that can be known before a run, on any machine
#   bash launch/qwen3_moe_30b_npu.sh --check --layout tp2ep8        the same of one layout
#   bash launch/qwen3_moe_30b_npu.sh --model DIR --data FILE        starts verl on this machine, or on a Ray cluster that is up
#   bash launch/qwen3_moe_30b_npu.sh --model DIR --data FILE -- trainer.total_epochs=2      what follows -- goes to verl as it is
here=$(dirname "$(readlink -f "$0")")
python=${PYTHON:-$here/../.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m examples.qwen3_moe.npu_recipe "$@"
