"""Small models, with a symbolic batch or as a training step, for two processes to run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves, tree_map

from fxpart.capture.batch_dim.analyze import BatchDimReport, analyze_batch_dims, input_batch_dims
from fxpart.capture.inference.export import quiet
from fxpart.capture.models.build import BuiltModel, build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import joint_capture

__all__ = ["CASES", "SPECS", "Case", "make_case"]

CPU = torch.device("cpu")
BATCH = 6
"""Examples in the whole batch; no other size in the models is 6 or 3."""

SPECS = {
    "gpt2": ModelSpec(
        "gpt2",
        architecture="GPT2LMHeadModel",
        config={
            "n_layer": 2,
            "n_embd": 32,
            "n_head": 4,
            "vocab_size": 101,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        batch_size=BATCH,
        seq_len=10,
    ),
    "bert": ModelSpec(
        "bert",
        architecture="BertForMaskedLM",
        config={
            "vocab_size": 101,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 32,
        },
        batch_size=BATCH,
        seq_len=10,
    ),
    "resnet": ModelSpec(
        "resnet",
        architecture="ResNetForImageClassification",
        config={
            "num_channels": 5,
            "embedding_size": 8,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 2, 1, 1],
            "layer_type": "bottleneck",
            "num_labels": 10,
        },
        batch_size=BATCH,
    ),
    "dlrm": ModelSpec(
        "dlrm",
        factory="fxpart.capture.models.dlrm:dlrm",
        factory_args={
            "embedding_dim": 8,
            "max_rows": 40,
            "pooling": 2,
            "bottom": [16, 12],
            "top": [32, 16],
        },
        batch_size=BATCH,
    ),
}


@dataclass(frozen=True, eq=False, slots=True)
class Case:
    """A graph to run on the whole batch, and one to run on the examples of one process."""

    whole: fx.GraphModule
    local: fx.GraphModule
    """The same graph if the batch is symbolic, else one captured with fewer examples."""
    report: BatchDimReport
    inputs: list[Any]
    """Values of the placeholders of `whole`."""
    dims: list[int | None]
    """The batch dimension of each input."""

    def part(self, rank: int, world: int) -> list[Any]:
        """Return the inputs of process `rank` of `world`: its examples and all other values."""
        return [
            x if dim is None else x.chunk(world, dim)[rank].contiguous()
            for x, dim in zip(self.inputs, self.dims, strict=True)
        ]


def _random_model(spec: ModelSpec) -> BuiltModel:
    """Return the model with no weight equal to 0 or 1, so that no rule is right by chance."""
    torch.manual_seed(0)
    built = build_model(spec, CPU)
    with torch.no_grad():
        for tensor in [*built.module.parameters(), *built.module.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.2 + 0.05)
    return built


def _inputs(program: ExportedProgram, built: BuiltModel) -> list[Any]:
    user_inputs = iter(tree_leaves((built.args, built.kwargs)))
    inputs: list[Any] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            inputs.append(next(user_inputs))
        else:
            name = str(spec.target)
            value = program.state_dict.get(name, program.constants.get(name))
            inputs.append(value.detach().clone() if isinstance(value, Tensor) else value)
    return inputs


def _case(whole: ExportedProgram, local: ExportedProgram, built: BuiltModel) -> Case:
    report, dims = analyze_batch_dims(whole), input_batch_dims(whole)
    return Case(
        whole.graph_module,
        local.graph_module,
        report,
        _inputs(whole, built),
        [dims.get(spec.arg.name) for spec in whole.graph_signature.input_specs],
    )


def symbolic_case(spec: ModelSpec) -> Case:
    """Return the inference of a model with a symbolic batch."""
    built = _random_model(spec)
    batch = Dim("batch", min=2, max=64)
    shapes: Any = tree_map(lambda _: {0: batch}, (built.args, built.kwargs))
    dynamic = shapes[0] or shapes[1]
    with quiet(), torch.no_grad():
        program = torch.export.export(
            built.module, built.args, built.kwargs, dynamic_shapes=dynamic, strict=False
        )
    return _case(program, program, built)


def static_case(spec: ModelSpec, world: int = 2) -> Case:
    """Return the inference of a model captured for the whole batch and for a part of it."""
    built = _random_model(spec)
    whole, local = (_export(built, size) for size in (BATCH, BATCH // world))
    return _case(whole, local, built)


def _export(built: BuiltModel, size: int) -> ExportedProgram:
    with quiet(), torch.no_grad():
        return torch.export.export(built.module, *_first_examples(built, size), strict=False)


def training_case(spec: ModelSpec, world: int = 2) -> Case:
    """Return a training step captured for the whole batch and for a part of it."""
    built = _random_model(spec)
    built.module.eval()
    whole, local = (
        joint_capture(built.module, *_first_examples(built, size)).program
        for size in (BATCH, BATCH // world)
    )
    return _case(whole, local, built)


def _first_examples(built: BuiltModel, size: int) -> tuple[Any, Any]:
    args, kwargs = tree_map(lambda tensor: tensor[:size].clone(), (built.args, built.kwargs))
    return args, kwargs


_KINDS: dict[str, Callable[[ModelSpec], Case]] = {
    "batch symbolic": symbolic_case,
    f"batch {BATCH}": static_case,
    "training": training_case,
}
CASES = tuple(f"{name}, {kind}" for kind in _KINDS for name in SPECS)
"""Names of the cases: the model and how it is captured."""


def make_case(name: str) -> Case:
    """Return the case called `name` in `CASES`."""
    model, _, kind = name.partition(", ")
    return _KINDS[kind](SPECS[model])
