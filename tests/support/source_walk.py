"""What could run what a file or a message says, or listen to anybody, found by walking a module's syntax tree. Names are read, values are not followed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list"}
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE = {
    "torch.load",
    "torch.serialization.load",
    "torch.jit.load",
    "torch.hub.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "yaml.Loader",
    "yaml.UnsafeLoader",
}
RUNNERS = {"builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__", "runpy.run_path", "runpy.run_module"}
FILES = {"spec_from_file_location", "SourceFileLoader", "ExtensionFileLoader", "SourcelessFileLoader"}
"""What imports a file of any path, by the last word of its name."""
PICKLERS = {"ForkingPickler", "read_pickle", "to_pickle"}
SWITCHES = {"VLLM_ALLOW_INSECURE_SERIALIZATION", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "--trust-remote-code", "--trust_remote_code"}
EVERYWHERE = re.compile(r"0\.0\.0\.0|\[::\]|(tcp://)?(\*|0\.0\.0\.0|\[?::\]?):[\d*]+")
"""What names every interface of a host, wherever it stands."""
ANYWHERE = ("", "*", "::", None)
"""What names every interface where an address is expected."""
LISTENERS = {"bind", "create_server", "start_server", "HTTPServer", "ThreadingHTTPServer", "TCPServer", "UDPServer", "ThreadingTCPServer", "SimpleXMLRPCServer"}
LISTENERS |= {"ThreadingUDPServer", "WSGIServer", "make_server", "TCPSite", "BaseManager", "Listener"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "os.execl", "os.spawnl", "commands.getoutput"}
TEMPORARY = {"tempfile.mktemp", "os.tempnam", "os.tmpnam"}
ARCHIVES = {"extractall", "extract", "unpack_archive"}


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
            yield from (f"from {node.module} import {alias.name}" for alias in node.names if alias.name in PICKLERS | FILES)
            whole |= {item for item in UNSAFE | SHELLS | TEMPORARY | RUNNERS if f"{node.module}.*" in whole and item.rpartition(".")[0] == node.module}
            yield from (f"from {item.rpartition('.')[0]} import {item.rpartition('.')[2]}" for item in sorted(whole & (UNSAFE | SHELLS | TEMPORARY | RUNNERS)))
        if isinstance(node, ast.Attribute) and name(node) in UNSAFE - {"torch.load", "yaml.load"}:
            yield name(node)
        if (
            isinstance(node, ast.keyword)
            and node.arg in ("shell", "allow_pickle", "trust_remote_code", "pickle_module")
            and not (isinstance(node.value, ast.Constant) and not node.value.value)
        ):
            yield f"{node.arg}={ast.unparse(node.value)}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (node.value in SWITCHES or EVERYWHERE.fullmatch(node.value)):
            yield f"{node.value!r} named"
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Dict):
            yield from _settings(node)
        if isinstance(node, ast.List | ast.Tuple) and _is_shell(node):
            yield f"{ast.unparse(node)}: a shell"
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
        if called in RUNNERS or last in FILES or last in PICKLERS or any(word in PICKLERS for word in called.split(".")):
            yield called if called in RUNNERS else last
        if last == "apply_model":
            yield last
        if last in LISTENERS:
            yield from (f"{last} on every interface" for address in _addresses(node) if isinstance(address, ast.Constant) and address.value in ANYWHERE)
        if last == "TCPStore" and _is_master(node, given) and ast.unparse(given.get("master_listen_fd", ast.Constant(None))) == "None":
            yield "TCPStore without master_listen_fd, which listens on every interface"
        if called.startswith(("os.exec", "os.spawn", "os.posix_spawn")) and node.args and _words(node.args[0]) & SHELL_NAMES:
            yield f"{called} of a shell"
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
        asked = node.args[0] if node.args else given.get("method")
        if last == "collective_rpc" and asked is not None and not (isinstance(asked, ast.Constant) or re.fullmatch(r"method|[A-Z_]+", ast.unparse(asked))):
            yield f"collective_rpc of {ast.unparse(asked)}, which is no name: a function travels as a pickle"
        if (
            last in ("bind", "create_server")
            and node.args
            and isinstance(node.args[0], ast.Tuple)
            and ast.unparse(node.args[0].elts[0]) in ("''", "'0.0.0.0'", "'::'")
        ):
            yield f"{last} on every interface"


SHELL_NAMES = {"sh", "bash", "dash", "zsh", "ksh", "csh", "cmd", "cmd.exe", "powershell", "pwsh"}


def _words(node: ast.AST) -> set[str]:
    """The file's name of a text, if it is one."""
    return {node.value.rpartition("/")[2]} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def _is_shell(node: ast.List | ast.Tuple) -> bool:
    """``["sh", "-c", ...]``, also with more options or behind ``env``: a shell that is given a line to read."""
    words = [_words(item) for item in node.elts]
    shells = [place for place, word in enumerate(words) if word & SHELL_NAMES]
    lines = [place for place, word in enumerate(words) if any(re.fullmatch(r"-[a-z]*c|/c|-Command", each) for each in word)]
    return any(shell < line for shell in shells for line in lines)


def _settings(node: ast.Assign | ast.AnnAssign | ast.Dict) -> Iterator[str]:
    """``x["trust_remote_code"] = ...``, ``x.trust_remote_code = ...`` and the key in a dictionary, unless it is set to something false."""
    pairs: list[tuple[ast.AST | None, ast.AST | None]] = list(zip(node.keys, node.values, strict=True)) if isinstance(node, ast.Dict) else []
    if not isinstance(node, ast.Dict):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        pairs = [(target.slice if isinstance(target, ast.Subscript) else target, node.value) for target in targets]
    for key, value in pairs:
        said = {key.attr} if isinstance(key, ast.Attribute) else _words(key) if key is not None else set()
        if said & {"trust_remote_code"} and not (isinstance(value, ast.Constant) and not value.value):
            yield f"trust_remote_code set to {ast.unparse(value) if value is not None else 'nothing'}"


def _addresses(node: ast.Call) -> Iterator[ast.AST]:
    """Where a server is told to listen: an address pair, or a host as first or second argument or by name."""
    for given in [*node.args[:2], *(word.value for word in node.keywords if word.arg in ("address", "server_address", "host", "addr"))]:
        yield given.elts[0] if isinstance(given, ast.Tuple) and given.elts else given


def _is_master(node: ast.Call, given: dict[str | None, ast.expr]) -> bool:
    """``is_master``, the fourth argument of a ``TCPStore``, is given and not plainly False."""
    master = given.get("is_master", node.args[3] if len(node.args) > 3 else ast.Constant(False))
    return not (isinstance(master, ast.Constant) and not master.value)


def _is_list(node: ast.AST) -> bool:
    """A list of words, or something made of one: a call (``command(...)``, but not ``"...".format(...)``), a name: what it holds is not followed."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Constant):
        return False
    return isinstance(node, ast.List | ast.Tuple | ast.Call | ast.Name | ast.Starred) or (isinstance(node, ast.BinOp) and _is_list(node.left))
