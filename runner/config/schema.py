"""The configuration of a run: a dataclass for each section.

Hydra checks every file and override against these types.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from runner.config.device_schema import DevicesConfig, LinkConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "BUDGET",
    "COMPUTED_TIMES",
    "RECOMMEND",
    "AllReduceConfig",
    "CaptureConfig",
    "Config",
    "ExecuteConfig",
    "FinetuneConfig",
    "LatencyConfig",
    "ModeConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "PhaseConfig",
    "ReserveConfig",
    "ScheduleConfig",
    "Schema",
    "ServingSweepConfig",
    "TrackingConfig",
    "WeightsConfig",
    "sections_in",
]


BUDGET = "budget"
"""The checkpointing that recomputes as few blocks as possible."""
RECOMMEND = "recommend"
"""The mode that chooses a whole plan, including the mode that places it."""
RECOMMEND_OPTIONS = ("objective", "global_batch", "limits", "space")
"""Its options, which no other mode has."""
COMPUTED_TIMES = ("roofline", "kernels")
"""Sources of operator times that compute them for any device, rather than measure them on one."""


@dataclass  # not frozen: OmegaConf would refuse overrides of it
class TrackingConfig:
    """The tracker and its store."""

    name: str = "mlflow"
    """``mlflow`` or ``none``."""
    uri: str | None = None
    """Tracking URI of MLflow. None: the environment's ``MLFLOW_TRACKING_URI``, or else the sqlite
    file ``outputs/mlflow.db`` below the root."""
    experiment: str = "fxpart"


@dataclass
class ModelConfig:
    """The model: a transformers architecture with its configuration, or a function's result."""

    name: str = MISSING
    library: str = "transformers"
    """The library of `architecture`: ``transformers``, ``timm`` or ``diffusers``."""
    architecture: str | None = None
    """A class of transformers or diffusers, such as ``LlamaForCausalLM``, or a model of timm."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the architecture's configuration, with its defaults for the rest."""
    factory: str | None = None
    """``package.module:function`` that builds the model and its inputs."""
    factory_args: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 1
    seq_len: int | None = None
    dtype: str = "float32"
    autocast: str | None = None
    """Dtype of products under CUDA's `torch.autocast`, ``bfloat16`` or ``float16``, if any."""
    loss: str = "own"
    """The training loss: ``own``, computed by the model from labels as `Trainer` passes them, or
    the mean of the outputs if it takes none; ``mean``; or ``package.module:function``."""
    path: str | None = None
    """File of a published placement problem, placed instead of a model."""
    depends_on: list[str] = field(default_factory=list)
    """Files that affect what the factory builds, besides the modules that it imports."""


@dataclass
class OffloadConfig:
    """What to offload to tiers, and how: the fields of `fxpart.core.tiers.OffloadOptions`."""

    name: str = "auto"
    stream: bool = True
    overlap: bool = True
    on_host: bool = True
    host_bytes_per_s: float | None = None
    pinned_bytes: int | None = None
    pinned_share: float = 1.0
    pageable_share: float = 1.0
    copy_latency_s: float = 0.0
    cache: str = "auto"
    optimizer: str = "auto"
    activations: str = "auto"
    weights: str = "auto"
    source: str = ""


@dataclass
class LatencyConfig:
    """Source of operator times: a model's coefficients, or measurements."""

    name: str = MISSING
    source: str = "roofline"
    """``roofline`` with the coefficients below, ``kernels``, ``profiled``, ``calibrated`` or
    ``trace``; ``auto`` becomes ``kernels`` or ``roofline`` when the configuration is read."""
    compute_efficiency: float | None = 1.0
    """Share of all devices' peaks; None for those of `PoolConfig.efficiency`, likewise below."""
    bandwidth_efficiency: float | None = 1.0
    op_overhead_s: float = 0.0
    curves: dict[str, Any] = field(default_factory=dict)
    """For ``kernels``: coefficients by device family."""
    carries_curves: bool = True
    """For ``kernels``: whether devices without their own curves use another family's; otherwise
    they use the roofline."""
    tables: str | None = None
    """For ``kernels``: measured tables, which are interpolated: a folder, or ``aiconfigurator`` for
    the installed package."""
    file: str | None = None
    """For ``calibrated``: the calibration; None fits this model's own measurements. For ``trace``:
    the output of ``torch.profiler``."""
    device: str = "cpu"
    """The device measured: ``cpu`` or ``cuda``."""
    threads: int = 1
    repeats: int = 5
    """Number of runs of each kind of operator."""

    @property
    def is_computed(self) -> bool:
        """Whether times are computed for any device, rather than measured on one."""
        return self.source in COMPUTED_TIMES


@dataclass
class PhaseConfig:
    """The step of the model to capture."""

    name: str = "inference"
    """One of `fxpart.core.phases.PHASES`."""
    train_mode: bool = False
    """In training: whether dropout is active and batch normalization uses batch statistics."""
    fused_kernels: bool = True
    """In training: whether dropout, and attention with it, are the fused calls of accelerators;
    otherwise as computed on a CPU."""


@dataclass
class RuntimeConfig:
    """How the model is run, which decides how long values stay in memory."""

    name: str = "eager"
    """``eager``: the module itself, whose Python variables keep values alive; ``graph``: the
    captured graph, which frees a value after its last reader; ``compiled``: fused kernels."""
    host_launch_s: float | None = None
    """Host time to launch an operator; by default that of the accelerators' usual hosts."""
    regional: bool = False
    """For ``compiled``: whether each block is compiled by itself, and the rest runs in Python."""
    compiled_loss: bool = False
    """For `regional`: whether the loss is compiled too."""


@dataclass
class OptimizerConfig:
    """The optimizer of a training step, and its state."""

    name: str = "none"
    """One of `fxpart.core.optimizer.OPTIMIZERS`."""
    state_dtype: str | None = None
    """Dtype of its state; by default that of the weights."""
    master_weights: bool = False
    """Whether it keeps float32 copies of weights with fewer than 32 bits."""
    implementation: str = "foreach"
    """``for_loop``, ``foreach`` or ``fused``."""


@dataclass
class AllReduceConfig:
    """The all-reduce of gradients in data parallelism."""

    bucket_bytes: int = 25 * 2**20  # BUCKET_BYTES of fxpart, without numpy's import
    gradient_as_bucket_view: bool = False
    """Whether gradients are views into the buckets, or are copied into them."""


@dataclass
class ReserveConfig:
    """Device memory not available to tensors, with the fields of `fxpart.core.reserve`."""

    name: str = "none"
    context_bytes: int = 0
    workspace_bytes: int = 0
    rounding_bytes: int = 1
    fragmentation: float = 0.0
    context_range: list[float] = field(default_factory=lambda: [1.0, 1.0])
    workspace_range: list[float] = field(default_factory=lambda: [1.0, 1.0])
    nccl_peer_bytes: int = 0
    nccl_peer_range: list[float] = field(default_factory=lambda: [1.0, 1.0])
    convolution_workspace: float = 0.0
    convolution_workspace_range: list[float] = field(default_factory=lambda: [1.0, 1.0])
    caching_allocator: bool = False
    allocator_error: float = 0.0
    upper_limits: bool = False
    source: str = ""


@dataclass
class WeightsConfig:
    """The format of weights, with the fields of `fxpart.core.few_bits.WeightFormat`."""

    name: str = "none"
    bits: int = 8
    group_size: int = 0
    pads_groups: bool = False
    group_bytes: float = 0.0
    row_bytes: float = 0.0
    column_bytes: float = 0.0
    matrix_bytes: float = 0.0
    read_share: float = 1.0
    fused_rows: int | None = None
    keep: list[str] = field(default_factory=list)
    activations: str | None = None
    source: str = ""
    """The library or paper of the format."""


@dataclass
class FinetuneConfig:
    """The weights to train: all, or with ``lora`` adapters of peft with all others frozen."""

    name: str = "none"
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: list[str] = field(default_factory=list)
    """Names of layers, or ``all-linear``; empty for peft's defaults for the architecture."""
    autocast_adapter_dtype: bool = True


@dataclass
class Float8Config:
    """Linear layers that multiply in 8 bits in a training step."""

    name: str = "none"
    """``none`` or one of `fxpart.cost.float8.RECIPES`."""
    filter_fqns: list[str] = field(default_factory=list)
    """Parts of the paths of layers that stay in 16 bits."""


@dataclass
class ScheduleConfig:
    """The schedule of a pipeline's stages."""

    name: str = "none"
    """``none`` or one of `fxpart.schedule.SCHEDULES`."""


@dataclass
class ExecuteConfig:
    """Whether and how to execute the plan on this machine."""

    name: str = "none"
    """``none``, ``local`` or ``pipeline``."""
    repeats: int = 5
    seed: int = 0
    """Seed of random weights and inputs."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    threads: int = 1
    timeout_s: float = 120.0
    """Time after which an unresponsive stage ends the run."""
    save_stages: bool = False


@dataclass
class CaptureConfig:
    """The capture of the model's graph."""

    level: str = "operator"
    cache_dir: str = MISSING
    use_cache: bool = True
    symbolic: str = "none"
    """The symbolic sizes: ``none``, ``batch`` or ``batch_and_seq_len``."""


@dataclass
class ModeConfig:
    """A mode and its options; the mode itself checks their names and types."""

    name: str
    options: dict[str, Any]


@dataclass
class ServingSweepConfig:
    """For ``phase=generate``: more sizes to cost the plan at, every batch at every context.

    An empty list stands for the size of the run; without any sizes there is no table.
    """

    batches: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    """Tokens of a text, of which the last ``output_len`` are generated."""


@dataclass
class _Sections:
    """The common fields of `Config` and `Schema`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    transfer_rate: LinkConfig = field(default_factory=LinkConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    phase: PhaseConfig = field(default_factory=PhaseConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    execute: ExecuteConfig = field(default_factory=ExecuteConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    reserve: ReserveConfig = field(default_factory=ReserveConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    all_reduce: AllReduceConfig = field(default_factory=AllReduceConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    kv_cache: str = "auto"
    """Dtype of keys and values in a cache: one of `fxpart.core.few_bits.CACHE_DTYPES`, or ``auto``
    for the model's."""
    latent_attention: str = "expanded"
    """How a decode computes latent attention: ``expanded`` or ``absorbed``, see
    `fxpart.core.absorbed`."""
    context_len: int | None = None
    """For serving: capacity of the cache in tokens; None for the length of the prompt."""
    prompt_len: int | None = None
    """For ``phase=generate``: tokens of each prompt."""
    output_len: int | None = None
    """For ``phase=generate``: tokens to generate for each prompt."""
    prefill_batch: int | None = None
    """For ``phase=generate``: prompts that one pass of a replica computes, while its other texts
    wait; None for those of all texts."""
    checkpointing: str = "none"
    """For training: one of `fxpart.core.phases.CHECKPOINTING`, or `BUDGET`."""
    recomputed_blocks: list[str] = field(default_factory=list)
    """Paths of the blocks to which ``checkpointing`` applies; empty for all."""
    backward_order: str = "autograd"
    """For training: one of `fxpart.core.phases.BACKWARD_ORDERS`."""
    data_parallel: int = 1
    """Replicas that share the batch."""
    zero: int = 0
    """ZeRO stage of a training step: one of `fxpart.sharding.zero.STAGES`."""
    reduce_dtype: str | None = None
    """For stages 2 and 3: dtype in which gradients are scattered and accumulated, one of
    `fxpart.core.optimizer.STATE_DTYPES`; None for that of the weights."""
    tensor_parallel: int = 1
    """Number of neighbouring devices in a group that shares every operator."""
    sequence_parallel: bool = False
    """Whether groups also split activations between their layers along the sequence."""
    async_tensor_parallel: bool = False
    """Whether collectives of these groups run during the products beside them."""
    loss_parallel: bool = False
    """Whether these groups compute the loss of a step from shards of the logits."""
    expert_parallel: int = 1
    """Replicas that each have some of the experts, and exchange tokens."""
    expert_imbalance: float = 1.0
    """Tokens of the busiest of these replicas, as a multiple of its fair share."""
    context_parallel: int = 1
    """Replicas that each have a piece of every sequence, and exchange keys and values."""
    engine: str = "torch"
    """The engine of a training step: one of `fxpart.capture.models.spec.ENGINES`."""
    batch_sweep: int = 64
    """With a symbolic batch, sizes from 1 to this are costed."""
    serving_sweep: ServingSweepConfig = field(default_factory=ServingSweepConfig)
    microbatches: int = 1
    """Number of microbatches that a schedule runs in one step."""
    price_per_hour: dict[str, float] = field(default_factory=dict)
    """Prices per device in USD, by accelerator, replacing those in its files."""
    objective: str = "latency"
    """The objective to minimize, one of `fxpart.cost.problem.OBJECTIVES`."""
    granularity: str = "operator"
    """The unit that is kept together: ``operator``, ``module``, or a depth in the module tree."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    question: str = ""
    """The question that a sweep answers, a sentence."""
    resume: bool = True
    """Whether a sweep skips jobs that have a result."""
    where: str | None = None
    """The jobs of a sweep to run: an expression over their values."""
    zip: list[Any] | None = None
    """Swept keys that change together, or several lists of such keys."""
    rerun: str | None = None
    """The id of a logged run to repeat."""
    figures: str = "auto"
    """``all``, ``none``, or ``auto``: all, except slow ones in a sweep."""
    verbose: bool = False
    """Whether the jobs of a sweep print as much as single runs."""


@dataclass
class Schema(_Sections):
    """The schema of files: a mode's options are next to its name, ``mode.max_passes=4``."""

    mode: dict[str, Any] = field(default_factory=dict)


@dataclass
class Config(_Sections):
    """The whole configuration of a run."""

    mode: ModeConfig = field(default_factory=lambda: ModeConfig("", {}))


def sections_in(section: "DataclassInstance", path: str = "") -> Iterator[tuple[Any, str]]:
    """Yield a section and its subsections, each with its key prefix: ``devices.pools.0.``."""
    yield section, path
    for key, value in vars(section).items():
        inside = enumerate(value) if isinstance(value, list) else [("", value)]
        for index, inner in inside:
            if is_dataclass(inner) and not isinstance(inner, type):
                place = f"{key}.{index}" if isinstance(value, list) else key
                yield from sections_in(inner, f"{path}{place}.")
