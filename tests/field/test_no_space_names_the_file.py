"""Where the disk has no space, the message names the file, no draft is left, and no process dies without a word. A limit on the size of files stands for it."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tio_megatron.rollouts import Store

LIMITED = """
import json, resource, sys
from pathlib import Path
import numpy as np
import torch
from tio_megatron.files.whole import write_whole
from tio_megatron.verify.monitor.event_file import EventFile
from tio_megatron.verify.recording import Recording
from tio_megatron.traces.writer import TraceWriter, write_arrays

folder, tokens = Path(sys.argv[1]), [list(range(4096))]
writer = TraceWriter(folder / "trace", tokens, engine="x", shape={"layers": 1, "moe": [False], "tied": False}, keep=True)
events = EventFile(folder / "events")
cases = {
    "kept": lambda: writer.put("embed", torch.zeros(4096, 8), torch.arange(4096)),
    "events": lambda: events.add(1, {f"number {at}": 1.0 for at in range(9000)}),
    "arrays": lambda: write_arrays(folder / "rows.safetensors", {"rows": np.zeros(9000, dtype=np.int64)}),
    "recording": lambda: Recording.of(tokens, [1], [[-1.0] * 4095]).save(folder / "recording.npz"),
    "whole": lambda: write_whole(folder / "report.json", b"x" * 30000),
}
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
named = {}
for case, act in cases.items():
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, hard))
    try:
        act()
    except OSError as error:
        named[case] = [error.errno, error.filename]
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print(json.dumps(named))
"""

FILES = {
    "kept": "trace/values/embed.safetensors",
    "events": "events/events.out.tfevents.*",
    "arrays": "rows.safetensors",
    "recording": "recording.npz",
    "whole": "report.json",
}
"""What is written, and the file that must be named."""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_the_file_is_named_and_no_draft_is_left(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    named = json.loads(done.stdout)
    assert {case for case, (number, _) in named.items() if number == errno.EFBIG} == FILES.keys()
    wrong = {case: file for case, (_, file) in named.items() if not file or not Path(file).match(str(tmp_path / FILES[case]))}
    assert not wrong and not list(tmp_path.rglob(".*draft*"))


def test_what_a_killed_writer_left_is_no_part_of_a_store(tmp_path):
    from tio_megatron.files.whole import drafted

    with pytest.raises(KeyboardInterrupt), drafted(tmp_path / "store.json") as draft:
        draft.write_bytes(b"half")
        os.link(draft, name := tmp_path / draft.name.replace(str(os.getpid()), "1"))  # as of a process that is gone
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == [name.name]
    Store.create(tmp_path)
