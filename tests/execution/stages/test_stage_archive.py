"""What an archive of a stage may hold: plain data, and a graph that torch knows."""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxpart.errors import SpecError
from fxpart.execution.stages.stage_files import STAGES_FILE, load_stage, save_stages
from tests.execution.pipeline_scene import skips, skips_inputs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return saved stages that a test may change."""
    save_stages(skips(), tmp_path / "stages", skips_inputs(1)[0])
    return tmp_path / "stages"


def _sealed(folder: Path) -> None:
    """Let the description agree with the changed archive, as a forger would."""
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


@pytest.mark.parametrize(
    ("change", "content"),
    [
        (_pickled_inputs, "data/sample_inputs/model.pt"),
        (_pickled_weight, "second.weight"),
        (_compiled_code, "data/aotinductor/model/model.so"),
        (_old_layout, "no graph as JSON"),
    ],
)
def test_archives_with_more_than_plain_data_are_refused(
    folder: Path, change: Callable[[dict[str, bytes]], None], content: str
) -> None:
    _rewritten(folder, change)
    with pytest.raises(SpecError, match=f"holds {content}, which is not read"):
        load_stage(folder, 1)


def test_a_graph_that_torch_does_not_know(folder: Path) -> None:
    def unknown(entries: dict[str, bytes]) -> None:
        name = "stage_1/models/model.json"
        entries[name] = entries[name].replace(b"aten.linear", b"aten.linearly")

    _rewritten(folder, unknown)
    with pytest.raises(SpecError, match="save the stages again with this version") as raised:
        load_stage(folder, 1)
    assert "\n" not in str(raised.value)
