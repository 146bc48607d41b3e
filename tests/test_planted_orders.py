"""The tiers keep what they promise: every order that is planted wrong, and every test that must notice one, stands here by name and is still there.

A test of equal bytes without its planted wrong order proves nothing, so none of these may go, nor move from the promise tier to the care tier.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import CARE, in_care

TESTS = Path(__file__).resolve().parent

PLANTS = {
    "integrations/deepspeed/test_planted.py": "row column experts shares sums",
    "integrations/vllm/planted.py": "rounded_per_rank one_rank_after_another experts_one_after_another",
    "kernels/test_combine.py": "_one_after_another _from_any_expert_on _pairs_of_choices _rank_after_rank _ring_from_the_owner _ranks_rounded _added_in_bf16",
    "layers/test_context.py": "ring_merge gradients_summed_over_ranks",
    "support/moe_world.py": "experts_in_sequence own_experts_first shard_as_one_leaf ranks_in_sequence ring_from_owner rows_added_in_bf16 partials_in_bf16",
    "support/planted_faults.py": """pieces_in_another_order partial_sums_in_bf16 token_owner_against_expert_owner ring_starts_at_the_owner sequence_parallel
        fused_add_norm tie router_softmax padding_is_routed packing rank_without_tokens unwritten_rows extra_rounding micro_batch temperature norm_cast
        vocabulary_padding rope_table head_types size_of_the_message stale_copies evaluation""",
    "support/planted_variants.py": """epsilon norm_form norm_cast_fp16 rope_form mask attention_form head_form two_temperatures large_vocabulary_padding
        rounding_elsewhere router_dtype other_experts dropped garbage dropout_elsewhere weights_elsewhere stale_copy_elsewhere residual_form two_at_once
        weighted_early rows_never_stored""",
    "support/training_rows.py": "fp32_sums one_grain",
}
"""What is planted: the names by which a file plants it. A function that is defined and planted nowhere does not count."""

PROMISED = {
    "accuracy/test_stock_control.py": "test_the_controls_differ_by_their_sums_alone",
    "collectives/test_plan.py": "test_one_order_planted_wrong_is_seen",
    "collectives/test_sums.py": "test_gloo_and_sequential_orders_differ",
    "contract/test_tree.py": "test_other_orders_give_other_bytes",
    "contract/test_vocab.py": "test_the_number_of_runs_is_part_of_the_order",
    "integrations/megatron/moe/test_cases.py": "test_case_3_and_4_the_owner_of_a_token_does_not_matter test_control_stock_differs",
    "integrations/megatron/moe/test_layouts.py": "test_every_layout_gives_the_bytes_of_one_rank",
    "integrations/megatron/moe/test_model.py": "test_every_layout_gives_the_log_probabilities_of_one_rank test_the_gradient_of_the_embedding_notices",
    "integrations/megatron/moe/test_random_weights.py": "test_control_without_each_repair_they_differ",
    "integrations/megatron/test_dense_gradients.py": "test_a_planted_order_is_caught",
    "integrations/megatron/test_dense_layouts.py": """test_a_planted_order_is_caught_on_the_same_row test_other_cuts_are_another_order
        test_stock_differs_and_ours_does_not_through_the_loss""",
    "integrations/megatron/test_optimizer_layouts.py": "test_stock_gives_another_norm_in_another_layout",
    "integrations/megatron/test_training_layouts.py": "test_a_planted_order_is_caught_on_the_same_row test_stock_layouts_differ",
    "integrations/megatron/test_weights.py": "test_a_wrong_interleave_is_seen",
    "integrations/vllm/test_equality.py": "test_stock_vllm_differs",
    "integrations/vllm/test_ranks.py": "test_planted_wrong_orders_are_seen",
    "kernels/npu/test_attention_order.py": """test_another_order_gives_other_bytes
        test_a_sum_over_the_width_of_the_call_makes_decode_differ_from_prefill""",
    "kernels/npu/test_written_order.py": "test_another_order_has_not",
    "kernels/test_adam.py": "test_the_bytes_differ_from_torchs",
    "kernels/test_attention.py": "test_planted_orders_differ",
    "kernels/test_attention_backward.py": "test_control_heads_in_descending_order_differ",
    "kernels/test_combine.py": "test_planted_orders_differ test_a_product_contracted_into_the_sum_differs",
    "kernels/test_grouped.py": "test_negative_control",
    "kernels/test_integer_products.py": "test_negative_controls",
    "kernels/test_integer_sum.py": "test_a_second_rounding_would_differ",
    "kernels/test_linear.py": "test_a_wrong_order_differs",
    "kernels/test_logprob.py": "test_other_orders_and_counted_padding_differ",
    "kernels/test_norm.py": "test_control_one_long_chain_differs",
    "kernels/test_triton.py": "test_the_check_of_contraction_can_fail",
    "kernels/test_triton_roundings.py": "test_every_function_that_divides_is_planted test_a_planted_approximation_is_refused",
    "layers/test_balance.py": "test_planted_orders_are_caught",
    "layers/test_compile.py": "test_stock_operators_are_opened",
    "layers/test_context.py": "test_partial_softmaxes_merged_in_ring_order_are_caught",
    "layers/test_entropy.py": "test_another_order_differs",
    "layers/test_experts_replicated.py": "test_other_orders_differ",
    "layers/test_linear.py": "test_the_leaves_decide",
    "layers/test_vocab.py": "test_another_order_differs",
    "rl/test_advantages.py": "test_order_of_samples_matters_to_a_plain_mean",
    "rl/test_aggregate.py": "test_a_mean_of_means_depends_on_the_micro_batch",
    "rl/test_exact.py": "test_plain_sums_depend_on_the_order",
    "rl/test_losses.py": "test_plain_sums_over_a_sequence_depend_on_its_order",
    "rl/test_masked.py": "test_formulas_as_written_spread_it",
    "test_rooms.py": "test_this_test_can_fail",
    "testing/test_bytes.py": "test_sees_the_sign_of_zero_and_shows_where",
    "training/test_aux_loss.py": "test_it_has_an_effect_and_a_planted_error_is_caught",
    "verify/ascend/test_selfcheck.py": "test_a_planted_order_is_found",
    "verify/test_diagnosis.py": "test_a_planted_fault_is_named",
}
"""Tests of the promise tier that must notice a wrong order, or the stock packages' own."""

CAREFUL = {
    "collectives/test_large.py": "test_other_orders_and_places_show",
    "fuzz/test_readers.py": "test_a_reader_that_lets_an_error_through_is_caught",
    "integrations/deepspeed/test_inference.py": "test_stock_differs",
    "integrations/deepspeed/test_layouts.py": "test_stock_differs",
    "integrations/deepspeed/test_planted.py": "test_a_wrong_order_is_seen",
    "integrations/deepspeed/test_transformers.py": "test_stock_differs",
    "integrations/megatron/test_compile.py": "test_stock_layers_differ",
    "integrations/megatron/test_other_device.py": "test_a_tensor_that_was_left_on_the_host_is_seen",
    "integrations/megatron/test_readme.py": "test_control_without_the_switch_they_differ",
    "integrations/megatron_lm/test_pretrain_gpt.py": "test_control_the_stock_packages_differ",
    "integrations/mindspeed/test_mindspeed.py": "test_the_control_has_other_bytes",
    "layers/test_compile.py": "test_inductor_must_be_told_to_round",
    "multinode/test_consistency.py": "test_stock_differs",
    "triton_kernels/test_attention.py": "test_the_order_shows",
    "triton_kernels/test_products.py": "test_the_order_shows",
    "triton_kernels/test_small_tiles.py": "test_another_number_of_leaves_does",
    "triton_kernels/test_training.py": "test_another_unit_is_seen",
    "verify/test_orders_named.py": "test_an_order_is_named test_a_wrong_name_would_fail",
    "verify/test_variants_named.py": "test_a_variant_is_named_from_either_side",
}
"""The same in the care tier, and in the suites that have an environment of their own."""


@cache
def functions(name: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(ast.parse((TESTS / name).read_text())) if isinstance(node, ast.FunctionDef)}


@cache
def names_in(name: str) -> set[str]:
    """What the file uses by name or writes in quotes."""
    found = [getattr(node, "id", None) or getattr(node, "value", None) for node in ast.walk(ast.parse((TESTS / name).read_text()))]
    return {each for each in found if isinstance(each, str)}


def careful(name: str) -> set[str]:
    """Tests of the file that are marked for the care tier with all rows of their tables."""
    return {test for test, node in functions(name).items() if any(ast.unparse(mark) == "pytest.mark.full" for mark in node.decorator_list)}


@pytest.mark.parametrize("name", PLANTS)
def test_every_planted_order_is_there(name):
    assert not set(PLANTS[name].split()) - names_in(name)


def test_every_test_that_notices_one_is_there():
    gone = [f"{name}: {test}" for table in (PROMISED, CAREFUL) for name, tests in table.items() for test in tests.split() if test not in functions(name)]
    moved = [f"{name}: {test}" for name, tests in PROMISED.items() for test in tests.split() if in_care(TESTS / name) or test in careful(name)]
    assert (gone, moved) == ([], [])


def test_the_care_tier_lists_what_there_is():
    assert not [name for names in CARE.values() for name in names if not (TESTS / name).exists()]


def test_a_plant_that_goes_is_seen():
    """Negative control, on this file: names that stand in no other place of it."""
    assert "no_such_order" not in names_in("support/moe_world.py") and "test_no_such_plant" not in functions("kernels/test_combine.py")
    assert careful("kernels/test_core.py") == {"test_the_product_on_arm", "test_every_operator_on_arm"}
    assert in_care(TESTS / CARE["damaged files"][0] / "test_readers.py")
