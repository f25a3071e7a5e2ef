"""`ModelSpec`: a model and its inputs as plain data. Does not import torch.

A warm start needs only a spec: `ModelSpec.key` identifies a captured graph on disk without building
the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxpart.capture.models.factory_source import factory_digest, split_factory
from fxpart.core.phases import CACHED_STEPS
from fxpart.errors import SpecError, nearest_names
from fxpart.support.host import installed_version

__all__ = [
    "AUTOCAST",
    "DEFAULT_SEQ_LEN",
    "DTYPES",
    "ENGINES",
    "LIBRARIES",
    "LOSSES",
    "ModelSpec",
    "library_spec",
]

LOSSES = ("own", "mean")
"""Losses of a training step, besides a function of the user's."""

ENGINES = ("torch", "megatron")
"""``torch``: the model's own Python. ``megatron``: the fused kernels of Megatron-LM, and what they
save (`fxpart.sharding.megatron`)."""

_USUAL: Mapping[str, object] = {
    "tensor_parallel": 1,
    "sequence_parallel": False,
    "loss_parallel": False,
    "expert_parallel": 1,
    "expert_imbalance": 1.0,
    "context_parallel": 1,
    "engine": "torch",
    "autocast": None,
}
_MOST = 2**63 - 1
"""The largest size of a tensor."""
_FACTORIES = {
    "timm": "fxpart.capture.models.timm_model:timm_model",
    "diffusers": "fxpart.capture.models.diffusers_model:diffusers_model",
}
"""The function that makes the models of a library, by its name."""
LIBRARIES = ("transformers", *_FACTORIES)
"""Libraries of models by name."""
_LOSS = "model.loss"
DEFAULT_SEQ_LEN = 512
"""Most tokens of an input whose length is not stated."""
DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Valid dtypes of weights and real-valued inputs."""
AUTOCAST = ("bfloat16", "float16")
"""Valid dtypes of `ModelSpec.autocast`."""


def _plain(value: object, where: str) -> object:
    """Return `value` in JSON types: mappings as dicts, sequences as lists."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise SpecError(
        f"{where} is a {type(value).__name__}; give a number, a text, a list or a mapping"
    )


_MOST = 2**63 - 1


def _positive(value: object, where: str, otherwise: str = "") -> None:
    # True is an int in Python, but a mistake as a batch size.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{where}={value} must be a whole number, 1 or more{otherwise}")
    if value > _MOST:
        raise SpecError(f"{where}={value} must be at most {_MOST}, the largest size of a tensor")


def library_spec(library: str, architecture: str, config: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a `ModelSpec` for a model of one of `LIBRARIES` but transformers."""
    return {
        "factory": _FACTORIES[library],
        "factory_args": {"architecture": architecture, "config": config},
    }


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model and the shapes of its example inputs.

    Exactly one of `architecture` and `factory` is set.

    Raises:
        SpecError: if fields are invalid or contradict each other.

    """

    name: str
    """Name of the model in reports."""
    architecture: str | None = None
    """A transformers model class, such as ``LlamaForCausalLM``."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Overrides of the defaults in the architecture's configuration class."""
    factory: str | None = None
    """``package.module:function`` that returns the model and its example inputs."""
    factory_args: Mapping[str, object] = field(default_factory=dict)
    """Further keyword arguments of the factory."""
    batch_size: int = 1
    """Examples per batch."""
    seq_len: int | None = None
    """Tokens (or raw audio samples) per example; None for the model's default."""
    step: str | None = None
    """Serving step, one of `CACHED_STEPS`; None for a pass over whole inputs."""
    cache_len: int | None = None
    """Capacity of the cache of such a step in tokens; None for the length of the prompt."""
    dtype: str = "float32"
    """Dtype of weights and real-valued inputs, one of `DTYPES`."""
    autocast: str | None = None
    """Dtype of products under CUDA's `torch.autocast`, one of `AUTOCAST`; None without autocast."""
    tensor_parallel: int = 1
    """Number of devices that share every operator; the model is the part of one of them."""
    sequence_parallel: bool = False
    """Whether these also split, along the sequence, the operators between the shared layers."""
    loss_parallel: bool = False
    """Whether these compute the loss from shards of the logits."""
    expert_parallel: int = 1
    """Number of devices that hold some of the experts each and exchange tokens; likewise."""
    expert_imbalance: float = 1.0
    """Ratio of the tokens that such a device gets for its experts to an equal share."""
    context_parallel: int = 1
    """Number of devices that hold a piece of each sequence; `seq_len` is the whole length."""
    engine: str = "torch"
    """Engine that runs the model, one of `ENGINES`."""
    loss: str | None = None
    """Loss of a training step: ``own``, which the model computes from labels, then inputs of an
    architecture with such a loss; ``mean``, the mean of its outputs; or
    ``package.module:function``, called with the model's result and its inputs by name. None: the
    model is called without labels."""
    lora: Mapping[str, object] = field(default_factory=dict)
    """peft's adapters in a training step: ``rank``, ``alpha``, ``dropout`` and ``targets``. All
    other weights are frozen. Empty if all weights are trained."""
    depends_on: Sequence[str] = ()
    """Files that the factory reads, or imports by computed names; a list or a tuple."""

    def __post_init__(self) -> None:
        """Check every field and store plain copies of the mappings."""
        if (self.architecture is None) == (self.factory is None):
            state = "both are" if self.architecture is not None else "neither is"
            raise SpecError(
                f"model {self.name}: give architecture (a transformers class) or factory"
                f" (package.module:function), {state} set"
            )
        if self.factory is None and self.factory_args:
            raise SpecError(f"model {self.name}: factory_args need a factory; use config")
        if self.factory is None and self.depends_on:
            raise SpecError(f"model {self.name}: depends_on needs a factory; leave it out")
        files = self.depends_on
        if isinstance(files, str) or not all(isinstance(file, str) for file in files):
            raise SpecError(f"depends_on={files} must be a list of files")
        if self.architecture is None and self.config:
            raise SpecError(f"model {self.name}: config needs an architecture; use factory_args")
        named = ((self.factory, "factory"), (self.loss_function, _LOSS))
        for function, setting in named:
            if function is not None:
                split_factory(function, setting)
        _positive(self.batch_size, "model.batch_size")
        for degree in ("tensor_parallel", "expert_parallel", "context_parallel"):
            _positive(getattr(self, degree), degree)
        self._check_step()
        if self.engine not in ENGINES:
            raise SpecError(f"engine={self.engine}: {nearest_names(self.engine, ENGINES)}")
        if self.dtype not in DTYPES:
            raise SpecError(f"dtype={self.dtype} is not known; {nearest_names(self.dtype, DTYPES)}")
        self._check_autocast()
        for name in ("config", "factory_args", "lora"):
            object.__setattr__(self, name, _plain(getattr(self, name), name))
        object.__setattr__(self, "depends_on", tuple(files))

    def _check_step(self) -> None:
        if self.seq_len is not None:
            _positive(self.seq_len, "model.seq_len", ", or null for the model's own")
        if self.cache_len is not None:
            _positive(self.cache_len, "context_len", ", or null for that of the prompt")
        if self.step is not None and self.step not in CACHED_STEPS:
            raise SpecError(f"step={self.step}: {nearest_names(self.step, CACHED_STEPS)}")
        if self.step is not None and self.architecture is None:
            raise SpecError(
                f"phase={self.step} needs the cache of a transformers model, got "
                f"factory={self.factory}; let the factory return a model and inputs with their "
                "cache, named kv_cache_..., and use phase=inference"
            )

    def _check_autocast(self) -> None:
        if self.autocast is None:
            return
        setting = f"model.autocast={self.autocast}"
        if self.autocast not in AUTOCAST:
            raise SpecError(f"{setting} is not known; {nearest_names(self.autocast, AUTOCAST)}")
        against = {
            f"phase={self.step}": (self.step, f"model.dtype={self.autocast}"),
            "engine=megatron": (self.engine != "torch", "model.dtype=bfloat16"),
        }
        for other, (is_set, instead) in against.items():
            if is_set:
                raise SpecError(
                    f"{setting} applies to phase=training and phase=inference in PyTorch, got "
                    f"{other}; set {instead}, and leave out model.autocast"
                )

    @property
    def loss_function(self) -> str | None:
        """The user's function that computes the loss, if any."""
        return None if self.loss is None or self.loss in LOSSES else self.loss

    def key(self) -> dict[str, object]:
        """Return everything that determines the captured graph, in JSON types.

        That is all fields except the name, which only reports use, the version of transformers and,
        for a factory, its `factory_digest`: that of its module, of the user's modules imported by
        it, and of the content of the files in `depends_on`. The factory is not run, but the
        packages that contain its module are imported.

        Raises:
            SpecError: if transformers is not installed, or the factory's module or one of the files
                is not found.

        """
        aside = ("name", "depends_on")
        fields: dict[str, object] = {
            field: getattr(self, field) for field in self.__slots__ if field not in aside
        }
        for name, usual in _USUAL.items():  # defaults are left out of the key
            if fields[name] == usual:
                del fields[name]
        if self.lora:
            fields["peft"] = installed_version("peft")
        else:
            del fields["lora"]
        for library, factory in _FACTORIES.items():
            if self.factory == factory:
                fields[library] = installed_version(library)
        version = installed_version("transformers")
        if version is not None:
            fields["transformers"] = version
        elif self.factory is None:
            raise SpecError(
                f"architecture={self.architecture} needs transformers, which is not installed;"
                " pip install transformers, or give a factory"
            )
        if self.factory is not None:
            fields["factory_sha256"] = factory_digest(self.factory, self.depends_on)
        if self.loss_function is not None:
            fields["loss_sha256"] = factory_digest(self.loss_function, setting=_LOSS)
        return fields
