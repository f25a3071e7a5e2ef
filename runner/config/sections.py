"""What a run is made of: a dataclass for each section of the configuration.

Hydra checks every file and override against these types.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from fxpart.errors import SpecError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "BUDGET",
    "RECOMMEND",
    "AllReduceConfig",
    "CaptureConfig",
    "Config",
    "DevicesConfig",
    "ExecuteConfig",
    "FinetuneConfig",
    "LatencyConfig",
    "LinkConfig",
    "ModeConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "PairConfig",
    "PhaseConfig",
    "PoolConfig",
    "ReserveConfig",
    "ScheduleConfig",
    "Schema",
    "ServingSweepConfig",
    "TierConfig",
    "TrackingConfig",
    "WeightsConfig",
    "sections_in",
]


BUDGET = "budget"
"""The checkpointing that computes as few blocks again as must be."""
RECOMMEND = "recommend"
"""The mode that chooses a whole plan, of which the mode that places it is a part."""


@dataclass  # not frozen: OmegaConf would refuse overrides of it
class TrackingConfig:
    """Which tracker to use, and where it keeps runs."""

    name: str = "mlflow"
    """``mlflow`` or ``none``."""
    uri: str | None = None
    """Tracking URI of MLflow. None: the environment's ``MLFLOW_TRACKING_URI``, or else the sqlite
    file ``outputs/mlflow.db`` below the root."""
    experiment: str = "fxpart"


@dataclass
class ModelConfig:
    """What is cut: a transformers architecture with its configuration, or a function's result."""

    name: str = MISSING
    library: str = "transformers"
    """What `architecture` is of: ``transformers`` or ``timm``."""
    architecture: str | None = None
    """A class of transformers, such as ``LlamaForCausalLM``, or a model of timm."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the architecture's configuration; what is left out has its default."""
    factory: str | None = None
    """``package.module:function`` that builds the model and its inputs."""
    factory_args: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 1
    seq_len: int | None = None
    dtype: str = "float32"
    autocast: str | None = None
    """What products are computed in, as under `torch.autocast` of CUDA: ``bfloat16`` or
    ``float16``; None for `dtype`."""
    loss: str = "own"
    """Of a training step: ``own``, what the model computes from labels as `Trainer` gives them, or
    the mean of its outputs where it takes none; ``mean``; or ``package.module:function``."""
    path: str | None = None
    """Of a published placement problem, which is placed in place of a model."""
    depends_on: list[str] = field(default_factory=list)
    """Files that decide what the factory builds, beside the modules that it imports."""


@dataclass
class PoolConfig:
    """Some equal devices."""

    count: int = MISSING
    name: str = MISSING
    """The accelerator."""
    memory_bytes: int = MISSING
    """Of one device."""
    flops_per_s: dict[str, float] = field(default_factory=dict)
    """Dense peak by dtype name."""
    memory_bandwidth_bytes_per_s: float = MISSING
    # Switches are any value here: of a bool in a list, OmegaConf takes any number for true.
    on_host: Any = False
    """Whether it is the host itself, of whose memory nothing is reserved."""
    multiprocessors: int = 100
    """Parts of the device that each run one block of a kernel at a time."""
    curves: str = ""
    """The family whose kernels it runs, of ``latency.curves``."""
    own_curves: Any = False
    """Whether these are of devices such as this one; else they are carried to it by its peaks."""
    host_launch_s: float = 0.0
    """Time of the host that it comes in to start an operator on it."""
    power_w: float = 0.0
    """Rated power of one board; 0 where nobody has said."""
    price_per_hour: float | None = None
    """Of one device, in USD; None where nobody has said."""
    source: str = ""
    """Where the numbers come from."""
    sustained_flops_per_s: dict[str, float] = field(default_factory=dict)
    """By dtype name, what long runs of products reach where a power limit takes the clock."""

    def __post_init__(self) -> None:
        """Refuse what is neither true nor false.

        Raises:
            SpecError: for such a switch.

        """
        for switch in ("on_host", "own_curves"):
            if not isinstance(value := getattr(self, switch), bool):
                raise SpecError(
                    f"devices.pools: {switch} of {self.name} must be true or false, got {value!r}"
                )


@dataclass
class LinkConfig:
    """A link between any two devices, one way."""

    name: str = ""
    bytes_per_s: float = MISSING
    latency_s: float = 0.0
    source: str = ""


@dataclass
class PairConfig(LinkConfig):
    """A link of two devices of their own, both ways, such as an NVLink bridge."""

    devices: list[int] = field(default_factory=list)
    """The logical ids of the two."""


@dataclass
class TierConfig:
    """A memory beside the devices, in which tensors may lie."""

    name: str = MISSING
    kind: str = MISSING
    """``host`` or ``disk``."""
    memory_bytes: int = MISSING
    bytes_per_s: float | None = None
    """Rate at which a disk is read; of the host, that of each device's link to it where
    `transfer_rate` is faster and no PCIe link, or null where it is the same."""
    latency_s: float | None = None
    """Fixed cost of a copy over that link."""
    flops_per_s: dict[str, float] = field(default_factory=dict)
    """Of what computes beside it, by dtype name; empty for nothing."""
    memory_bandwidth_bytes_per_s: float | None = None
    """Of what computes beside it."""
    source: str = ""
    """Where the numbers come from."""


@dataclass
class OffloadConfig:
    """What lies in a tier and how that runs, as in `fxpart.core.tiers.OffloadOptions`."""

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
    """Where the numbers come from."""


@dataclass
class DevicesConfig:
    """What the model is cut over."""

    spec: str = MISSING
    """The name that was asked for."""
    pools: list[PoolConfig] = field(default_factory=list)
    nodes: list[int] | None = None
    """The machine that each pool sits in; all in one if left out."""
    between_nodes: LinkConfig | None = None
    """The link between machines; `transfer_rate` if left out."""
    pairs: list[PairConfig] = field(default_factory=list)
    """Links of two devices of their own, in place of those above."""
    tiers: list[TierConfig] = field(default_factory=list)
    """Memory beside them: of the host, and a disk."""
    saturate_host: bool = False
    """Whether the placement is copied onto idle devices, as often as it fits."""


@dataclass
class LatencyConfig:
    """How long an operator takes: coefficients of a model, or measurements."""

    name: str = MISSING
    source: str = "roofline"
    """``roofline`` with the coefficients below, ``kernels``, ``profiled``, ``calibrated`` or
    ``trace``; ``auto`` is ``kernels`` or ``roofline`` once the configuration is read."""
    compute_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    op_overhead_s: float = 0.0
    curves: dict[str, Any] = field(default_factory=dict)
    """Of ``kernels``: coefficients by family of devices."""
    carries_curves: bool = True
    """Of ``kernels``: whether devices without curves of their own take those of another family;
    else they take the roofline."""
    tables: str | None = None
    """Of ``kernels``: a folder of measured tables, which are interpolated."""
    file: str | None = None
    """Of a calibration; without one, this model's own measurements are fitted. Of ``trace``: what
    ``torch.profiler`` wrote."""
    device: str = "cpu"
    """What is measured on: ``cpu`` or ``cuda``."""
    threads: int = 1
    repeats: int = 5
    """Times that each kind of operator is run."""


@dataclass
class PhaseConfig:
    """What of the model is captured."""

    name: str = "inference"
    """One of `fxpart.core.phases.PHASES`."""
    train_mode: bool = False
    """Of a training step: whether dropout drops, and batch normalization uses the batch."""
    fused_kernels: bool = True
    """Of a training step: whether dropout, and attention with it, are the fused calls that
    accelerators have; else as a CPU computes them."""


@dataclass
class RuntimeConfig:
    """What runs the model, which decides how long values stay in memory."""

    name: str = "eager"
    """``eager``: the module itself, whose Python variables hold values; ``graph``: the captured
    graph, which frees a value after its last reader; ``compiled``: kernels that are fused."""
    host_launch_s: float | None = None
    """Time of the host to start an operator on a device; if left out, that of the hosts that the
    accelerators come in."""


@dataclass
class OptimizerConfig:
    """What updates the weights at the end of a training step, and what it keeps for them."""

    name: str = "none"
    """One of `fxpart.core.optimizer.OPTIMIZERS`."""
    state_dtype: str | None = None
    """Dtype of its state; that of the weights if left out."""
    master_weights: bool = False
    """Whether it keeps weights of less than 32 bits in float32 too."""
    implementation: str = "foreach"
    """``for_loop``, ``foreach`` or ``fused``."""


@dataclass
class AllReduceConfig:
    """How replicas of data parallelism add up gradients."""

    bucket_bytes: int = 25 * 2**20  # BUCKET_BYTES of fxpart, without numpy's import
    gradient_as_bucket_view: bool = False
    """Whether gradients lie in the buckets, or are copied into them."""


@dataclass
class ReserveConfig:
    """What of a device's memory is not for tensors, field by field as in `fxpart.core.reserve`."""

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
    source: str = ""
    """Where the numbers come from."""


@dataclass
class WeightsConfig:
    """How weights are laid out, field by field as in `fxpart.core.few_bits.WeightFormat`."""

    name: str = "none"
    bits: int = 8
    group_size: int = 0
    group_bytes: float = 0.0
    row_bytes: float = 0.0
    column_bytes: float = 0.0
    matrix_bytes: float = 0.0
    read_share: float = 1.0
    keep: list[str] = field(default_factory=list)
    source: str = ""
    """Whose layout it is."""


@dataclass
class FinetuneConfig:
    """What of the model a training step trains: all, or adapters of peft beside frozen weights."""

    name: str = "none"
    """``none`` or ``lora``."""
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: list[str] = field(default_factory=list)
    """Names of layers, ``all-linear``, or none for those that peft knows of the architecture."""


@dataclass
class ScheduleConfig:
    """How the stages of a pipeline take turns."""

    name: str = "none"
    """``none`` or one of `fxpart.schedule.SCHEDULES`."""


@dataclass
class ExecuteConfig:
    """Whether, and how, the plan is carried out on this machine."""

    name: str = "none"
    """``none``, ``local`` or ``pipeline``."""
    repeats: int = 5
    seed: int = 0
    """Of random weights and inputs."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    threads: int = 1
    timeout_s: float = 120.0
    """After which a stage that shows no sign of life ends the run."""
    save_stages: bool = False


@dataclass
class CaptureConfig:
    """How the model's graph is captured."""

    level: str = "operator"
    cache_dir: str = MISSING
    use_cache: bool = True
    symbolic: str = "none"
    """Which sizes are symbols: ``none``, ``batch`` or ``batch_and_seq_len``."""


@dataclass
class ModeConfig:
    """A mode and its options; the mode itself checks their names and types."""

    name: str
    options: dict[str, Any]


@dataclass
class ServingSweepConfig:
    """Of ``phase=generate``: sizes at which the plan is costed too, every batch at every context.

    Where one list is empty, the size of the run takes its place; where both are, there is no table.
    """

    batches: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    """Tokens of a text, the last ``output_len`` of which are generated."""


@dataclass
class _Sections:
    """What `Config` and the shape of the files have in common."""

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
    all_reduce: AllReduceConfig = field(default_factory=AllReduceConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    kv_cache: str = "auto"
    """What a cache keeps keys and values in: one of `fxpart.core.few_bits.CACHE_DTYPES`, or
    ``auto`` for the model's own dtype."""
    context_len: int | None = None
    """Of serving: tokens that the cache has room for; None for those of the prompt."""
    prompt_len: int | None = None
    """Of ``phase=generate``: tokens of each prompt."""
    output_len: int | None = None
    """Of ``phase=generate``: tokens that are generated for each prompt."""
    checkpointing: str = "none"
    """Of a training step: one of `fxpart.core.phases.CHECKPOINTING`, or `BUDGET`."""
    recomputed_blocks: list[str] = field(default_factory=list)
    """Paths of the blocks that ``checkpointing`` is of; empty for all."""
    backward_order: str = "autograd"
    """Of a training step: one of `fxpart.core.phases.BACKWARD_ORDERS`."""
    data_parallel: int = 1
    """Replicas that share the batch."""
    zero: int = 0
    """What replicas shard of a training step: one of `fxpart.sharding.zero.STAGES`."""
    tensor_parallel: int = 1
    """Devices that share every operator, in groups of so many neighbours."""
    sequence_parallel: bool = False
    """Whether these also split, along the sequence, what lies between the layers they share."""
    expert_parallel: int = 1
    """Replicas that have some of the experts each, and exchange tokens."""
    expert_imbalance: float = 1.0
    """By how much more than its share of the tokens the busiest of these gets."""
    context_parallel: int = 1
    """Replicas that have a piece of each sequence, and exchange keys and values."""
    engine: str = "torch"
    """What runs a training step: one of `fxpart.capture.models.spec.ENGINES`."""
    batch_sweep: int = 64
    """With a symbolic batch, sizes from 1 to this are costed."""
    serving_sweep: ServingSweepConfig = field(default_factory=ServingSweepConfig)
    microbatches: int = 1
    """That a schedule runs in one step."""
    price_per_hour: dict[str, float] = field(default_factory=dict)
    """Of one device of each accelerator, in USD, in place of what its file says."""
    objective: str = "latency"
    """What a search makes small: ``latency`` or ``throughput``, the largest load."""
    granularity: str = "operator"
    """What stays together: ``operator``, ``module``, or a depth in the module tree."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    question: str = ""
    """What a sweep is to answer, in a sentence."""
    resume: bool = True
    """Whether a sweep leaves out jobs that are settled already."""
    where: str | None = None
    """Which jobs of a sweep are run: an expression over their values."""
    zip: list[Any] | None = None
    """Swept keys that change together, or several lists of such keys."""
    rerun: str | None = None
    """The id of a logged run that is run again, as it was."""
    figures: str = "auto"
    """``all``, ``none``, or ``auto``: all but those of a sweep's job that take long."""
    verbose: bool = False
    """Whether the jobs of a sweep say all that they say alone."""


@dataclass
class Schema(_Sections):
    """The shape of the files: a mode's options stand beside its name, ``mode.max_passes=4``."""

    mode: dict[str, Any] = field(default_factory=dict)


@dataclass
class Config(_Sections):
    """Everything that a run is made of."""

    mode: ModeConfig = field(default_factory=lambda: ModeConfig("", {}))


def sections_in(section: "DataclassInstance", path: str = "") -> Iterator[tuple[Any, str]]:
    """Yield a section and all inside it, each with how its keys begin: ``devices.pools.0.``."""
    yield section, path
    for key, value in vars(section).items():
        inside = enumerate(value) if isinstance(value, list) else [("", value)]
        for index, inner in inside:
            if is_dataclass(inner) and not isinstance(inner, type):
                at = f"{key}.{index}" if isinstance(value, list) else key
                yield from sections_in(inner, f"{path}{at}.")
