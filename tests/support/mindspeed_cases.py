"""Cases about MindSpeed: ``python mindspeed_cases.py FOLDER MODEL [NAME ...]``.

FOLDER holds a package ``mindspeed``: the stand-in of these tests, or the real sources; MODEL is a HF folder. MindSpeed patches torch for good, so each
case runs in a process of its own, forked from one that has imported everything but MindSpeed. One line of JSON a case: ``[name, error, returned]``.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

from tio_megatron.contract import Layout

REPATCH = {"use_flash_attn": True, "moe_grouped_gemm": True}
"""What verl hands to ``repatch``."""
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}


def adaptor() -> Any:
    """Import MindSpeed's adaptor, as its users do."""
    import mindspeed.megatron_adaptor as found

    return found


def bindings() -> dict[tuple[str, str], Any]:
    """Every name of every module, and of every class that our patches touch."""
    from tio_megatron.integrations.megatron.applied.patches import all_patches

    found = {(name, key): value for name, module in list(sys.modules.items()) for key, value in list(getattr(module, "__dict__", {}).items())}
    for patch in all_patches():
        owner, _ = patch.owner()
        if isinstance(owner, type):
            found |= {(f"class {owner.__module__}.{owner.__qualname__}", key): value for key, value in vars(owner).items()}
    return found


def bookkeeping() -> Any:
    """The manager's entries and the features."""
    from mindspeed.features_manager import MindSpeedFeaturesManager
    from mindspeed.patch_utils import MindSpeedPatchesManager

    entries = MindSpeedPatchesManager.patches_info
    return {p: (e.patch_func, list(e.wrappers), e.final_patch_func) for p, e in entries.items()}, list(MindSpeedFeaturesManager.FEATURES_LIST)


def changed(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> list[str]:
    """Names that are bound to other objects. Ours count everywhere, others only where the name was there before."""
    return [
        ".".join(key)
        for key, value in after.items()
        if not key[0].startswith("tio_megatron") and (key in before and value is not before[key] or is_ours(value) and value is not before.get(key))
    ]


def is_ours(value: Any) -> bool:
    """Whether a replacement of ours lies outermost."""
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    return isinstance(function, types.FunctionType) and "/tio_megatron/integrations/megatron/" in function.__code__.co_filename


def ours_left() -> list[str]:
    """Where a replacement of ours is bound outside the package."""
    return [f"{module}.{name}" for (module, name), value in bindings().items() if is_ours(value) and not module.startswith("tio_megatron")]


def symbols() -> dict[str, Any]:
    """What each of our patches' symbols is now."""
    from tio_megatron.integrations.megatron.applied.patches import all_patches

    found = {}
    for patch in all_patches():
        owner, name = patch.owner()
        found[patch.target] = vars(owner)[name]
    return found


def apply() -> Any:
    """apply(), and the functions that look at it."""
    import tio_megatron
    from tio_megatron.integrations.megatron.applied import state as applied

    tio_megatron.apply(vocab_size=700)
    return applied


def everything_imported() -> None:
    from tio_megatron.integrations.megatron.applied.patches import all_patches
    from tio_megatron.integrations.megatron.training import grad_sums  # noqa: F401

    for patch in all_patches():
        patch.owner()


def case_apply_and_undo() -> Any:
    """MindSpeed first: ours go through its manager, and undo leaves every alias and the manager as they were."""
    adaptor()
    everything_imported()
    import tio_megatron
    from tio_megatron.integrations.megatron.applied.patches import all_patches

    before, books = bindings(), bookkeeping()
    applied = apply()
    assert applied.problems() == [], applied.problems()
    assert applied.patched()["through"] == "MindSpeed's patch manager"
    during = bindings()
    for patch in all_patches():
        owner, name = patch.owner()
        key = (f"class {owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__, name)
        # A constant may be what we want already.
        assert isinstance(during[key], bool) or during[key] is not before[key], f"{patch.target} is not replaced"
    # The control: a name that another module imported by value is replaced as well.
    assert ("mindspeed.replacements", "get_grad_norm_fp32") not in before or is_ours(during["mindspeed.replacements", "get_grad_norm_fp32"])
    tio_megatron.undo()
    assert changed(before, bindings()) == [], changed(before, bindings())
    assert bookkeeping() == books
    tio_megatron.undo()
    return applied.patched()["symbols"]


def case_shared_symbols() -> Any:
    """Symbols that both patch: MindSpeed's own patch lies under ours, and is there again after undo."""
    adaptor()
    everything_imported()
    import megatron.core.models.common.embeddings.rope_utils as home
    import megatron.core.transformer.attention as reader

    import tio_megatron

    theirs = home.apply_rotary_pos_emb
    assert theirs.__module__.startswith("mindspeed") and reader.apply_rotary_pos_emb is theirs
    applied = apply()
    shared = applied.patched()["shared"]
    assert is_ours(home.apply_rotary_pos_emb) and reader.apply_rotary_pos_emb is home.apply_rotary_pos_emb
    assert "apply_rotary_pos_emb" in shared["megatron.core.transformer.attention:apply_rotary_pos_emb"], shared
    assert any("TransformerConfig" in target for target in shared) and any("start_grad_sync" in target for target in shared), shared
    tio_megatron.undo()
    assert home.apply_rotary_pos_emb is theirs and reader.apply_rotary_pos_emb is theirs
    return shared


def case_apply_before() -> Any:
    """tio_megatron first, as verl imports it: our patches make room and go in again through the manager."""
    everything_imported()
    import tio_megatron

    stock = bindings()
    applied = apply()
    assert applied.patched()["through"] == "tio_megatron" and applied.problems() == []
    finders = len(sys.meta_path)
    adaptor()
    assert len(sys.meta_path) == finders - 1, "the finder did not go away"
    assert applied.patched()["through"] == "MindSpeed's patch manager" and applied.problems() == [], applied.problems()
    from tio_megatron.integrations.mindspeed.refusals import foreign_bases

    assert foreign_bases() == []
    tio_megatron.undo()
    assert ours_left() == [], ours_left()
    # Where MindSpeed patches nothing, stock's own objects are back.
    after = bindings()
    for key in (("megatron.core.tensor_parallel.mappings", "_reduce"), ("class megatron.core.tensor_parallel.random.CheckpointFunction", "forward")):
        assert after[key] is stock[key], key


def case_repatch() -> Any:
    """verl's call: our patches are in force afterwards, outermost; and undo then leaves what MindSpeed has by itself."""
    ours_first = adaptor()
    everything_imported()
    import tio_megatron

    applied = apply()
    for arguments in (REPATCH, {"context_parallel_size": 2}, {"context_parallel_size": 1, "use_flash_attn": False}):
        ours_first.repatch(dict(arguments))
        assert applied.problems() == [], applied.problems()
    tio_megatron.undo()
    assert ours_left() == [], ours_left()
    during = symbols()
    ours_first.repatch({})
    assert ours_left() == [], ours_left()
    # MindSpeed makes its wrappers anew each time; what it replaces, or leaves alone, is the same object as without us.
    again = [target for target, value in symbols().items() if value is not during[target]]
    assert again == ["megatron.core.transformer.transformer_config:TransformerConfig.__post_init__"], again
    assert applied.problems()[0].startswith("nothing is applied")


def case_dropped_feature() -> Any:
    """Somebody sets another list of features: the check says so before the next repatch, and names every symbol after it."""
    mindspeed = adaptor()
    from mindspeed.features_manager import MindSpeedFeaturesManager

    applied = apply()
    listed = MindSpeedFeaturesManager.FEATURES_LIST
    listed[:] = [feature for feature in listed if type(feature).__module__.startswith("mindspeed")]
    (line,) = applied.problems()
    assert "feature is gone" in line
    mindspeed.repatch({})
    lines = "\n".join(applied.problems())
    assert "GPTModel.__init__: gone from MindSpeed's manager" in lines and "mappings:_reduce:" in lines and "start_grad_sync" in lines, lines
    return lines


def case_removed() -> Any:
    """Somebody removes all patches: each of ours is named."""
    adaptor()
    from mindspeed.patch_utils import MindSpeedPatchesManager

    applied = apply()
    managed = [target for target in applied.patched()["symbols"] if "Adam" not in target]
    MindSpeedPatchesManager.remove_patches()
    lines = applied.problems()
    import tio_megatron

    tio_megatron.undo()
    assert len([line for line in lines if "gone from MindSpeed's manager" in line]) > len(managed) // 2
    return lines


def case_collisions() -> Any:
    """A plain replacement of one of our symbols lies under ours; a wrapper registered later is named, and undo refuses to guess."""
    adaptor()
    everything_imported()
    import megatron.core.tensor_parallel.mappings as mappings
    from mindspeed.patch_utils import MindSpeedPatchesManager as Manager

    import tio_megatron

    def theirs(input_: Any, group: Any) -> str:
        return "theirs"

    path = "megatron.core.tensor_parallel.mappings._reduce"
    stock = mappings._reduce
    Manager.register_patch(path, theirs)
    Manager.apply_patches()
    applied = apply()
    assert is_ours(mappings._reduce) and "theirs" in applied.patched()["shared"]["megatron.core.tensor_parallel.mappings:_reduce"]
    try:
        Manager.register_patch(path, lambda input_, group: None)
    except RuntimeError as error:
        assert "exist" in str(error)
    else:
        raise AssertionError("a second plain replacement was taken")
    assert applied.problems() == []

    def late_wrapper(function: Any) -> Any:
        return lambda *args: function(*args)

    Manager.register_patch(path, late_wrapper)
    Manager.apply_patches()
    (line,) = applied.problems()
    assert "mappings:_reduce" in line and "late_wrapper" in line, line
    try:
        tio_megatron.undo()
    except RuntimeError as error:
        assert "late_wrapper" in str(error) and "undo that first" in str(error)
    else:
        raise AssertionError("undone under somebody else's wrapper")
    entry = Manager.patches_info[path]
    entry.wrappers.remove(late_wrapper)
    entry.is_applied = False
    Manager.apply_patches()
    mappings._gather_along_first_dim, kept = stock, mappings._gather_along_first_dim
    (line,) = applied.problems()
    assert "_gather_along_first_dim: replaced outside MindSpeed's manager" in line, line
    mappings._gather_along_first_dim = kept
    tio_megatron.undo()
    assert mappings._reduce is theirs


def case_attention() -> Any:
    """MindSpeed's patches of DotProductAttention, the method and the class: detected, and not in the path of a model under the contract."""
    mindspeed = adaptor()
    everything_imported()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tio_megatron.integrations.megatron.modules import parts as modules
    from tio_megatron.integrations.megatron.modules import specs

    applied = apply()
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True
    )
    found = []
    for arguments in ({"context_parallel_size": 1} | REPATCH, {"context_parallel_size": 2}):
        mindspeed.repatch(arguments)
        import megatron.core.transformer.dot_product_attention as stock

        found.append(f"{stock.DotProductAttention.__module__}.{stock.DotProductAttention.__name__}.forward: {stock.DotProductAttention.forward.__module__}")
        assert "mindspeed" in found[-1], found
        (layer,) = specs.convert(TransformerBlockSubmodules([get_gpt_layer_local_spec(normalization="RMSNorm")]), config).layer_specs
        assert layer.submodules.self_attention.submodules.core_attention is modules.OrderedCoreAttention
        assert layer.submodules.input_layernorm is modules.OrderedRMSNorm
        assert applied.problems() == []
    return found


def case_options() -> Any:
    """Options that the contract cannot obey are refused by name when a model is built, whether a configuration or the arguments hold them."""
    from types import SimpleNamespace

    mindspeed = adaptor()
    from tio_megatron.integrations.mindspeed import manager
    from tio_megatron.integrations.mindspeed.refusals import mindspeed_refusals

    config = SimpleNamespace(context_parallel_size=1, num_moe_experts=None)
    assert mindspeed_refusals(config) == [], mindspeed_refusals(config)
    mindspeed.repatch(dict(REPATCH))
    assert mindspeed_refusals(config) == []
    lines = mindspeed_refusals(SimpleNamespace(num_moe_experts=None, context_parallel_size=1, tp_2d=True, moe_alltoall_overlap_comm=True, pre_tockens=128))
    assert [finding.option for finding in lines] == ["pre_tockens", "tp_2d", "moe_alltoall_overlap_comm"], lines
    for algorithm in ("ulysses_cp_algo", "hybrid_cp_algo", "adaptive_cp_algo", "hybrid_adaptive_cp_algo", "new_cp_algo"):
        assert mindspeed_refusals(SimpleNamespace(num_moe_experts=None, context_parallel_size=1, context_parallel_algo=algorithm)) == []
        (line,) = map(str, mindspeed_refusals(SimpleNamespace(num_moe_experts=None, context_parallel_size=2, context_parallel_algo=algorithm)))
        assert f"context_parallel_algo='{algorithm}'" in line and "megatron_cp_algo would work" in line
    for algorithm in ("megatron_cp_algo", "kvallgather_cp_algo"):
        assert mindspeed_refusals(SimpleNamespace(num_moe_experts=None, context_parallel_size=4, context_parallel_algo=algorithm)) == []
    manager.arguments().context_parallel_algo = "ulysses_cp_algo"
    assert len(mindspeed_refusals(SimpleNamespace(num_moe_experts=None, context_parallel_size=2))) == 1
    manager.arguments().context_parallel_algo = "megatron_cp_algo"
    mindspeed.repatch(dict(RECOMPUTE))
    assert mindspeed_refusals(config) == []
    balanced = SimpleNamespace(context_parallel_size=1, num_moe_experts=4, moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1)
    (line,) = map(str, mindspeed_refusals(balanced))
    assert line.startswith("recompute_method='block'") and "'uniform'" in line
    manager.arguments().brand_new = 3
    assert mindspeed_refusals(config) == []
    default = manager.default_arguments

    def with_new(**_: Any) -> Any:
        found = default()
        found.brand_new = 0
        return found

    manager.default_arguments = with_new
    assert [*map(str, mindspeed_refusals(config))] == ["brand_new=3: an option of MindSpeed that is not known here; 0 would work"]


def case_model(folder: str) -> Any:
    """Digests of losses and weights of two training steps on two data-parallel ranks, after verl's repatch."""
    return trained(folder, Layout(dp=2), REPATCH)


def case_context_parallel(folder: str) -> Any:
    """The same on two context-parallel ranks, where MindSpeed replaces the attention's class; with its block recomputation."""
    return trained(folder, Layout(cp=2), REPATCH | RECOMPUTE | {"context_parallel_size": 2})


def trained(folder: str, layout: Layout, repatch: dict[str, Any]) -> dict[str, str]:
    """Train in a process that MindSpeed has patched."""
    mindspeed = adaptor()
    import mindspeed_training
    import torch

    def work() -> None:
        mindspeed.repatch(dict(repatch))
        # MindSpeed makes the type names of NPU tensors read as CUDA's, for parameters apart; here that is the CPU device's job.
        if "type" in vars(torch.nn.Parameter):
            del torch.nn.Parameter.type

    return mindspeed_training.digests(Path(folder), layout=layout, before=work)


def case_parser() -> Any:
    """The table of options against those that the sources register."""
    adaptor()
    from tio_megatron.integrations.mindspeed import manager, options

    defaults = vars(manager.default_arguments())
    missing = sorted(set(defaults) - set(options.NAMES))
    stale = sorted(name for name, option in options.NAMES.items() if name not in defaults and not option.asked)
    assert not missing and not stale, f"not in the table: {missing}; not in the sources: {stale}"
    assert options.problems(manager.default_arguments()) == []
    return len(defaults)


def main() -> None:
    folder, model, *names = sys.argv[1:]
    sys.argv = sys.argv[:1]
    warnings.simplefilter("ignore")
    sys.path.insert(0, folder)
    if not Path(folder).resolve().is_relative_to(Path(__file__).resolve().parent):
        import npu_stub

        npu_stub.install()
    everything_imported()
    for name in names or [name.removeprefix("case_") for name in globals() if name.startswith("case_")]:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            line = [name, *run(name, model)]
            print(json.dumps(line), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def run(name: str, model: str) -> tuple[str | None, Any]:
    """The case's traceback, if any, and what it returned."""
    case = globals()[f"case_{name}"]
    try:
        return None, case(model) if inspect.signature(case).parameters else case()
    except BaseException:
        return traceback.format_exc(), None


if __name__ == "__main__":
    main()
