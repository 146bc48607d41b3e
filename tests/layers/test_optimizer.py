"""The optimizer class around the Adam kernel: groups, state, and states that torch's own Adam wrote."""

import copy

import pytest
import torch

from tio_megatron.kernels.adam import Scalars, adam_
from tio_megatron.layers.optimizer import Adam
from tio_megatron.testing import assert_same_bytes


def parameters(n=2):
    return [torch.nn.Parameter(torch.randn(3, 5, generator=torch.Generator().manual_seed(i))) for i in range(n)]


def give(found, seed):
    for i, parameter in enumerate(found):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * seed + i))


def test_it_is_the_kernel_group_by_group():
    first, second = parameters()
    optimizer = Adam([{"params": [first]}, {"params": [second], "lr": 0.5, "weight_decay": 0.0}], lr=0.1, weight_decay=0.2)
    wanted = [(p.detach().clone(), torch.zeros(3, 5), torch.zeros(3, 5)) for p in (first, second)]
    for step in (1, 2):
        give((first, second), step)
        optimizer.step()
        for parameter, (weight, exp_avg, exp_avg_sq), lr, decay in zip((first, second), wanted, (0.1, 0.5), (0.2, 0.0), strict=True):
            adam_(weight, parameter.grad, exp_avg, exp_avg_sq, Scalars.at(step, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay))
            assert_same_bytes(parameter.detach(), weight)
            assert_same_bytes(dict(optimizer.state[parameter]), {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})


def test_l2_decay_is_another_rule():
    found = [parameters(1), parameters(1)]
    for mine, mode in zip(found, (True, False), strict=True):
        give(mine, 1)
        Adam(mine, lr=0.1, weight_decay=0.5, adam_w_mode=mode).step()
    assert not torch.equal(*(mine[0] for mine in found))


def test_a_group_without_parameters_counts_steps_too():
    """A rank may hold no shard of a group; a checkpoint must not depend on that."""
    mine = parameters(1)
    optimizer = Adam([{"params": mine}, {"params": []}])
    give(mine, 1)
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def test_a_parameter_without_a_gradient_is_left_alone():
    first, second = parameters()
    kept = second.detach().clone()
    optimizer = Adam([first, second], weight_decay=0.1)
    give([first], 1)
    optimizer.step()
    assert second not in optimizer.state and torch.equal(second, kept)


def test_state_goes_out_and_in():
    mine = parameters()
    optimizer = Adam(mine, lr=0.1)
    give(mine, 1)
    optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())
    others = [torch.nn.Parameter(parameter.detach().clone()) for parameter in mine]
    other = Adam(others)
    other.load_state_dict(kept)
    for each, held in ((optimizer, mine), (other, others)):
        give(held, 2)
        each.step()
    assert_same_bytes([p.detach() for p in others], [p.detach() for p in mine])
    assert other.param_groups[0]["step"] == 2


def test_steps_that_torch_counted_for_each_parameter_are_taken_over():
    """Negative control: a count that was lost would start the bias correction anew."""
    mine = parameters()
    theirs = torch.optim.AdamW(mine, lr=0.1)
    for seed in range(3):
        give(mine, seed)
        theirs.step()
    ours = Adam(mine, lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["step"] == 3 and all("step" not in state for state in ours.state.values())

    uneven = copy.deepcopy(theirs.state_dict())
    uneven["state"][0]["step"] += 1
    with pytest.raises(ValueError, match=r"\[3, 4\] steps"):
        Adam(mine).load_state_dict(uneven)
    for state in uneven["state"].values():
        del state["step"]
    with pytest.raises(ValueError, match="after how many steps"):
        Adam(mine).load_state_dict(uneven)


def test_nothing_changes_when_something_is_refused():
    first, second = parameters()
    half = torch.nn.Parameter(second.detach().bfloat16())
    optimizer = Adam([first, half])
    give([first], 1)
    half.grad = torch.ones(3, 5).bfloat16()
    kept = first.detach().clone()
    with pytest.raises(ValueError, match=r"a parameter of shape \[3, 5\] is torch.bfloat16"):
        optimizer.step()
    assert_same_bytes(first.detach(), kept)
    assert not optimizer.state and optimizer.param_groups[0]["step"] == 0
    optimizer = Adam([first], lr=None)
    with pytest.raises(ValueError, match="lr is None"):
        optimizer.step()


def test_a_closure_is_differentiated():
    (mine,) = parameters(1)
    optimizer = Adam([mine], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (mine**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > (mine**2).sum()
