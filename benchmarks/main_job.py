"""``python -m benchmarks.main_job``: time the main job against a lower limit, in one run.

Cold: no captured graph and no MLflow database, but compiled loops; the limit is a bare
`torch.export` of the same model, imports included. Warm: the same command again; the limit is
importing torch and MLflow. ``--help``: importing Hydra. Job and limit alternate, so that other work
on the machine slows both. The first run also compiles the loops of its mode: its seconds beyond the
cold run are shown.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.process import Measured, run_python

MAIN_JOB = ["-m", "runner", "mode=kl_based", "devices=4x16gb"]
_CONF = Path(__file__).resolve().parent.parent / "conf"
_EXPORT = f"""
import torch, transformers, yaml

with open({str(_CONF / "model" / "llama2_13b.yaml")!r}) as file:
    spec = yaml.safe_load(file)
config = transformers.LlamaConfig(**spec["config"], use_cache=False)
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, spec["dtype"])).eval()
    ids = torch.zeros((spec["batch_size"], spec["seq_len"]), dtype=torch.int64)
    with torch.no_grad():
        torch.export.export(model, (), {{"input_ids": ids}}, strict=False)
"""
_CASES = {
    "main job, cold": (MAIN_JOB, "torch.export", ["-c", _EXPORT], 1.4),
    "main job, warm": (MAIN_JOB, "import torch, mlflow", ["-c", "import torch, mlflow"], 1.5),
    "--help": (["-m", "runner", "--help"], "import hydra", ["-c", "import hydra"], 2.5),
}
"""By case: the command, the name and command of its floor, and the largest allowed ratio."""
_REPEATS = 5
_COMPILING_S = 40.0


def main() -> None:
    """Print a line for each case: medians in seconds, their ratio and its limit, peak memory."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    jobs: dict[str, list[Measured]] = {case: [] for case in _CASES}
    floors: dict[str, list[Measured]] = {case: [] for case in _CASES}
    for _ in range(_REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            for case, (command, _, floor, _) in _CASES.items():
                floors[case].append(run_python(floor, Path(folder)))
                jobs[case].append(run_python(command, Path(folder)))
    print(
        f"{'case':<16} {'median s':>8} {'worst s':>8} {'peak GB':>8}  "
        f"{'floor':<20} {'median s':>8} {'times':>6} {'limit':>6}"
    )
    for case, (_, name, _, limit) in _CASES.items():
        seconds = [run.seconds for run in jobs[case]]
        floor_s = [run.seconds for run in floors[case]]
        times = median(job / floor for job, floor in zip(seconds, floor_s, strict=True))
        peak = max(run.peak_bytes for run in jobs[case]) / 1e9
        print(
            f"{case:<16} {median(seconds):>8.2f} {max(seconds):>8.2f} {peak:>8.2f}  "
            f"{name:<20} {median(floor_s):>8.2f} {times:>6.2f} {limit:>6.1f}"
        )
    with tempfile.TemporaryDirectory() as folder:
        empty = {"NUMBA_CACHE_DIR": f"{folder}/loops"}
        first = run_python(MAIN_JOB, Path(folder), environment=empty)
    cold_s = median(run.seconds for run in jobs["main job, cold"])
    print(
        f"{'the first run':<16} {first.seconds:>8.2f} s: {first.seconds - cold_s:.2f} s beyond the"
        f" cold one, at most {_COMPILING_S:.0f}"
    )


if __name__ == "__main__":
    main()
