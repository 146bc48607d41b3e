"""verl's own functions that move weights, gradients and the optimizer away between phases keep every byte. Needs verl: make test-verl."""

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed here: make test-verl")

from examples.qwen3_moe.training import Cut, Recipe, Training  # noqa: E402
from tio_megatron.contract import Contract  # noqa: E402
from tio_megatron.contract.words import TrainerLayout  # noqa: E402
from tio_megatron.testing import run_ranks  # noqa: E402
from tio_megatron.testing.qwen3 import MOE, write_tiny  # noqa: E402

SMALL = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=32, num_experts=8, num_experts_per_tok=2)


def trained(folder, way):
    def rank_main(rank):
        from verl.utils import megatron_utils as verl

        import tio_megatron.integrations.verl.cpu  # noqa: F401

        training = Training(Recipe(folder, steps=3, warmup=1, lr=5e-3), Cut(TrainerLayout.parse("dp2"), distributed_optimizer=True), Contract(grain=32))
        for _ in range(3):
            if way != "stays":
                models = [training.model]
                verl.offload_megatron_model_to_cpu(models)
                verl.offload_megatron_optimizer(training.optimizer)
                buffer = training.model.buffers[0]
                assert buffer.param_data.storage().size() == 0 and buffer.grad_data.storage().size() == 0, "it went away"
                if way == "one bit lost":
                    buffer.param_data.cpu_data.view(torch.uint8)[0] ^= 1
                # As on a device, what memory holds that nobody wrote is anything.
                verl.load_megatron_model_to_gpu(models, load_grad=True)
                verl.load_megatron_optimizer(training.optimizer)
            training.step()
        digest = training.sha256()
        training.close()
        return digest

    first, second = run_ranks(2, rank_main, timeout=300)
    assert first == second
    return first


def test_offloading_between_steps_changes_no_byte_of_weights_and_moments(tmp_path):
    folder = write_tiny(tmp_path / "model", MOE | SMALL)
    stays = trained(folder, "stays")
    assert trained(folder, "moves") == stays
    assert trained(folder, "one bit lost") != stays
