"""What SECURITY.md promises of the source, read from the source: nothing unpickled, nothing evaluated, no shell, no code of a checkpoint, no open port."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tio_megatron", "collectives", "examples", "launch", "benchmarks")

PIPE = "the pipe between a process and the ranks it forks itself; nobody else holds an end of it"
ALLOWED = {
    ("tio_megatron/testing/ranks.py", "import pickle"): PIPE,
    ("tio_megatron/testing/ranks.py", "pickle.loads"): PIPE,
    ("tio_megatron/testing/ranks.py", "pickle.dumps"): PIPE,
}
"""What would be refused, with the reason why it stands."""

EXCHANGE = ("tio_megatron/integrations/", "tio_megatron/verify/ascend/", "examples/", "benchmarks/main_job.py")
"""Where ranks of one run may exchange plain values by torch's own means, which pickle; SECURITY.md says that ranks trust each other."""

OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list"}
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE = {
    "torch.load",
    "torch.jit.load",
    "torch.hub.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "yaml.Loader",
    "yaml.UnsafeLoader",
}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "os.execl", "os.spawnl", "commands.getoutput"}
TEMPORARY = {"tempfile.mktemp", "os.tempnam", "os.tmpnam"}
ARCHIVES = {"extractall", "extract", "unpack_archive"}


def sources() -> list[Path]:
    found = {path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "_build" not in path.parts}
    return [*sorted(found), ROOT / "setup.py", ROOT / "launch" / "qwen3_moe.sh"]


def name(node: ast.AST) -> str:
    """``a.b.c`` of an expression that is a dotted name, else what follows the last dot."""
    if isinstance(node, ast.Attribute):
        inner = name(node.value)
        return f"{inner}.{node.attr}" if inner else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def unaliased(tree: ast.AST) -> ast.AST:
    """The tree with ``import a.b as c`` taken out of its names: ``c.d`` becomes ``a.b.d``."""
    found = {alias.asname: alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names if alias.asname}

    class Named(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: N802  (the name that ast gives it)
            return ast.copy_location(ast.parse(found[node.id], mode="eval").body, node) if node.id in found else node

    return Named().visit(tree)


def faults(tree: ast.AST) -> Iterator[str]:
    """Everything in a module that could run what a file or a message says."""
    for node in ast.walk(unaliased(tree)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"import {module}" for module in modules if module.split(".")[0] in MODULES)
        if isinstance(node, ast.ImportFrom):  # under its own name nobody would see what is called
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            whole |= {item for item in UNSAFE | SHELLS | TEMPORARY if f"{node.module}.*" in whole and item.rpartition(".")[0] == node.module}
            yield from (f"from {item.rpartition('.')[0]} import {item.rpartition('.')[2]}" for item in sorted(whole & (UNSAFE | SHELLS | TEMPORARY)))
        if isinstance(node, ast.Attribute) and name(node) in UNSAFE - {"torch.load", "yaml.load"}:
            yield name(node)
        if (
            isinstance(node, ast.keyword)
            and node.arg in ("shell", "allow_pickle", "trust_remote_code")
            and not (isinstance(node.value, ast.Constant) and not node.value.value)
        ):
            yield f"{node.arg}={ast.unparse(node.value)}"
        if not isinstance(node, ast.Call):
            continue
        called = name(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        last = called.rpartition(".")[2]
        if called in ("eval", "exec", "compile", "__import__") and isinstance(node.func, ast.Name):
            yield called
        if called.split(".")[0] in MODULES or called in SHELLS or called in TEMPORARY or last in OBJECTS or last in ARCHIVES:
            yield called if called.split(".")[0] in MODULES or called in SHELLS or called in TEMPORARY else last
        if called == "torch.load" and ast.unparse(given.get("weights_only", ast.Constant(None))) != "True":
            yield "torch.load without weights_only=True"
        if last == "create_subprocess_shell":
            yield last
        if last == "TCPStore" and node.args and ast.unparse(node.args[0]) in ("''", "'0.0.0.0'", "'::'"):
            yield f"{last} on every interface"
        if called == "yaml.load":
            yield "yaml.load"
        if called in ("np.load", "numpy.load") and "allow_pickle" not in given:
            yield "np.load without allow_pickle=False"
        if last == "from_pretrained" and "trust_remote_code" not in given:
            yield "from_pretrained without trust_remote_code=False"
        if called.startswith("subprocess.") and node.args and not _is_list(node.args[0]):
            yield f"{called} of {ast.unparse(node.args[0])}, which is no list of words"
        if (
            last == "collective_rpc"
            and node.args
            and not (isinstance(node.args[0], ast.Constant) or re.fullmatch(r"method|[A-Z_]+", ast.unparse(node.args[0])))
        ):
            yield f"collective_rpc of {ast.unparse(node.args[0])}, which is no name: a function travels as a pickle"
        if (
            last in ("bind", "create_server")
            and node.args
            and isinstance(node.args[0], ast.Tuple)
            and ast.unparse(node.args[0].elts[0]) in ("''", "'0.0.0.0'", "'::'")
        ):
            yield f"{last} on every interface"


def _is_list(node: ast.AST) -> bool:
    """A list of words, or something made of one: a call (``command(...)``, but not ``"...".format(...)``), a name: what it holds is not followed."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Constant):
        return False
    return isinstance(node, ast.List | ast.Tuple | ast.Call | ast.Name | ast.Starred) or (isinstance(node, ast.BinOp) and _is_list(node.left))


def found_in(path: Path) -> set[tuple[str, str]]:
    where = path.relative_to(ROOT).as_posix()
    found = set(faults(ast.parse(path.read_text(), str(path))))
    return {(where, fault) for fault in found if not (fault in OBJECTS and where.startswith(EXCHANGE))}


def test_nothing_runs_what_a_file_says() -> None:
    found = {fault for path in sources() for fault in found_in(path)}
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set(), "a reason for what is gone"


CONTROLS = {
    "import pickle": "import pickle",
    "from cloudpickle import dumps": "import cloudpickle",
    "from os import system": "from os import system",
    "from torch import load": "from torch import load",
    "from os import *": "from os import system",
    "import os as o; o.system(x)": "os.system",
    "import torch as t; t.load(f)": "torch.load without",
    "import subprocess as s; s.run('ls ' + x)": "no list of words",
    "import numpy as n; n.load(f)": "np.load without",
    "import pickle as p": "import pickle",
    "from subprocess import getoutput as ask": "from subprocess import getoutput",
    "asyncio.create_subprocess_shell(x)": "create_subprocess_shell",
    "subprocess.run('ls {}'.format(x))": "which is no list of words",
    "TCPStore('0.0.0.0', 1, 1, True)": "TCPStore on every interface",
    "torch.load(f)": "torch.load without",
    "torch.load(f, weights_only=False)": "torch.load without",
    "np.load(f)": "np.load without",
    "np.load(f, allow_pickle=True)": "allow_pickle=True",
    "yaml.load(f, Loader=yaml.Loader)": "yaml.load",
    "eval(text)": "eval",
    "exec(text)": "exec",
    "os.system(f'rm {name}')": "os.system",
    "subprocess.run(f'ls {name}', shell=True)": "shell=True",
    "subprocess.run(f'ls {name}')": "no list of words",
    "subprocess.Popen('ls')": "no list of words",
    "AutoModel.from_pretrained(f)": "from_pretrained without",
    "AutoModel.from_pretrained(f, trust_remote_code=True)": "trust_remote_code=True",
    "LLM(model, trust_remote_code=options.trust)": "trust_remote_code=options.trust",
    "llm.collective_rpc(function)": "no name",
    "dist.all_gather_object(a, b)": "all_gather_object",
    "socket.create_server(('', 0))": "every interface",
    "server.bind(('0.0.0.0', 0))": "every interface",
    "zipfile.ZipFile(f).extractall(g)": "extractall",
    "tempfile.mktemp()": "tempfile.mktemp",
}


@pytest.mark.parametrize("text", CONTROLS)
def test_what_would_be_refused(text: str) -> None:
    assert any(CONTROLS[text] in fault for fault in faults(ast.parse(text)))


@pytest.mark.parametrize(
    "text", ["torch.load(f, weights_only=True)", "np.load(f, allow_pickle=False)", "yaml.safe_load(f)", "subprocess.run(['ls', name])", "model.eval()"]
)
def test_what_is_not(text: str) -> None:
    assert list(faults(ast.parse(text))) == []


def shell_scripts() -> list[Path]:
    return sorted(path for path in (ROOT / "launch").iterdir() if path.suffix in (".sh", ".slurm"))


@pytest.mark.parametrize("script", shell_scripts(), ids=lambda path: path.name)
def test_shell_scripts_quote_what_they_are_given(script: Path) -> None:
    """No variable outside double quotes, where a space or a star in a path would become words; no eval."""
    lines = script.read_text().splitlines()
    end = next((number for number, line in enumerate(lines) if line.strip() == "'''"), len(lines))
    for number, line in enumerate(lines[:end], 1):
        if line.startswith("#"):
            continue
        code = re.sub(r"(?<!\\)\x27[^\x27]*\x27", "", line)
        assert not re.search(r"\beval\b|`", code), f"{script.name}:{number}: {line}"
        outside = re.sub(r'"\$(\w|@|\{[^}"]*\})+"', "", code)  # inside out: a command in quotes may have quotes of its own
        outside = re.sub(r'"\$\([^()]*\)"', "", outside)
        outside = re.sub(r'"(?:[^"\\]|\\.)*"', "", outside)
        assignment = re.fullmatch(r"\s*(export |local )?[A-Za-z_]+=(\S*|\$\([^$`]*\))", outside)  # the shell splits nothing there
        assert assignment or not re.search(r"\$[A-Za-z_@*{(]", outside), f"{script.name}:{number}: unquoted: {line}"


def test_options_with_spaces_stars_and_semicolons_arrive_whole(tmp_path: Path) -> None:
    """The words of the command line reach Python as they were given; nothing of them is run."""
    python = tmp_path / "my python"
    python.write_text(f'#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done > "{tmp_path}/said"\n')
    python.chmod(0o755)
    words = ["--out", f"a b;touch {tmp_path}/harm", "*", "$(touch harm)", "`touch harm`", "ü 名", ""]
    script = ROOT / "launch" / "qwen3_moe.sh"
    subprocess.run(["bash", str(script), *words], env={"PYTHON": str(python), "PATH": "/usr/bin:/bin"}, cwd=tmp_path, check=True, timeout=30)
    assert (tmp_path / "said").read_text().split("\n")[1:-1] == words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my python", "said"]


def in_folder(folder: Path, act: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as refused:
        act()
    assert str(folder) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_checkpoint_that_brings_code(tmp_path: Path, file: str) -> None:
    """The code would write a file; nothing does, and the folder is refused by every door."""
    import json

    from killed_saves import SMALL, tensors

    from tio_megatron.checkpoint import Checkpoint, write_checkpoint
    from tio_megatron.verify.doctor.models import model_of
    from tio_megatron.verify.recorders.hf import load_hf

    folder = tmp_path / "m"
    write_checkpoint(folder, SMALL, tensors(0))
    held = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(held | {"auto_map": {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"}}))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'harm')!r}, 'w')\n")
    for act in (lambda: Checkpoint(folder), lambda: model_of(str(folder)), lambda: load_hf(folder)):
        assert f"{file}: auto_map names Python code of the folder" in in_folder(folder, act)
    assert not (tmp_path / "harm").exists()
