"""Save and load stages as files without pickle: `save_stages`, `load_stage`.

The folder contains ``stages.json``, which describes the stages, and a `torch.export` archive for
each: its graph as JSON, its weights as raw bytes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fxpart.errors import FxpartError, SpecError, one_line
from fxpart.execution.stages.chain import TiedName, tied_parameters
from fxpart.execution.stages.stage_archive import read_archive, stage_program, write_archive
from fxpart.support.json_file import read_document, what_is_wrong
from fxpart.support.regular_file import regular_status
from fxpart.support.whole_file import new_folder

if TYPE_CHECKING:
    from fxpart.execution.stages.chain import Chain

__all__ = [
    "STAGES_FILE",
    "LoadedStage",
    "SavedStage",
    "SavedStages",
    "TensorShape",
    "load_stage",
    "read_stages",
    "save_stages",
]

STAGES_FILE = "stages.json"
"""Name of the file that describes the stages."""
_SCHEMA = "fxpart.stages"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class TensorShape:
    """An input or output of a stage."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of torch's dtype, such as ``float32``."""
    requires_grad: bool
    """Whether it depends on trained weights, so that gradients flow through it."""


@dataclass(frozen=True, slots=True)
class SavedStage:
    """The entry of one stage in ``stages.json``."""

    file: str
    """Name of its archive, in the same folder."""
    sha256: str
    """Hex digest of the archive."""
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    libraries: tuple[str, ...]
    """Namespaces of its operators that are not torch's own."""


@dataclass(frozen=True, slots=True)
class SavedStages:
    """The content of ``stages.json``."""

    stages: tuple[SavedStage, ...]
    """Entries by stage index."""
    tied: tuple[tuple[TiedName, ...], ...]
    """Groups of names of one parameter, within a stage or across stages."""


@dataclass(frozen=True, eq=False, slots=True)
class LoadedStage:
    """A stage read from its file. Called with the tensors of `inputs`, it returns `outputs`."""

    index: int
    n_stages: int
    module: fx.GraphModule
    """Takes flat tensors and returns a tuple of tensors; trainable."""
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    tied: tuple[tuple[TiedName, ...], ...]
    """Groups of tied parameters across all stages, whose gradients the processes sum."""

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Run the stage, returning the inputs of the next stage or the results of the model.

        Raises:
            SpecError: if shapes differ from those the stage was cut for.

        """
        shapes = [tuple(value.shape) for value in values]
        if shapes != [expected.shape for expected in self.inputs]:
            expected = ", ".join(f"{tensor.name} {tensor.shape}" for tensor in self.inputs)
            raise SpecError(
                f"stage {self.index} takes {expected}, got shapes {', '.join(map(str, shapes))};"
                " give what the stage before returns, or save stages for these shapes"
            )
        outputs: tuple[Tensor, ...] = self.module(*values)
        return outputs

    def load_weights(self, weights: Mapping[str, Tensor]) -> "LoadedStage":
        """Copy the stage's part of `weights` into it, and return it.

        Names are those of the full model's ``state_dict``, which may include weights of other
        stages. Values are converted to the dtypes, and moved to the devices, of the stage. Missing
        buffers keep their values.

        Raises:
            SpecError: if a parameter is missing, or a weight has another shape.

        """
        parameters = dict(self.module.named_parameters())
        own_tensors = {**dict(self.module.named_buffers()), **parameters}
        missing = [name for name in parameters if name not in weights]
        if missing:
            raise SpecError(
                f"stage {self.index} has {missing[0]}, which is not among the weights"
                f" ({len(missing)} of its {len(parameters)} are missing); give the state_dict of"
                " the whole model"
            )
        for name, tensor in own_tensors.items():
            if name in weights and weights[name].shape != tensor.shape:
                raise SpecError(
                    f"stage {self.index} has {name} of shape {tuple(tensor.shape)}, the weights"
                    f" have {tuple(weights[name].shape)}; give those of the model that was cut"
                )
        with torch.no_grad():
            for name, tensor in own_tensors.items():
                if name in weights:
                    tensor.copy_(weights[name])
        return self


def save_stages(chain: "Chain", folder: str | Path, example_inputs: Sequence[Tensor]) -> None:
    """Write every stage of `chain` into `folder`, atomically.

    Stages are written for the shapes of `example_inputs`, the inputs of stage 0, whose values are
    not used. A folder that already contains stages is replaced.

    Raises:
        SpecError: if stage 0 does not take these inputs, or the folder contains something else.
        CaptureError: if `torch.export` cannot describe a stage.
        CacheError: if the folder cannot be written.

    """
    input_names = chain.stages[0].inputs
    if len(input_names) != len(example_inputs):
        raise SpecError(
            f"the first stage takes {len(input_names)} tensors ({', '.join(input_names)}), got"
            f" {len(example_inputs)}; give those of Chain.flat_inputs"
        )
    with new_folder(Path(folder), STAGES_FILE) as new:
        values, saved = tuple(value.detach() for value in example_inputs), []
        for stage in chain.stages:
            program = stage_program(stage.module, values, f"stage {stage.index}")
            file = new / f"stage_{stage.index}.pt2"
            write_archive(program.exported, file)
            saved.append(
                SavedStage(
                    file.name,
                    _digest(file),
                    _shapes(stage.inputs, values),
                    _shapes(stage.outputs, program.results),
                    program.libraries,
                )
            )
            values = program.results
        document = {
            "schema": _SCHEMA,
            "version": _VERSION,
            **asdict(SavedStages(tuple(saved), tied_parameters(chain))),
        }
        (new / STAGES_FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _shapes(names: Sequence[str], values: Sequence[Tensor]) -> tuple[TensorShape, ...]:
    return tuple(
        TensorShape(
            name,
            tuple(value.shape),
            str(value.dtype).removeprefix("torch."),
            value.requires_grad,
        )
        for name, value in zip(names, values, strict=True)
    )


def _digest(path: Path) -> str:
    regular_status(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_stages(folder: str | Path) -> SavedStages:
    """Return the content of ``stages.json`` in `folder`.

    Raises:
        SpecError: if the file is missing, damaged, of another kind, or newer than this code.

    """
    path = Path(folder) / STAGES_FILE
    document = read_document(path, _SCHEMA, _VERSION)
    try:
        stages = tuple(_saved_stage(entry) for entry in document["stages"])
        if not stages:
            raise ValueError("it has no stages")
        tied = tuple(
            tuple(_tied_name(name, len(stages)) for name in group) for group in document["tied"]
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SpecError(f"{path} is damaged ({what_is_wrong(error)}); save it again") from error
    return SavedStages(stages, tied)


def _saved_stage(entry: Mapping[str, Any]) -> SavedStage:
    file = str(entry["file"])
    if Path(file).name != file:
        raise ValueError(f"file {file!r} is not in the folder")
    return SavedStage(
        file,
        str(entry["sha256"]),
        tuple(_tensor_shape(tensor) for tensor in entry["inputs"]),
        tuple(_tensor_shape(tensor) for tensor in entry["outputs"]),
        tuple(str(name) for name in entry["libraries"]),
    )


def _tensor_shape(entry: Mapping[str, Any]) -> TensorShape:
    if not isinstance(getattr(torch, entry["dtype"], None), torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is not a torch dtype")
    return TensorShape(
        str(entry["name"]),
        tuple(int(n) for n in entry["shape"]),
        entry["dtype"],
        bool(entry["requires_grad"]),
    )


def _tied_name(entry: Sequence[Any], n_stages: int) -> TiedName:
    stage, name = entry
    if type(stage) is not int or not 0 <= stage < n_stages:
        raise ValueError(f"a tied parameter in stage {stage!r} of {n_stages}")
    return stage, str(name)


def load_stage(folder: str | Path, index: int) -> LoadedStage:
    """Return stage `index`, which computes bit for bit what the saved one did.

    Only its own archive is read. Tied parameters are one object again, so that their gradients
    accumulate.

    Nothing is unpickled: an archive with pickled data is refused before torch opens it. Sample
    inputs, weights of tensor subclasses and non-tensor constants would be pickled, and
    `torch.export.load` would unpickle them without restriction; `save_stages` writes none of them.
    Still, the graph decides which operators of torch run, and torch parses its expressions of
    symbolic sizes with sympy: only load stages from people you trust.

    Raises:
        SpecError: if the stage or a file is missing, or a file is damaged or newer than this code
            or the installed torch.

    """
    saved = read_stages(folder)
    if not 0 <= index < len(saved.stages):
        raise SpecError(
            f"there is no stage {index} in {folder}; there are stages 0 to {len(saved.stages) - 1}"
        )
    stage = saved.stages[index]
    path = Path(folder) / stage.file
    _refuse_damage(path, stage.sha256)
    try:
        module = read_archive(path, stage.libraries)
        for group in saved.tied:
            _tie(module, [name for owner, name in group if owner == index])
    except FxpartError:
        raise
    except Exception as error:  # torch may raise anything for another version's archive
        raise SpecError(
            f"torch {torch.__version__} cannot read {path} ({one_line(error)}); save the stages"
            " again with this version"
        ) from error
    return LoadedStage(index, len(saved.stages), module, stage.inputs, stage.outputs, saved.tied)


def _refuse_damage(path: Path, expected: str) -> None:
    try:
        digest = _digest(path)
    except FileNotFoundError:
        raise SpecError(f"there is no file {path}; save the stages again") from None
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from error
    if digest != expected:
        raise SpecError(
            f"{path} is damaged (its SHA-256 is not the one in {STAGES_FILE}); save the stages"
            " again"
        )


def _tie(module: fx.GraphModule, names: Sequence[str]) -> None:
    """Make the parameters with these names one object."""
    for name in names[1:]:
        home, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(home), leaf, module.get_parameter(names[0]))
