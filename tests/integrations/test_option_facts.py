"""Names and defaults of the engines' options are the engines': the generated files are what their command would write again."""

import json
import os
import subprocess
import sys

import pytest

from tio_megatron.integrations.option_facts import FILES, FOLDER, made, options, written

SOURCES = {"megatron-lm": "MEGATRON_LM", "verl": "VERL"}


@pytest.mark.parametrize("engine", FILES)
def test_a_file_is_what_its_command_writes(engine):
    source = os.environ.get(SOURCES.get(engine, ""))
    if engine in SOURCES and not source:
        pytest.skip(f"{SOURCES[engine]} names no sources of {engine}: they are compared there only")
    there = (FOLDER / FILES[engine]).read_text()
    assert there.splitlines()[0].startswith(f'{{"made_by": "python -m tio_megatron.integrations.option_facts {engine}')
    if engine == "megatron-lm":  # its sources bring a megatron.core of their own
        command = "import sys; from tio_megatron.integrations.option_facts import made, written; print(written(made('megatron-lm', sys.argv[1])))"
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run([sys.executable, "-c", command, source], env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        here = done.stdout[done.stdout.index('{"made_by"') :].strip() + "\n"
    else:
        here = written(made(engine, source))
    assert here == there
    changed = json.loads(there)
    changed["defaults"]["hidden_dropout"] = 0.5
    assert written(changed) != there  # the control: another default is another file


def test_a_command_line_is_read_as_the_engines_parser_does():
    known = options("megatron-lm")
    assert known.flag("--num_layers") == known.flag("--num-layers") and known.flag("--num") is None
    assert known.spelled("add_bias_linear", False) == "--disable-bias-linear" and known.spelled("bf16", False) is None
    assert options("vllm").flag("-tp").name == "tensor_parallel_size" and options("vllm").flag("--no-enforce-eager").value is False
