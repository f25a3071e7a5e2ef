"""Export a stage, and write and read it as a `torch.export` archive without pickle."""

import importlib
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram

from fxpart.capture.inference.export import quiet
from fxpart.capture.training.user_functions import functions_called
from fxpart.errors import CacheError, CaptureError, SpecError, one_line

__all__ = ["StageProgram", "read_archive", "stage_program", "write_archive"]

_TORCH_NAMESPACES = frozenset(
    {"aten", "prim", "prims", "higher_order", "quantized", "_c10d_functional"}
)
# Modules that register the operators of a namespace when imported.
_HOMES = {
    "fxpart": "fxpart.capture.models.fused_attention",
    "transformers": "transformers.integrations.moe",
    "torchvision": "torchvision",
}
_PLAIN = frozenset({"", ".data", "models", "data/weights", "data/constants", "data/sample_inputs"})
"""Folders of an archive without code; weights and constants are listed in a JSON file."""


@dataclass(frozen=True, eq=False, slots=True)
class StageProgram:
    """An exported stage."""

    exported: ExportedProgram
    results: tuple[Tensor, ...]
    """Empty tensors like its results, requiring gradients where the results do."""
    libraries: tuple[str, ...]
    """Namespaces of its operators that are not torch's own, sorted."""


def stage_program(module: fx.GraphModule, values: Sequence[Tensor], what: str) -> StageProgram:
    """Return `module` exported for inputs like `values`, without running it.

    An input that requires a gradient depends on weights of an earlier stage.

    Raises:
        CaptureError: if torch cannot export it. `what` names the stage in the message.

    """
    try:
        # With gradients enabled, the model's ``no_grad`` regions are kept.
        with quiet(), torch.enable_grad():
            inputs = tuple(value.detach() for value in values)
            exported = torch.export.export(module, inputs, strict=False)
    # Export runs the model's code, which may raise anything.
    except Exception as error:
        raise CaptureError(
            f"{what} cannot be written as a file: torch.export says {one_line(error)}; cut so that"
            " it can be exported"
        ) from error
    functions = functions_called(exported.graph_module)
    if functions:
        raise CaptureError(
            f"{what} cannot be written as a file: it applies {', '.join(functions)}, a"
            " torch.autograd.Function, whose backward is code that a file does not hold; run the"
            " plan in this process (execute=local)"
        )
    # Example inputs would be pickled.
    exported.example_inputs = None
    return StageProgram(
        exported, _results(exported, values, what), _libraries(exported.graph_module)
    )


def _results(exported: ExportedProgram, values: Sequence[Tensor], what: str) -> tuple[Tensor, ...]:
    """Return the results of a run without data, which shows what requires gradients."""
    module = exported.module(check_guards=False)
    with quiet(), torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        # Cloned, since the stage may write into an input and autograd forbids writes into a leaf.
        fakes = [
            mode.from_tensor(value.detach()).requires_grad_(value.requires_grad).clone()
            for value in values
        ]
        returned = module(*fakes)
    for value in returned:
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"{what} passes on {value!r}, which is not a tensor; cut where only tensors are"
                " passed on"
            )
    return tuple(
        torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=value.device
        ).requires_grad_(value.requires_grad)
        for value in returned
    )


def _libraries(module: fx.GraphModule) -> tuple[str, ...]:
    names = {
        node.target.namespace
        for inner in module.modules()
        if isinstance(inner, fx.GraphModule)
        for node in inner.graph.nodes
        if isinstance(node.target, OpOverload)
    }
    return tuple(sorted(names - _TORCH_NAMESPACES))


def write_archive(exported: ExportedProgram, path: Path) -> None:
    """Write a program as an archive; `path` ends in ``.pt2``.

    Raises:
        CaptureError: if something in it can only be pickled.
        CacheError: if it cannot be written.

    """
    try:
        with quiet():
            torch.export.save(exported, path)
    except RuntimeError as error:
        raise CacheError(
            f"cannot write {path} ({one_line(error)}); give a folder that has room"
        ) from error
    pickled = _pickled(path)
    if pickled:
        raise CaptureError(
            f"{path.stem} holds {pickled}, which can only be pickled; leave tensor subclasses and"
            " script objects out of the model"
        )


def read_archive(path: Path, libraries: Sequence[str]) -> fx.GraphModule:
    """Return the module in an archive, without its checks of input shapes.

    Raises:
        SpecError: if the archive contains pickled data, or needs a missing library.

    """
    pickled = _pickled(path)
    if pickled:
        raise SpecError(
            f"{path} holds {pickled}, which is not read, because it is not plain data; save it "
            "again"
        )
    for name in libraries:
        _register(name, path)
    with quiet():
        exported = torch.export.load(path)
        module = exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return module


def _register(library: str, path: Path) -> None:
    """Import the module that registers the operators of `library`."""
    home = _HOMES.get(library)
    if home is None:  # a file must not choose the modules to import
        return
    try:
        importlib.import_module(home)
    except ImportError as error:
        raise SpecError(f"{path} has operators of {library}; pip install {library}") from error


def _pickled(path: Path) -> str:
    """Return the name of an archive entry that is not plain data, or an empty string."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        for entry in entries:
            # An archive has one top folder, named like the file.
            folder, _, name = entry.filename.partition("/")[2].rpartition("/")
            if folder not in _PLAIN or (name.endswith(".pt") and entry.file_size):
                return f"{folder}/{name}"
            if name.endswith("_config.json"):
                for payload_name, payload in json.loads(archive.read(entry))["config"].items():
                    if payload["use_pickle"] or payload["tensor_meta"] is None:
                        return str(payload_name)
        # Without a graph, torch would fall back to an old, pickled layout.
        if not any("/models/" in entry.filename for entry in entries):
            return "no graph as JSON"
        texts = [entry for entry in entries if entry.filename.endswith(".json")]
        documents = (json.loads(archive.read(text)) for text in texts)
        return next((code for document in documents for code in _code_in(document)), "")


# `torch.export.load` looks up the target of a node by any path from torch, torch.os.system among
# them, evaluates sizes as Python, and imports the modules named by structures. So all three are
# checked against allow-lists.

_OPERATOR = re.compile(
    r"torch\.ops\.(?P<space>\w+)\.(?!__)(?P<name>\w+)(?:\.(?!__)\w+)?"
    r"|torch\.sym_\w+|torch\._sym_\w+|math\.[a-z]\w*"
    r"|_operator\.(?:add|and_|eq|floordiv|ge|getitem|gt|le|lt|mod|mul|ne|neg|or_|pos|pow|sub|truediv)"
)
_WRAPPERS = frozenset(
    {
        "associative_scan",
        "auto_functionalized",
        "auto_functionalized_v2",
        "cond",
        "flex_attention",
        "map_impl",
        "out_dtype",
        "scan",
        "while_loop",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)
"""Higher-order operators that run part of the graph; others of their kind can call any function."""
_OF_FILES = frozenset({"aten.from_file", "aten.save"})
_FUNCTIONS = (
    "CeilDiv|CeilToInt|CleanDiv|FloatTrueDiv|FloorDiv|FloorToInt|Identity|IntTrueDiv|Max|Min|Mod"
    "|ModularIndexing|PythonMod|RoundToInt|ToFloat|TruncToFloat|TruncToInt|Where"
)
_SIZE = re.compile(
    rf"(?:[a-z]{{1,4}}\d+(?:\*\*\d(?![\d*]))?|\d{{1,19}}(?:\.\d+)?|(?:{_FUNCTIONS})(?=\()"
    r"|\*(?!\*)|[-+/(),<>=&|~ ])*"
)
"""Arithmetic of numbers and symbols such as ``2*u0 + 1``."""
_IMPORTS = ("__enum__", "default_factory_module")
_IDENTIFIER = re.compile(r"(?:[A-Za-z_]\w*)?", re.ASCII)
_PATH = re.compile(r"[^\"'\\\x00-\x1f\x7f\u0085\u2028\u2029]*")
_STRUCTURE = re.compile(r"(?:[\w\[\]{}\",:. ]|\\(?=[\\\"]))*", re.ASCII)
_WRITTEN = {
    "name": _IDENTIFIER,
    "as_name": _IDENTIFIER,
    "forward_arg_names": _IDENTIFIER,
    "parameter_name": _PATH,
    "buffer_name": _PATH,
    "tensor_constant_name": _PATH,
    "custom_obj_name": _PATH,
    "in_spec": _STRUCTURE,
    "out_spec": _STRUCTURE,
}
"""Text that torch writes into the module source that it generates and runs: names unquoted, paths
of parameters in quotes, and the argument names of structures."""


def _code_in(part: object) -> Iterator[str]:
    """Yield the parts of a JSON graph that could run anything but an operator."""
    if isinstance(part, list):
        for item in part:
            yield from _code_in(item)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key == "nodes":
                yield from (f"target {node['target']}" for node in value if not _is_operator(node))
            elif _runs(key, value):
                yield f"{'size' if key == 'expr_str' else key} {value}"
            yield from _code_in(value)


def _runs(key: str, value: object) -> bool:
    """Return whether a value would be evaluated, written into source, or imported."""
    if key == "expr_str":
        return not _SIZE.fullmatch(str(value))
    if key in _WRITTEN and not _all_match(_WRITTEN[key], value):
        return True
    # In a structure's layout: a class or function, by its module's name.
    return isinstance(value, str) and any(name in value for name in _IMPORTS)


def _all_match(pattern: re.Pattern[str], value: object) -> bool:
    """Return whether a string, or each string of a list, matches; `_code_in` checks the rest."""
    texts = value if isinstance(value, list) else [value]
    return all(pattern.fullmatch(text) for text in texts if isinstance(text, str))


def _is_operator(node: Mapping[str, object]) -> bool:
    match = _OPERATOR.fullmatch(str(node["target"]))
    if match is None or match["space"] is None:
        return match is not None
    if match["space"] == "export":  # it calls a class by name
        return False
    try:
        operator = getattr(getattr(torch.ops, match["space"]), match["name"])
    except AttributeError:
        return True  # torch reports that it is missing
    if isinstance(operator, HigherOrderOperator):
        return match["name"] in _WRAPPERS
    name = f"{match['space']}.{match['name']}"
    return isinstance(operator, OpOverloadPacket) and name not in _OF_FILES
