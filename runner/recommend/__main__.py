"""``python -m runner.recommend``: search plans, print the best ones, and store them."""

import sys
from typing import TYPE_CHECKING

from runner.cli.ending import USER_ERROR, reported
from runner.config.paths import conf_dir, plugins_dir
from runner.output import stdout

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["main"]

_HELP = """\
python -m runner.recommend model=llama3_70b devices=dgx_h100

Costs every plan of a space as a run costs it, and prints the best: degrees of tensor, sequence,
data, context and expert parallelism, stages, schedules, microbatches, ZeRO stages, checkpointing,
modes. A setting of those that is given, such as mode=pipeline, is held. model.batch_size is what a
replica takes at a time.

recommend.objective=throughput     or latency: the time of one step, or of one input; or cost: the
                                   least money, by price_per_hour='{h100: 2.5}', in USD
recommend.devices=null             devices to choose from, such as [1xh100,dgx_h100,8xl40s]
recommend.weights=null             formats of weights to choose from, such as [none,fp8,int4]
recommend.kv_cache=null            dtypes of the cache to choose from, such as [auto,fp8]
recommend.global_batch=null        examples of a step, of all replicas and microbatches; null: any
recommend.limits={}                what plans must keep, by metric: recommend.limits.tpot_ms=50
recommend.rows=10                  plans that are printed and logged
recommend.space.tensor_parallel=null, .sequence_parallel, .data_parallel, .context_parallel,
               .expert_parallel, .zero, .batch, .microbatches, .schedule, .checkpointing, .mode:
               the values to try, such as [1,2,4]; null: all that go together

All else is as for python -m runner; see python -m runner --help.
"""
_FOLDER = (
    "hydra.run.dir=outputs/runs/${now:%Y-%m-%d_%H-%M-%S-%f}_${hydra.runtime.choices.model}"
    "_${hydra.runtime.choices.devices}_recommend"
)
_OF_SEVERAL = _FOLDER.replace("${hydra.runtime.choices.devices}", "several")


def main() -> int:
    """Run the command line and return the exit code: 0, or 2 for a user error."""
    return reported(_compose_and_recommend)


def _compose_and_recommend() -> int:
    # As in `runner.app`: before Hydra first scans for plugins.
    sys.path.append(str(plugins_dir()))
    if "--help" in sys.argv[1:] or "-h" in sys.argv[1:]:
        stdout.write(_HELP)
        return 0
    import hydra

    from runner.cli.arguments import hydra_arguments
    from runner.cli.composing import composing, work_begins
    from runner.config import choices
    from runner.config.read import register
    from runner.recommend.command import recommended, refuse_sweeps
    from runner.recommend.request import read_request

    request, run_arguments = read_request(sys.argv[1:])
    request_texts = [text for text in sys.argv[1:] if text not in run_arguments]
    refuse_sweeps(run_arguments)
    register()
    choices.register()
    arguments = hydra_arguments(run_arguments)
    if not any(text.startswith("hydra.run.dir=") for text in arguments):
        arguments.append(_OF_SEVERAL if request.devices else _FOLDER)
    sys.argv[1:] = choices.quoted_overrides(arguments)
    errors: list[str | None] = []

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def job(config: "DictConfig") -> None:
        work_begins()
        errors.append(recommended(config, request, request_texts))

    with composing():
        job()
    failed = [error for error in errors if error]
    for error in failed:
        sys.stderr.write(f"error: {error}\n")
    return USER_ERROR if failed else 0


if __name__ == "__main__":
    sys.exit(main())
