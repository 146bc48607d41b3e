"""What SECURITY.md promises of the source, read from the source: nothing unpickled, nothing evaluated, no shell, no code of a checkpoint, no open port."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from source_walk import OBJECTS, faults

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tio_megatron", "collectives", "examples", "launch", "benchmarks")

PIPE = "the pipe between a process and the ranks it forks itself; nobody else holds an end of it"
OWN = "the training script named on the command line: the user's own, as after `python`"
BUILD = "the builder of the kernels, part of this source"
ALLOWED = {
    ("tio_megatron/testing/ranks.py", "import pickle"): PIPE,
    ("tio_megatron/testing/ranks.py", "pickle.loads"): PIPE,
    ("tio_megatron/testing/ranks.py", "pickle.dumps"): PIPE,
    ("tio_megatron/run.py", "runpy.run_path"): OWN,
    ("setup.py", "runpy.run_path"): BUILD,
    ("benchmarks/tracing.py", "apply_model"): "a measurement with an engine in this very process: nothing travels",
}
"""What would be refused, with the reason why it stands."""

EXCHANGE = ("tio_megatron/integrations/", "tio_megatron/jobs/", "tio_megatron/verify/ascend/", "examples/", "benchmarks/main_job.py")
"""Where ranks of one run may exchange plain values by torch's own means, which pickle; SECURITY.md says that ranks trust each other."""


def sources() -> list[Path]:
    found = {path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "_build" not in path.parts}
    return [*sorted(found), ROOT / "setup.py", ROOT / "launch" / "qwen3_moe.sh"]


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
    "subprocess.run(['sh', '-c', x])": "a shell",
    "subprocess.run(['env', 'A=1', '/bin/bash', '-ec', x])": "a shell",
    "words = ('bash', '-c', x)": "a shell",
    "os.execvp('sh', ['sh', '-c', x])": "os.execvp of a shell",
    "os.execl('/bin/sh', 'sh', '-c', x)": "os.execl",
    "os.posix_spawn('/bin/bash', words, {})": "os.posix_spawn of a shell",
    "builtins.eval(x)": "builtins.eval",
    "import builtins as b; b.exec(x)": "builtins.exec",
    "from builtins import eval as look": "from builtins import eval",
    "from torch.serialization import load": "from torch.serialization import load",
    "torch.serialization.load(f)": "torch.serialization.load",
    "multiprocessing.reduction.ForkingPickler.loads(x)": "loads",
    "from multiprocessing.reduction import ForkingPickler": "import ForkingPickler",
    "torch.load(f, weights_only=True, pickle_module=p)": "pickle_module=p",
    "pd.read_pickle(f)": "read_pickle",
    "from pandas import read_pickle": "import read_pickle",
    "opts['trust_remote_code'] = True": "trust_remote_code set to True",
    "config.trust_remote_code = given": "trust_remote_code set to given",
    "LLM(**{'trust_remote_code': True})": "trust_remote_code set to True",
    "EngineArgs(m, '--trust-remote-code')": "'--trust-remote-code' named",
    "os.environ['VLLM_ALLOW_INSECURE_SERIALIZATION'] = '1'": "INSECURE_SERIALIZATION' named",
    "os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'": "NO_WEIGHTS_ONLY_LOAD' named",
    "runpy.run_path(f)": "runpy.run_path",
    "from runpy import run_path": "from runpy import run_path",
    "importlib.util.spec_from_file_location('x', folder / 'a.py')": "spec_from_file_location",
    "importlib.machinery.SourceFileLoader('x', f)": "SourceFileLoader",
    "from importlib.util import spec_from_file_location": "import spec_from_file_location",
    "llm.collective_rpc(method=lambda w: 1)": "no name",
    "llm.apply_model(fn)": "apply_model",
    "host = '0.0.0.0'; s.bind((host, 0))": "'0.0.0.0' named",
    "s.bind(('::', 0))": "every interface",
    "HTTPServer(('', 8000), h)": "HTTPServer on every interface",
    "http.server.ThreadingHTTPServer(server_address=('', 8000), RequestHandlerClass=h)": "every interface",
    "socketserver.TCPServer(('', 1), h)": "TCPServer on every interface",
    "socket.create_server(address=('', 0))": "create_server on every interface",
    "asyncio.start_server(cb, '0.0.0.0', 1)": "'0.0.0.0' named",
    "asyncio.start_server(cb, None, 1)": "start_server on every interface",
    "asyncio.start_server(cb, host='', port=1)": "start_server on every interface",
    "make_server('', 8000, app)": "make_server on every interface",
    "socket_.bind('tcp://*:5555')": "'tcp://*:5555' named",
    "dist.TCPStore('localhost', 1, is_master=True)": "TCPStore without master_listen_fd",
    "dist.TCPStore('localhost', 1, None, master)": "TCPStore without master_listen_fd",
    "dist.TCPStore('localhost', 1, is_master=True, master_listen_fd=None)": "TCPStore without master_listen_fd",
}


@pytest.mark.parametrize("text", CONTROLS)
def test_what_would_be_refused(text: str) -> None:
    assert any(CONTROLS[text] in fault for fault in faults(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "torch.load(f, weights_only=True)",
        "np.load(f, allow_pickle=False)",
        "yaml.safe_load(f)",
        "subprocess.run(['ls', name])",
        "subprocess.run(['bash', script, name])",
        "subprocess.run([sys.executable, '-c', CODE])",
        "model.eval()",
        "dist.TCPStore(address, 1)",
        "dist.TCPStore(address, 1, None, False)",
        "dist.TCPStore(address, 1, None, True, master_listen_fd=fd)",
        "llm.collective_rpc('tio_digests', args=(function,))",
        "opts['trust_remote_code'] = False",
        "socket.create_server(('127.0.0.1', 0))",
        "signature.bind(self, *args)",
        "say('', None)",
    ],
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
    from tio_megatron.integrations.transformers_models.recorder import load_hf
    from tio_megatron.verify.doctor.models import model_of

    folder = tmp_path / "m"
    write_checkpoint(folder, SMALL, tensors(0))
    held = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(held | {"auto_map": {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"}}))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'harm')!r}, 'w')\n")
    for act in (lambda: Checkpoint(folder), lambda: model_of(str(folder)), lambda: load_hf(folder)):
        assert f"{file}: auto_map names Python code of the folder" in in_folder(folder, act)
    assert not (tmp_path / "harm").exists()
