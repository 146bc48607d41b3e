"""When a rule explains a side: it must leave no more than rounding, and of rules that fit alike the usual one is taken."""

import torch

from tio_megatron.verify.diagnosis.rules import Rule, explain


def rules(**made):
    return [Rule({"cast": name.split("_")[0], "epsilon": name.split("_")[1]}, lambda out=out: out) for name, out in made.items()]


def test_of_rules_that_fit_alike_the_usual_one_is_taken():
    torch.manual_seed(0)
    usual, noise = torch.randn(40, 64, dtype=torch.float64), torch.randn(40, 64, dtype=torch.float64)
    other = usual * (1 + 1e-5 * noise.roll(1))
    a, b = (usual + 1e-7 * noise).float(), (other + 1e-7 * noise).float()
    found = explain(rules(after_1=usual, before_1=usual + 1e-8 * noise, after_2=other), a, b)
    assert found.axes == ("epsilon",)
    assert (found.a.rule.axes["cast"], found.b.rule.axes["epsilon"]) == ("after", "2")


def test_a_rule_that_leaves_more_than_rounding_is_no_reason():
    torch.manual_seed(0)
    usual, noise = torch.randn(40, 64, dtype=torch.float64), torch.randn(40, 64, dtype=torch.float64)
    half = usual / 2
    for left, axes in ((0.06, ()), (1e-5, ("epsilon",))):
        near = half + left * noise  # a quarter of the difference, and next to nothing of it
        assert explain(rules(after_1=usual, after_2=near), usual.float(), half.float()).axes == axes
