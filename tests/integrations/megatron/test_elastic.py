"""A checkpoint of a training belongs to no layout: the run goes on with the bytes of the uninterrupted one, or is refused before anything changes."""

import hashlib
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from small_disk import no_look_ahead, small_disk

from examples.qwen3_moe.matrix_train import forget
from examples.qwen3_moe.training import Recipe, Training, parse
from tio_megatron import kernels
from tio_megatron.checkpoint import Checkpoint, CheckpointError, damaged_files, latest_training, training_state, write_checkpoint
from tio_megatron.contract import Contract
from tio_megatron.integrations.megatron.resume import train_state
from tio_megatron.integrations.megatron.weights.transfer import export_weights
from tio_megatron.testing import RankError, assert_same_bytes, run_ranks
from tio_megatron.testing.qwen3 import DENSE, MOE, write_tiny

SMALL = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=32, vocab_size=300)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
MODELS = {
    "moe": MOE | SMALL | EXPERTS,
    "tied": MOE | SMALL | EXPERTS | {"tie_word_embeddings": True},
    "fp32": MOE | SMALL | EXPERTS | {"torch_dtype": "float32"},
    "dense": DENSE | SMALL | {"intermediate_size": 96},
}
CONTRACT = Contract(grain=32)
STEPS, HALF = 4, 2


def recipe_of(folder, kind="moe", **fields):
    path = folder / f"model-{kind}"
    if not path.exists():
        write_tiny(path, MODELS[kind])
    return Recipe(path, **dict(steps=STEPS, warmup=2, samples=4, longest=48, shortest=16) | fields)


def uninterrupted(rank, recipe, cut, root):
    training = Training(recipe, cut, CONTRACT)
    while training.step_number < recipe.steps:
        if training.step_number == HALF:
            training.save(root)
        training.step()
    training.save(root)
    found = training.sha256()
    training.close()
    return found


def resumed(rank, recipe, cut, root, left_out="", save=None):
    training = Training(recipe, cut, CONTRACT)
    found = training.resume(root)
    assert (found.step, found.position, training.step_number) == (HALF, {"next_step": HALF}, HALF)
    forget(training, left_out)
    while training.step_number < recipe.steps:
        training.step()
    if save:
        training.save(save)
    digest = training.sha256()
    training.close()
    return digest


def written(folder, kind, cut):
    """(recipe, checkpoint at half, checkpoint at the end, digest at the end) of an uninterrupted run."""
    recipe = recipe_of(folder, kind)
    root = folder / f"{kind}-{cut}".replace(" ", "-")
    (digest,) = set(run_ranks(cut.layout.ranks, uninterrupted, recipe, cut, root, timeout=200))
    return recipe, root / f"step-{HALF:08d}", root / f"step-{STEPS:08d}", digest


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return written(tmp_path_factory.mktemp("moe"), "moe", parse("tp2+ep2"))


@pytest.mark.parametrize(
    "cut",
    [
        parse("tp1", micro_batch=2),
        parse("dp2", distributed_optimizer=True),
        pytest.param(parse("ep4", distributed_optimizer=True), marks=pytest.mark.full),
        pytest.param(parse("pp2"), marks=pytest.mark.full),
        pytest.param(parse("cp2", packed=True), marks=pytest.mark.full),
        pytest.param(parse("tp4+ep2+etp2", micro_batch=2), marks=pytest.mark.full),
        pytest.param(parse("tp2+dp2+ep2", distributed_optimizer=True, overlap=True), marks=pytest.mark.full),
        pytest.param(parse("tp1", grouped=False), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_another_layout_goes_on_with_the_same_bytes(cut, moe, tmp_path):
    recipe, half, end, digest = moe
    assert set(run_ranks(cut.layout.ranks, resumed, recipe, cut, half, "", tmp_path, timeout=200)) == {digest}
    # The checkpoint it writes is the uninterrupted run's, apart from where it was written.
    ours, theirs = (training_state(folder) for folder in (latest_training(tmp_path), end))
    assert {name for name in theirs if ours[name] != theirs[name]} <= {"written", "random"}
    assert ours["files"] == theirs["files"] and len(ours["largest"]) == len(Checkpoint(end / "model").table)


@pytest.mark.parametrize("left_out", ["largest", "moments"])
def test_what_is_forgotten_shows(left_out, moe):
    recipe, half, _, digest = moe
    (found,) = run_ranks(1, resumed, recipe, parse("tp1"), half, left_out, timeout=200)
    assert found != digest


@pytest.mark.parametrize(
    "kind, cut, then",
    [
        ("tied", parse("pp2"), parse("dp2", distributed_optimizer=True)),
        pytest.param("tied", parse("tp2+dp2+ep2", distributed_optimizer=True), parse("pp2+tp2+ep2"), marks=pytest.mark.full),
        pytest.param("fp32", parse("dp2", distributed_optimizer=True), parse("tp2+ep2"), marks=pytest.mark.full),
        pytest.param("fp32", parse("tp1"), parse("pp2+dp2+ep2", distributed_optimizer=True), marks=pytest.mark.full),
        pytest.param("dense", parse("tp4"), parse("pp2+dp2", distributed_optimizer=True), marks=pytest.mark.full),
        pytest.param("dense", parse("cp2"), parse("tp2"), marks=pytest.mark.full),
        pytest.param("dense", parse("dp4", distributed_optimizer=True), parse("tp1"), marks=pytest.mark.full),
    ],
)
def test_other_models_too(kind, cut, then, tmp_path):
    recipe, half, _, digest = written(tmp_path, kind, cut)
    assert set(run_ranks(then.layout.ranks, resumed, recipe, then, half, timeout=200)) == {digest}


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def round_trip(rank, source, cut, target):
    training = Training(Recipe(source, longest=48), cut, CONTRACT)
    stream = export_weights(training.model, training.config)
    if rank == 0:
        write_checkpoint(target, training.config.raw, stream)
    else:
        list(stream)
    dist.barrier()
    training.close()


def test_hf_files_come_back_from_every_layout(moe, tmp_path):
    """Trained weights, in through one layout and out again: every file of the folder has the same SHA-256."""
    source, cuts = moe[2] / "model", [parse("tp1", grouped=False), parse("tp2+ep2"), parse("pp2")]
    for number, cut in enumerate(cuts):
        run_ranks(cut.layout.ranks, round_trip, source, cut, tmp_path / str(number), timeout=200)
        assert contents(tmp_path / str(number)) == contents(source), cut


def refusals(rank, recipe, cut, cases):
    """What each case says, on this rank; the training is as before."""
    training = Training(recipe, cut, CONTRACT)
    training.step()
    before = training.sha256(), [p.tio_sum.largest for p in training.model.parameters()], training.schedule.num_steps
    said = []
    for path, fields in cases:
        training.recipe = replace(recipe, **fields)
        try:
            training.resume(path)
        except CheckpointError as error:
            said.append(str(error))
        after = training.sha256(), [p.tio_sum.largest for p in training.model.parameters()], training.schedule.num_steps
        assert after == before and training.step_number == 1
    training.close()
    return said


def copied(folder, target, change):
    shutil.copytree(folder, target)
    change(target)
    return target


def rewritten(folder, **fields):
    """``state.json`` with other contents, and whole again."""
    from tio_megatron.checkpoint import training

    path = folder / "state.json"
    state = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"} | fields
    path.write_text(json.dumps(state | {"sha256": training._own_digest(state)}))


def test_refusals_name_what_differs_and_change_nothing(moe, tmp_path):
    recipe, half, _, _ = moe
    state = training_state(half)
    weights = "model/model.safetensors"
    size = state["files"][weights]["bytes"]
    cases = [
        (half, {"lr": 1e-3}, [r"written by another training .*settings.lr: 0.001 / 0.002"]),
        (half, {"seed": 7, "samples": 8}, ["settings.samples: 8 / 4; settings.seed: 7 / 1234"]),
        (copied(half, tmp_path / "a", lambda f: os.truncate(f / weights, size // 2)), {}, [f"{weights} has {size // 2} bytes, {size} were written"]),
        (copied(half, tmp_path / "b", lambda f: os.remove(f / "exp_avg_sq" / "model.safetensors")), {}, ["exp_avg_sq/model.safetensors is missing"]),
        (copied(half, tmp_path / "c", lambda f: os.truncate(f / "state.json", 300)), {}, ["state.json: cannot be read as JSON"]),
        (
            copied(half, tmp_path / "d", lambda f: rewritten(f, contract=state["contract"] | {"grain": 64}, fingerprint="0123")),
            {},
            [r"written under another contract \(fingerprint 0123\): contract.grain: 32 / 64"],
        ),
        (copied(half, tmp_path / "e", lambda f: rewritten(f, kernels="cpu-0")), {}, [f"another contract .*kernels: {kernels.version()} / cpu-0"]),
        (
            copied(half, tmp_path / "f", lambda f: rewritten(f, model=state["model"] | {"layers": 3, "hidden": 128})),
            {},
            ["the checkpoint of another model: model.layers: 2 / 3; model.hidden: 64 / 128"],
        ),
        (copied(half, tmp_path / "g", lambda f: rewritten(f, optimizer=state["optimizer"] | {"clip_grad": 2.0})), {}, ["optimizer.clip_grad: 1.0 / 2.0"]),
        (copied(half, tmp_path / "h", lambda f: rewritten(f, schedule=state["schedule"] | {"min_lr": 0.5})), {}, ["schedule.min_lr: 0.0002 / 0.5"]),
        (copied(half, tmp_path / "i", lambda f: rewritten(f, schedule=None)), {}, ["saved without a schedule"]),
        (copied(half, tmp_path / "j", lambda f: rewritten(f, largest={})), {}, ["/j: the checkpoint has no largest partial of model.embed_tokens.weight"]),
        (tmp_path / "nothing", {}, ["no training checkpoint here"]),
    ]
    cut = parse("dp2", distributed_optimizer=True)
    results = run_ranks(2, refusals, recipe, cut, [(path, fields) for path, fields, _ in cases], timeout=200)
    assert results[0] == results[1], "one message on all ranks"
    assert len(results[0]) == len(cases)
    for said, (_, _, wanted) in zip(results[0], cases, strict=True):
        assert all(re.search(each, said) for each in wanted), said


def bf16_main_parameters(folder):
    """Main parameters that are the weights, listed as if they had been written so."""
    shutil.rmtree(folder / "param")
    shutil.copytree(folder / "model", folder / "param")
    files = training_state(folder)["files"]
    rewritten(folder, files=files | {name.replace("model/", "param/", 1): entry for name, entry in files.items() if name.startswith("model/")})


def test_what_would_fail_half_way_is_refused_before(moe, tmp_path):
    recipe, half, _, _ = moe
    drawn = training_state(half)["random"]
    short = {"ranks": drawn["ranks"], "states": dict.fromkeys(drawn["states"], "AAAA")}
    cases = [
        (copied(half, tmp_path / "a", lambda f: rewritten(f, random=short)), r"random.states.\w+: no state of torch"),
        (copied(half, tmp_path / "b", lambda f: rewritten(f, random=drawn | {"ranks": drawn["ranks"][:1]})), "random: states of 1 ranks in a layout of 2"),
        (copied(half, tmp_path / "c", bf16_main_parameters), "param: holds bfloat16 tensors .* it must hold float32 ones"),
        (copied(half, tmp_path / "d", lambda f: rewritten(f, files={})), "state.json: files is empty"),
        (copied(half, tmp_path / "e", lambda f: (f / "exp_avg" / "model.safetensors.index.json").write_text("{}")), "index.json is not among the files"),
        (copied(half, tmp_path / "f", lambda f: (f / "state.json").write_text("[" * 100_000)), "state.json: cannot be read as JSON"),
    ]
    results = run_ranks(2, refusals, recipe, parse("tp2+ep2"), [(path, {}) for path, _ in cases], timeout=200)
    assert results[0] == results[1] and len(results[0]) == len(cases)
    for said, (_, wanted) in zip(results[0], cases, strict=True):
        assert re.search(wanted, said) and "loaded in part" not in said, said


def test_a_whole_checkpoint_beside_a_damaged_one_is_named(moe, tmp_path):
    recipe, half, end, _ = moe
    harms = {
        "tensors": lambda f: os.truncate(f / end.name / "exp_avg" / "model.safetensors", 100),
        "cut": lambda f: os.truncate(f / end.name / "state.json", 100),
        "gone": lambda f: os.remove(f / end.name / "state.json"),
        "both": lambda f: [os.remove(folder / "param" / "config.json") for folder in f.glob("step-*")],
    }
    cases = [(copied(half.parent, tmp_path / name, harm), {}) for name, harm in harms.items()]
    results = run_ranks(2, refusals, recipe, parse("pp2"), cases, timeout=200)
    assert results[0] == results[1] and len(results[0]) == len(cases)
    for said, (root, _) in zip(results[0][:3], cases, strict=False):
        assert said.endswith(f"; {root / half.name} is whole: load it by its folder"), said
    assert results[0][3].endswith("param/config.json is missing; copy it again or take another; no other checkpoint beside it is whole")


def test_another_model_is_refused_by_its_fields(moe, tmp_path):
    """The real thing, not an edited file: a dense model's run is given a mixture's checkpoint."""
    recipe = recipe_of(tmp_path, "dense")
    (said,) = run_ranks(1, refusals, recipe, parse("tp1"), [(moe[1], {})], timeout=200)
    assert "the checkpoint of another model" in said[0] and "model.experts: 0 / 4" in said[0]


def allowed(rank, recipe, half):
    training = Training(replace(recipe, lr=1e-3), parse("tp1"), CONTRACT)
    arguments = (half, training.model, training.optimizer, training.schedule, training.config)
    settings = training._settings()
    with pytest.raises(CheckpointError, match="settings.lr: 0.001 / 0.002; schedule.max_lr: 0.001 / 0.002; schedule.min_lr: 0.0001 / 0.0002"):
        train_state.load_training(*arguments, settings=settings)
    found = train_state.load_training(*arguments, settings=settings, allow=("settings.lr", "schedule.max_lr", "schedule.min_lr"))
    assert found.settings["lr"] == 2e-3 and found.written["layout"]["tp"] == 2 and not {"torch"} & set(found.fresh)
    rates = {group["lr"] for group in training.optimizer.param_groups}
    training.close()
    return rates, training.schedule.num_steps


def test_a_field_may_differ_when_it_is_named(moe):
    ((rates, steps),) = run_ranks(1, allowed, moe[0], moe[1], timeout=200)
    assert rates == {1e-3} and steps == HALF  # after two of two warm-up steps, at this run's rate


def without_a_schedule(rank, recipe, root):
    training = Training(recipe, parse("tp1"), CONTRACT)
    training.step()
    for group in training.optimizer.param_groups:
        group["lr"] = 0.125
    arguments = training.model, training.optimizer, None, training.config
    train_state.save_training(root, *arguments, step=1)
    for group in training.optimizer.param_groups:
        group["lr"], group["step"] = 0.5, 9
    found = train_state.load_training(root, *arguments)
    assert {(group["lr"], group["step"]) for group in training.optimizer.param_groups} == {(0.125, 1)}
    with pytest.raises(CheckpointError, match="it was saved without a schedule, and resumes the same way"):
        train_state.load_training(root, *arguments[:2], training.schedule, training.config)
    training.close()
    return found.position, found.settings


def test_a_caller_that_sets_rates_has_them_back(tmp_path):
    assert run_ranks(1, without_a_schedule, recipe_of(tmp_path), tmp_path / "root", timeout=200) == [({}, {})]


def weights_on_their_way(rank, recipe, root):
    """Weights that the distributed optimizer gathers only with the next forward pass."""
    from examples.qwen3_moe import training as module

    stock = module.DistributedDataParallelConfig
    module.DistributedDataParallelConfig = lambda **fields: stock(**fields, overlap_param_gather=True)
    training = Training(recipe, parse("dp2", distributed_optimizer=True, overlap=True), CONTRACT)
    for _ in range(2):  # the first has rate 0
        training.step()
    folder = training.save(root)
    if rank == 0:
        with Checkpoint(folder / "model") as weights, Checkpoint(folder / "param") as main:
            assert_same_bytes(dict(weights.tensors()), {name: tensor.bfloat16() for name, tensor in main.tensors()})
    training.close()


def test_weights_that_are_gathered_late_are_saved_as_they_are(tmp_path):
    run_ranks(2, weights_on_their_way, recipe_of(tmp_path), tmp_path / "root", timeout=200)


def half_added(rank, recipe, root):
    training = Training(recipe, parse("tp1"), CONTRACT)
    parameter = next(training.model.parameters())
    parameter.tio_sum.partials = 1
    with pytest.raises(CheckpointError, match="gradients are being added up .*save between two steps"):
        training.save(root)
    parameter.tio_sum.partials = 0
    with pytest.raises(CheckpointError, match="position: only JSON's types can be saved"):
        train_state.save_training(root, training.model, training.optimizer, None, training.config, step=0, position={"at": {1}})
    training.close()
    return not root.exists()


def test_what_cannot_be_saved(tmp_path):
    assert run_ranks(1, half_added, recipe_of(tmp_path), tmp_path / "root", timeout=200) == [True]


def random_numbers(rank, recipe, root):
    """Draws after a resumption in the layout that saved, and after one with ranks that differed."""
    training = Training(recipe, parse("dp2"), CONTRACT)
    torch.manual_seed(rank)
    training.save(root)
    wanted = torch.rand(3)
    torch.rand(9)
    same = training.resume(root)
    assert not same.fresh and torch.equal(torch.rand(3), wanted)
    training.close()
    return wanted


def one_rank(rank, recipe, root):
    training = Training(recipe, parse("tp1"), CONTRACT)
    fresh = training.resume(root).fresh
    training.close()
    return fresh


def test_random_states(tmp_path):
    recipe = recipe_of(tmp_path)
    wanted = run_ranks(2, random_numbers, recipe, tmp_path / "root", timeout=200)
    assert not torch.equal(*wanted)
    assert "torch" in run_ranks(1, one_rank, recipe, tmp_path / "root", timeout=200)[0]


def full(rank, recipe, root, spread):
    """One message on both ranks, and the training goes on."""
    if spread:
        train_state.AGREE_EVERY = 1 << 18
    training = Training(recipe, parse("tp2+ep2"), CONTRACT)
    training.step()
    training.save(root)
    filler = root / "filler"
    if rank == 0:
        filler.write_bytes(bytes(os.statvfs(root).f_bavail * os.statvfs(root).f_frsize - 1_000_000))
    training.step()
    try:
        training.save(root)
        said = ""
    except CheckpointError as error:
        said = str(error)
    good = training.sha256()
    dist.barrier()
    if rank == 0:
        state = training_state(latest_training(root))
        assert state["step"] == 1 and not damaged_files(latest_training(root), state["files"]) and not list(root.glob(".draft-*"))
        filler.unlink()
    dist.barrier()
    training.save(root)
    training.close()
    return said, good


@pytest.mark.parametrize("ahead", [True, False], ids=["seen before", "while writing"])
def test_a_full_disk(ahead, tmp_path, monkeypatch):
    if not ahead:
        no_look_ahead(monkeypatch)
    with small_disk(tmp_path / "disk", "90m" if ahead else "12m") as root:
        results = run_ranks(2, full, recipe_of(tmp_path), root, not ahead, timeout=200)
        assert results[0][0] == results[1][0]
        assert ("are free on that disk" if ahead else "No space left on device") in results[0][0] and "the last good one is" in results[0][0]
        assert training_state(latest_training(root))["step"] == 2


def killed(rank, recipe, root, victim, moment):
    """A rank is killed at its ``moment``-th look at the file system or message, while all of them save."""
    training = Training(recipe, parse("tp2+ep2"), CONTRACT)
    training.save(root)
    training.step()
    count = 0

    def die_at(*unused):
        nonlocal count
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        stock = dist.send, dist.all_gather_object
        dist.send = lambda *a, **k: (die_at(), stock[0](*a, **k))[1]
        dist.all_gather_object = lambda *a, **k: (die_at(), stock[1](*a, **k))[1]
        sys.addaudithook(lambda event, _: die_at() if event in ("open", "os.rename", "os.mkdir") else None)
    training.save(root)
    training.close()


@pytest.mark.full
@pytest.mark.parametrize("victim, moments", [(0, (1, 5, 12, 25, 40, 60)), (1, (1, 4, 20, 90))])
def test_a_killed_rank_leaves_a_whole_checkpoint(victim, moments, tmp_path):
    recipe = recipe_of(tmp_path)
    died = 0
    for moment in moments:
        root = tmp_path / f"{victim}-{moment}"
        try:
            run_ranks(2, killed, recipe, root, victim, moment, timeout=60)
        except RankError:
            died += 1
        folder = latest_training(root)
        state = training_state(folder)
        assert state["step"] in (0, 1) and not damaged_files(folder, state["files"])
        # And a run goes on from it.
        assert run_ranks(1, one_rank, recipe, root, timeout=300)
    assert died >= len(moments) - 1
