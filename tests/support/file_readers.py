"""Every reader of files, with a valid file for each: what the fuzz run changes. For tests only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Reader:
    """``make(folder)`` writes valid input below ``folder``, ``read(folder)`` reads all of it, ``files`` are those that are changed.

    ``seal`` signs a changed file again, as somebody could who means harm: what a digest would catch must then be caught by looking.
    """

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    files: tuple[str, ...]
    seal: Callable[[Path], None] | None = None


def _hf(folder: Path) -> None:
    from killed_saves import SMALL, tensors

    from tio_megatron.checkpoint import write_checkpoint

    write_checkpoint(folder / "m", SMALL, tensors(1))


def _shards(folder: Path) -> None:
    from killed_saves import SMALL, tensors

    from tio_megatron.checkpoint import write_checkpoint

    write_checkpoint(folder / "m", SMALL, tensors(1), shard_bytes=9000)


def _read_hf(folder: Path) -> None:
    from tio_megatron.checkpoint import Checkpoint

    with Checkpoint(folder / "m") as checkpoint:
        for _ in checkpoint.tensors():
            pass


def _training(folder: Path) -> None:
    from killed_saves import save

    save(folder / "t", 5)


def _read_training(folder: Path) -> None:
    from tio_megatron.checkpoint import CheckpointError, damaged_files, latest_training, training_state, unlisted_files

    found = latest_training(folder / "t")
    files = training_state(found)["files"]
    if wrong := damaged_files(found, files) + unlisted_files(found, files):
        raise CheckpointError(f"{found}: {wrong}")


def _seal_training(folder: Path) -> None:
    path = folder / "t" / "step-00000005" / "state.json"
    try:
        held = json.loads(path.read_bytes())
        held.pop("sha256", None)
        held["sha256"] = hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(held))
    except (ValueError, RecursionError, AttributeError, TypeError, UnicodeError):  # no longer an object: nothing to sign
        return


def _contract(folder: Path) -> None:
    from tio_megatron.contract import Contract

    (folder / "c.json").write_text(json.dumps(Contract().to_dict() | {"vocab_size": 700}))


def _read_contract(folder: Path) -> None:
    from tio_megatron.contract.environment import read

    read(str(folder / "c.json"))


def _trace(folder: Path) -> None:
    from tio_megatron.traces import Tracer, TraceWriter

    values = torch.arange(42.0).view(7, 6)
    shape = {"layers": 1, "moe": [False], "tied": False}
    with TraceWriter(folder / "a", [[3, 1, 4], [1, 5, 9, 2]], engine="test", shape=shape, facts={"temperature": 1.0}, keep=True) as writer:
        tracer = Tracer(writer)
        with tracer.rows([(0, 0, 3), (1, 0, 4)]):
            tracer.point("embed", values[None])
        writer.weight("w", values)


def _read_trace(folder: Path) -> None:
    from tio_megatron.traces import Trace, open_trace

    trace = open_trace(folder / "a")
    if not isinstance(trace, Trace):
        return
    assert trace.tokens.shape == (sum(trace.lengths),) and len(trace.passes) == 3
    for name in trace.recorded:
        for column in (trace.digests(name), trace.squares(name), trace.columns(name)):
            np.array(column)
        trace.values(name)
    for name in trace.weights:
        trace.weight(name)
    assert trace.graph and trace.where(0)[0] >= 0
    list(trace.sketches)


def _unfinished(folder: Path) -> None:
    (folder / "u").mkdir()
    (folder / "u" / "progress.json").write_text(json.dumps({"rank": 0, "point": "embed", "rows": 3, "most_rows": 7}))


def _read_unfinished(folder: Path) -> None:
    from tio_megatron.traces import open_trace

    open_trace(folder / "u")


def _recording(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        tokens, logprobs = [[5, 6, 7], [9, 9]], [[-1.0, -0.5], [-1.25]]
        if kind == "jsonl":
            lines = [json.dumps({"tokens": a, "logprobs": b}) for a, b in zip(tokens, logprobs, strict=True)]
            (folder / "r").write_text("\n".join(lines) + "\n")
        elif kind == "verl":
            entry = {"input": "a", "output": "b", "score": 1.0, "step": 1, "prompts": [0, 1], "responses": [5, 6, 0]}
            entry |= {"attention_mask": [0, 1, 1, 1, 0], "response_mask": [1, 1, 0]}
            (folder / "r").write_text((json.dumps(entry | {"rollout_log_probs": [-1.0, -0.5, 0.0]}) + "\n") * 2)
        else:
            flat = {"lengths": np.array([3, 2]), "tokens": np.array([5, 6, 7, 9, 9]), "logprobs": np.array([-1.0, -0.5, -1.25], dtype=np.float32)}
            if kind == "npz":
                with open(folder / "r", "wb") as file:
                    np.savez(file, **flat)
            elif kind == "packed":
                with open(folder / "r", "wb") as file:
                    np.savez_compressed(file, tokens=np.ones((2, 3), dtype=np.int64), logprobs=-np.ones((2, 3)), mask=np.ones((2, 3)), lengths=np.array([3, 2]))
            else:
                from safetensors.numpy import save_file

                save_file(flat, folder / "r")

    return make


def _read_recording(folder: Path) -> None:
    from tio_megatron.verify.readers import read_scored

    for _ in read_scored(folder / "r"):
        pass


def _read_tokens(folder: Path) -> None:
    from tio_megatron.verify.readers import read_tokens

    read_tokens(folder / "r")


def _read_verl(folder: Path) -> None:
    from tio_megatron.rollouts.verl_dump import from_verl

    for _ in from_verl(folder / "r"):
        pass


def _load_recording(folder: Path) -> None:
    from tio_megatron.verify import Recording

    held = Recording.load(folder / "r.npz")
    assert len(held.sequences) == len(held.lengths)


def _saved_recording(folder: Path) -> None:
    from tio_megatron.verify import Recording

    Recording.of([[5, 6, 7], [9, 9]], [1, 1], [[-1.0, -0.5], [-1.25]], None).save(folder / "r.npz")


def _store(folder: Path) -> None:
    from rollout_batches import batch

    from tio_megatron.rollouts import Store

    made = Store.create(folder / "s")
    for seed in range(2):
        made.append(batch(seed, sequences=2))


def _read_store(folder: Path) -> None:
    from tio_megatron.rollouts import Store

    store = Store.open(folder / "s")
    store.verify()
    assert len(list(store)) == store.batches


def _bundle(folder: Path) -> None:
    from tio_megatron.verify.monitor.bundle import write_bundle
    from tio_megatron.verify.monitor.sides import Side

    values = -np.ones(3, dtype=np.float32)
    write_bundle(folder / "b", [Side(tokens=np.array([1, 2, 3]), trainer=values, rollout=values)], {"step": 1}, {"tp": 2})


def _read_bundle(folder: Path) -> None:
    from tio_megatron.verify.monitor.bundle import read_bundle
    from tio_megatron.verify.readers import read_scored

    found = read_bundle(folder / "b")
    for path in (found.trainer, found.rollout):
        for _ in read_scored(path):
            pass


def _matrix(folder: Path) -> None:
    from killed_saves import SMALL

    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps(SMALL))
    (folder / "tokens.jsonl").write_text('{"tokens": [1, 2, 3]}\n[4, 5]\n')
    text = "model: m\ntokens: {random: 3, longest: 9, seed: 7}\ntrainers: [megatron tp2, stock megatron]\nrollouts: [vllm tp2, hf float32]\nlimit: 4\n"
    (folder / "t.yaml").write_text(text + "contract: {cuts: {attn_row: 4}}\n")


def _read_matrix(folder: Path) -> None:
    from tio_megatron.verify.matrix.table import Table

    Table.from_file(folder / "t.yaml")


def _metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "kl": null}\n{"step": 2, "reward": 0.25, "kl": 0.0}\n')


def _read_metrics(folder: Path) -> None:
    from examples.qwen3_moe.rl_metrics import read

    read(folder / "metrics.jsonl")


def _prompts(folder: Path) -> None:
    (folder / "p.jsonl").write_text('{"text": "hello"}\n{"tokens": [1, 2, 3]}\n')


def _read_prompts(folder: Path) -> None:
    from examples.qwen3_moe.prompts import read

    read(folder / "p.jsonl")


def _settings(folder: Path) -> None:
    (folder / "v.yaml").write_text(
        "actor_rollout_ref:\n  actor:\n    strategy: megatron\n    megatron: "
        "{tensor_model_parallel_size: 2, expert_model_parallel_size: 2, expert_tensor_parallel_size: 1}\n"
        "  rollout: {tensor_model_parallel_size: 2, temperature: 1.0}\ntrainer: {nnodes: 1, n_gpus_per_node: 2}\n"
    )
    (folder / "v.json").write_text(json.dumps({"tensor_parallel_size": 2, "enable_expert_parallel": True, "dtype": "bfloat16"}))
    (folder / "v.sh").write_text("torchrun --nproc-per-node 2 pretrain.py --tensor-model-parallel-size 2 --num-layers 4 --moe-aux-loss-coeff 0.1 0.2\n")


def _read_settings(folder: Path) -> None:
    from tio_megatron.verify.doctor import settings

    settings.trainer(str(folder / "v.yaml"))
    settings.rollout(str(folder / "v.yaml"))
    settings.rollout(str(folder / "v.json"))
    settings.trainer(str(folder / "v.sh"))


def _model(folder: Path) -> None:
    from killed_saves import SMALL

    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps(SMALL))
    (folder / "m" / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95}))


def _read_model(folder: Path) -> None:
    from tio_megatron.verify.doctor.models import model_of

    model_of(str(folder / "m"))


def _answers(folder: Path) -> None:
    answer = {"tio_handshake": 1, "job": "vllm-1", "time": 1.5, "ranks": [0, 1], "pid": 7, "host": "a", "python": "3.11.2", "tio_megatron": "0.9"}
    answer |= {"torch": "2.13", "engine": "vllm 0.32.0", "contract": "c", "kernels": "cpu-1", "vocab_size": None, "through": "tio_megatron"}
    answer |= {"symbols": ["a:b"], "shared": {"a:b": "other"}, "problems": ["a:b is gone"], "switches": {"NCCL_ALGO": "Ring"}}
    for rank in range(2):
        (folder / f"{rank}.worker.json").write_text(json.dumps(answer | {"rank": rank}))


def _read_answers(folder: Path) -> None:
    from tio_megatron.verify.doctor import of_workers

    of_workers(folder)


STATE = "t/step-00000005/state.json"
TRACE = ("a/trace.json", "a/rows.safetensors", "a/values/embed.safetensors", "a/weights/w.safetensors", "a/sketches.safetensors")
READERS = (
    Reader("HF checkpoint", _hf, _read_hf, ("m/model.safetensors", "m/config.json")),
    Reader("HF checkpoint in shards", _shards, _read_hf, ("m/model.safetensors.index.json", "m/model-00002-of-00004.safetensors")),
    Reader("training checkpoint", _training, _read_training, (STATE, "t/latest", "t/step-00000005/model/model.safetensors")),
    Reader("training checkpoint, signed again", _training, _read_training, (STATE,), _seal_training),
    Reader("contract", _contract, _read_contract, ("c.json",)),
    Reader("trace", _trace, _read_trace, TRACE),
    Reader("trace that did not end", _unfinished, _read_unfinished, ("u/progress.json",)),
    *(Reader(f"recording, {kind}", _recording(kind), _read_recording, ("r",)) for kind in ("jsonl", "verl", "npz", "packed", "safetensors")),
    Reader("tokens", _recording("jsonl"), _read_tokens, ("r",)),
    Reader("verl dump", _recording("verl"), _read_verl, ("r",)),
    Reader("recording of the job", _saved_recording, _load_recording, ("r.npz",)),
    Reader("store of rollouts", _store, _read_store, ("s/store.json", "s/00000000.safetensors", "s/00000001.safetensors")),
    Reader("bundle of a monitor", _bundle, _read_bundle, ("b/breach.json", "b/trainer.jsonl")),
    Reader("table of layouts", _matrix, _read_matrix, ("t.yaml", "m/config.json")),
    Reader("metrics", _metrics, _read_metrics, ("metrics.jsonl",)),
    Reader("prompts", _prompts, _read_prompts, ("p.jsonl",)),
    Reader("settings of a trainer and a rollout", _settings, _read_settings, ("v.yaml", "v.json", "v.sh")),
    Reader("sampling settings", _model, _read_model, ("m/config.json", "m/generation_config.json")),
    Reader("answers of workers", _answers, _read_answers, ("0.worker.json", "1.worker.json")),
)
