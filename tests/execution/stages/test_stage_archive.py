"""Allowed content of a stage archive: plain data, and a graph that torch knows."""

import hashlib
import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpart.errors import SpecError
from fxpart.execution.stages.stage_files import STAGES_FILE, load_stage, save_stages
from tests.execution.pipeline_scene import skips, skips_inputs


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return saved stages, to copy."""
    folder = tmp_path_factory.mktemp("saved") / "stages"
    save_stages(skips(), folder, skips_inputs(1)[0])
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return saved stages that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "stages"))


def _sealed(folder: Path) -> None:
    """Make the description agree with the changed archive, as a forger would."""
    document = json.loads((folder / STAGES_FILE).read_text())
    digest = hashlib.sha256((folder / "stage_1.pt2").read_bytes()).hexdigest()
    document["stages"][1]["sha256"] = digest
    (folder / STAGES_FILE).write_text(json.dumps(document))


def _rewritten(folder: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    path = folder / "stage_1.pt2"
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    _sealed(folder)


def _pickled_inputs(entries: dict[str, bytes]) -> None:
    buffer = io.BytesIO()
    torch.save((), buffer)
    entries["stage_1/data/sample_inputs/model.pt"] = buffer.getvalue()


def _pickled_weight(entries: dict[str, bytes]) -> None:
    name = "stage_1/data/weights/model_weights_config.json"
    config = json.loads(entries[name])
    config["config"]["second.weight"]["use_pickle"] = True
    entries[name] = json.dumps(config).encode()


def _compiled_code(entries: dict[str, bytes]) -> None:
    entries["stage_1/data/aotinductor/model/model.so"] = b""


def _old_layout(entries: dict[str, bytes]) -> None:
    entries.clear()
    entries["stage_1/version"] = b"8.8"


def _in_graph(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, bytes]], None]:
    """Return a change of an archive's graph from a `change` of its JSON."""

    def changed(entries: dict[str, bytes]) -> None:
        name = "stage_1/models/model.json"
        document = json.loads(entries[name])
        change(document["graph_module"])
        entries[name] = json.dumps(document).encode()

    return changed


CALL = "__import__('pathlib').Path('escaped').touch()"


def _evaluated_size(graph: dict[str, Any]) -> None:
    values = graph["graph"]["tensor_values"]
    values[next(iter(values))]["sizes"][0] = {"as_expr": {"expr_str": CALL, "hint": None}}


def _endless_size(graph: dict[str, Any]) -> None:
    values = graph["graph"]["tensor_values"]
    values[next(iter(values))]["sizes"][0] = {"as_expr": {"expr_str": "9**9**9**9", "hint": None}}


def _any_function(target: str) -> Callable[[dict[str, Any]], None]:
    def change(graph: dict[str, Any]) -> None:
        text = {"name": "command", "arg": {"as_string": "touch escaped"}, "kind": 1}
        graph["graph"]["nodes"][0] |= {"target": target, "inputs": [text]}

    return change


def _imported_structure(graph: dict[str, Any]) -> None:
    graph["module_call_graph"][0]["signature"] = {
        "in_spec": '[1, {"default_factory_module": "os"}]'
    }


def _named_argument(graph: dict[str, Any]) -> None:
    """Rename an input of the graph to text that ends the arguments of the generated function."""
    name = f"args_0=({CALL})"
    text = json.dumps(graph).replace('"args_0"', json.dumps(name))
    graph.clear()
    graph.update(json.loads(text))


def _parameter_path(graph: dict[str, Any]) -> None:
    specs = graph["signature"]["input_specs"]
    specs[0]["parameter"]["parameter_name"] = f'second.x")\n    {CALL}\n    ("'


def _keyword(graph: dict[str, Any]) -> None:
    signature = graph["module_call_graph"][0]["signature"]
    signature["forward_arg_names"] = [f"x=({CALL})"]


@pytest.mark.parametrize(
    ("change", "content"),
    [
        (_in_graph(_named_argument), "name args_0="),
        (_in_graph(_parameter_path), "parameter_name second.x"),
        (_in_graph(_keyword), "forward_arg_names"),
        (_pickled_inputs, "data/sample_inputs/model.pt"),
        (_pickled_weight, "second.weight"),
        (_compiled_code, "data/aotinductor/model/model.so"),
        (_old_layout, "no graph as JSON"),
        (_in_graph(_evaluated_size), f"size {CALL}"),
        (_in_graph(_endless_size), "size 9**9**9**9"),
        (_in_graph(_imported_structure), "in_spec"),
        *(
            (_in_graph(_any_function(target)), f"target {target}")
            for target in (
                "torch.os.system",
                "torch.load",
                "torch.ops.load_library",
                "torch.ops.load_library.__call__",
                "torch.ops.export.call_custom_autograd_function_in_pre_dispatch.default",
                "torch.ops.higher_order.call_torchbind",
                "torch.ops.aten.save",
                "torch.ops.aten.from_file.default",
                "_operator.methodcaller",
                "#anything",
            )
        ),
    ],
)
def test_archives_with_more_than_plain_data_are_refused(
    folder: Path, change: Callable[[dict[str, bytes]], None], content: str
) -> None:
    _rewritten(folder, change)
    with pytest.raises(SpecError, match=re.escape(f"holds {content}")):
        load_stage(folder, 1)


def test_an_unknown_graph_is_refused(folder: Path) -> None:
    def unknown(entries: dict[str, bytes]) -> None:
        name = "stage_1/models/model.json"
        entries[name] = entries[name].replace(b"aten.linear", b"aten.linearly")

    _rewritten(folder, unknown)
    with pytest.raises(SpecError, match="save the stages again with this version") as raised:
        load_stage(folder, 1)
    assert "\n" not in str(raised.value)
