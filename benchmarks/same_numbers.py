"""``python -m benchmarks.same_numbers record FILE``: record the numbers of 269 runs.

Runs every command below with this checkout and stores the results, which takes twelve minutes on
two cores. ``compare BEFORE AFTER`` prints every value in which two records differ, and exits with 1
if any does. Only the commands of fxpart and the files they write are used.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from string import Template
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_FILES = {
    "tiny.py": """import torch
from torch import nn

def build(batch_size, dtype, width=64, layers=6, tied=False):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    if tied:
        model[5].weight = model[0].weight
    return model.to(dtype), (torch.linspace(-1, 1, batch_size * width).reshape(-1, width),)
""",
    "calibration.json": """{"schema": "fxpart-calibration", "version": 2, "device_name": "made up",
"overhead_s": 4e-6, "view_s": 1e-6, "bytes_per_s": 1.7e10, "fresh_s_per_byte": 2e-10,
"flops_per_s": {"gemm float32": 7.3e10}, "moves_per_s": {}, "spread": {}, "total_errors": [],
"held_out_errors": [], "op_error": 0, "spearman": 0}""",
    "conf/model/mine.yaml": "{name: mine, factory: 'tiny:build', factory_args: {layers: 3}}",
}
_SHORT = {
    "presets": "model=gpt2,gpt2_xl,bert_large,t5_large,vit_large,resnet50,whisper_small,llama2_7b",
    "small": "model=gpt2 model.batch_size=1 model.seq_len=256 reserve=none",
    "layers": "$small model.config.n_layer=4",
    "train": "$layers phase=training",
    "own": "model=custom model.factory=tiny:build model.name=tiny reserve=none",
    "spread": "mode=size_based,kl_based,cost_aware devices=4x0.3gb,2x0.5gb",
    "modes": "mode=single,size_based,kl_based,cost_aware,pipeline",
    "pipe": "mode=pipeline",
    "two": "devices=2x0.06mb",
    "four": "devices=4x2gb",
    "real": "devices=2xcpu transfer_rate=loopback mode=pipeline microbatches=4 execute=pipeline",
    "step": "phase.train_mode=false optimizer=none",
    "cheap": "tracking=none",
}
# Each line: a name and the arguments of ``python -m runner``; indented lines continue it.
_COMMANDS = """
main: mode=kl_based devices=4x16gb
presets: -m $presets mode=size_based,kl_based devices=4x16gb
large: -m model=mixtral_8x7b,llama3_70b mode=size_based devices=4x80gb
dlrm: -m model=dlrm mode=sparse_nn,size_based,cost_aware devices=8x24gb
modes: -m $small $modes devices=4x0.3gb,2x0.2gb+1x0.6gb,mixed_box transfer_rate=pcie4,1gb
topologies: -m model=gpt2 mode=kl_based,pipeline devices=dgx_h100,2x_dgx_h100,2xh100+4xt4 $cheap
architecture: model=transformers model.architecture=Qwen3ForCausalLM model.seq_len=64
  model.config.num_hidden_layers=2 mode=cost_aware devices=2xa10+2xt4 figures=all
parts: -m $small mode=kl_based,cost_aware granularity=operator,module,1,2,3 devices=2x0.3gb+1x0.6gb
copies: -m $small devices.saturate_host=true devices=4x1gb,2x0.6gb+3x0.3gb $cheap
optimizers: -m $train optimizer=adamw,adam,momentum,sgd,none checkpointing=none,block $pipe $four
precision: -m $train model.dtype=bfloat16 devices=3x1gb optimizer.implementation=foreach,fused
  optimizer.master_weights=true,false optimizer.state_dtype=float32,null $cheap
steps: -m $train phase.train_mode=true,false phase.fused_kernels=true,false devices=2x1gb $cheap
schedules: -m $layers $pipe phase=inference,training schedule=gpipe,1f1b microbatches=2,8 $four
interleaved: -m $train $pipe schedule=interleaved mode.interleave=2 microbatches=4,8 devices=2x2gb
cuts: -m $small $pipe $four 'mode.cut_after=[transformer.h.3],[transformer.h.2,transformer.h.8]'
stages: -m $small $pipe mode.stages=2,3,4 devices=4x1gb,1x1gb+3x0.4gb $cheap
replicas: -m $train data_parallel=2,4 model.batch_size=4 devices=4x2gb mode=size_based,pipeline
  all_reduce.gradient_as_bucket_view=true,false
symbolic: -m $small capture.symbolic=batch,batch_and_seq_len mode=single,kl_based devices=2x2gb
symbolic_step: $train capture.symbolic=batch $pipe schedule=gpipe batch_sweep=16 devices=2x2gb
calibrated: -m $small latency=calibrated latency.file=calibration.json $modes devices=3x0.4gb
profiled: -m $own latency=profiled,calibrated mode=size_based $two
factory: $own mode=kl_based $two
mine: model=mine mode=size_based $two reserve=none figures=none
widths: -m $own +model.factory_args.width=16,64 model.dtype=float32,bfloat16 devices=4x0.06mb $cheap
saved: -m $own mode=aot_based mode.assignment=outputs/factory devices=2x0.06mb,4x1mb
swapped: $own mode=aot_based mode.assignment=outputs/factory 'mode.devices={0: 1, 1: 0}' $two
by_module: $small mode=aot_based 'mode.modules={*: 0, transformer.h: 1, lm_head: 2}' devices=3x1gb
rerun: rerun={first:factory} figures=all
local: -m $own +model.factory_args.tied=true,false mode=size_based,pipeline $two execute=local
local_step: $train $step mode=kl_based devices=4x0.8gb execute=local execute.repeats=2
saved_stages: $own $pipe mode.cut_after=[1,3] devices=3x1mb execute=local execute.save_stages=true
gpipe_run: $own $real schedule=gpipe
1f1b_run: $own +model.factory_args.tied=true $real schedule=1f1b phase=training $step
in_process: -m $small $spread
joblib: -m $small $spread hydra/launcher=joblib hydra.launcher.n_jobs=2
ray: -m $small $spread hydra/launcher=ray hydra.launcher.init.num_cpus=2
submitit: -m $small $spread hydra/launcher=submitit_local
where: -m $small mode=single,kl_based devices=1x1gb,4x0.3gb 'where=n_devices > 2 or memory_gb < 2'
zip: -m $own zip=[model.batch_size,devices] model.batch_size=1,2,4 devices=1x1mb,2x0.06mb,4x0.06mb
tpe: -m $small hydra/sweeper=optuna mode=kl_based,cost_aware devices=2x0.5gb,4x0.3gb
  'mode.min_gain=tag(log,interval(1e-4,1e-1))' hydra.sweeper.n_trials=10
nsgaii: -m $small $spread hydra/sweeper=optuna hydra.sweeper.sampler=nsgaii hydra.sweeper.n_trials=4
  hydra.sweeper.metric=[latency_ms,peak_memory_gib] hydra.sweeper.direction=[minimize,minimize]
compare_modes: experiment=compare_modes model=gpt2 devices=2x16gb,2x16gb+2x24gb
scale_devices: experiment=scale_devices model=gpt2 mode=size_based
batch_frontier: experiment=batch_frontier model.config.n_layer=2 model.batch_size=1,2
link_speed: experiment=link_speed model=gpt2 devices=2x16gb
report: report in_process
again: -m $small $spread tracking.experiment=in_process
slower: -m $small $spread transfer_rate=1gb tracking.experiment=in_process
report_against: report in_process --against {first:in_process}
too_large: devices=1x16gb
too_coarse: $small mode=size_based granularity=1 devices=4x0.3gb
failures: -m $own $two mode=sparse_nn,size_based
"""
_REFUSED = """mode=kl_base; model=gpt3; devices=4x16; transfer_rate=pcie9; model.batch=3; +speed=3;
model.batch_size=abc; mode.max_pass=3; latency.compute_efficiency=2; devices=4x16gb,8x16gb;
model=transformers; $own model.factory=tiny:bulid; $own mode=aot_based mode.assignment=tiny.py;
schedule=gpipe; data_parallel=3 phase=training; $own +model.factory_args.depth=3; $real;
experiment=nothing; rerun=0123456789abcdef; -m $modes where=modes==1; -m $modes hydra/launcher=x;
-m $small hydra/sweeper=optuna hydra.sweeper.metric=speed"""
_LINES = re.sub(r"\n +", " ", _COMMANDS).split("\n")[1:-1]
_LINES += [
    f"refused_{n}: {command.strip()} $cheap" for n, command in enumerate(_REFUSED.split(";"))
]
for _ in range(3):  # abbreviations are nested up to three deep
    _LINES = [Template(line).substitute(_SHORT) for line in _LINES]
_CASES = dict(line.split(": ", 1) for line in _LINES)
# Excluded by name: measured times, ids and locations, digests that depend on the source of fxpart,
# and values from git, this machine and versions.
_VOLATILE = {
    "": r"(capture_s|partition_s|time_s|runs_s|unsplit_s|unsplit_ms|measured_ms|time_error_pct"
    r"|measured_throughput_per_s|measured\.throughput_per_s|device_name|\.key|config_key|sweep_key"
    r"|result\.sweep|sweep_id|sweeps|locks|alone|record_id|best_run|tags\.inputs|result\.version"
    r"|_version|git_dirty|mlflow\.(user|parentRunId|source\.git\.\w+))$",
    # In concurrent processes, the messages in memory depend on timing.
    "execute=pipeline": r"(measured\.peak_bytes|measured_peak_gib|peak_error_pct)$",
    # With measured operators: all predicted times, and the files that contain them.
    "latency=profiled": r"(_ms|_s|_pct|note\.content)$|^digest",
}
_TEXTS = {
    r"\b(?=\d*[a-f])(?:[0-9a-f]{32}|[0-9a-f]{16})\b": "<id>",
    r"[0-9a-f]{8}_against_[0-9a-f]{8}|(?<=--sweep )[0-9a-f]{8}|(?<=\()[0-9a-f]{8}(?=\))": "<id>",
    r"\d{4}-\d\d-\d\d[ T_]\d\d[:-]\d\d([:-]\d\d)?(-\d+)?": "<time>",
    r"(?m)^.*(http://|mlflow ui |jobs done).*\n": "",
}
Values = dict[str, Any]


def main() -> None:
    """Record the runs, or compare two records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("way", choices=["record", "compare"])
    parser.add_argument(
        "files", nargs="+", type=Path, help="the file to write, or the two to compare"
    )
    parser.add_argument("--only", nargs="+", choices=_CASES, default=list(_CASES))
    options = parser.parse_args()
    if options.way == "compare":
        before, after = (json.loads(path.read_text()) for path in options.files)
        sys.exit(_compare(before, after))
    runs: dict[str, Values] = {}
    with tempfile.TemporaryDirectory() as place:
        folder, begin = Path(place).resolve(), time.perf_counter()
        for path, text in _FILES.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        os.environ.update(PYTHONPATH=str(_ROOT), XDG_CACHE_HOME=f"{folder}/cache", COLUMNS="160")
        for name in options.only:
            runs |= _run(name, folder)
            print(f"{time.perf_counter() - begin:>7.1f} s  {name}", flush=True)
    options.files[0].write_text(json.dumps(runs, indent=1, sort_keys=True, ensure_ascii=False))
    print(f"{sum('files' in values for values in runs.values())} runs, {len(runs)} records")


def _run(name: str, folder: Path) -> dict[str, Values]:
    """Run one command; return its output and the values of each of its jobs."""
    text = re.sub(r"\{first:(\w+)\}", lambda m: str(_runs(m[1], folder)[0][0]), _CASES[name])
    module, arguments = "runner", shlex.split(text)
    if arguments[0] == "report":
        module, arguments = "runner.report", arguments[1:]
    else:
        swept = "-m" in arguments or arguments[0].startswith("experiment=")
        arguments.append(f"hydra.{'sweep' if swept else 'run'}.dir=outputs/{name}")
        if _SHORT["cheap"] not in arguments and "tracking.experiment" not in text:
            arguments.append(f"tracking.experiment={name}")
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    output = _plain(process.stdout, folder).splitlines()
    if re.search("execute=|profiled", text):
        output = re.findall(r"results: +(.*);", process.stdout)
    values: Values = {"exit_code": process.returncode}
    values |= {f"line {number:>2}": line for number, line in enumerate(output)}
    if process.returncode:
        lines = _plain(process.stderr, folder).splitlines() or [""]
        values["error"] = [line for line in lines if line.startswith("error:")] or lines[-1:]
    runs = {name: values}
    for path in sorted((folder / "outputs" / name).rglob("result.json")):
        runs[f"{name}/{path.parent.name}"] = _job(path.parent, folder)
    experiment = re.findall(r"tracking.experiment=(\w+)", text) or [name]
    runs |= {f"{name}/mlflow/{run}": record for run, record in _logged(experiment[0], folder)}
    volatile = re.compile(
        "|".join(pattern for words, pattern in _VOLATILE.items() if words in text)
    )
    return {
        run: {key: value for key, value in record.items() if not volatile.search(key)}
        for run, record in runs.items()
    }


def _plain(text: str, folder: Path) -> str:
    text = text.replace(str(folder), "<folder>").replace(str(_ROOT), "<checkout>")
    for pattern, name in _TEXTS.items():
        text = re.sub(pattern, name, text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _flat(value: Any, path: str, folder: Path) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 (JSON)
    """Yield each value of a JSON document with its path; a digest for lists of tensors."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}", folder)
    elif path.endswith(".tensors"):
        yield path, _digest(value)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        yield from _flat(dict(enumerate(value)), path, folder)
    else:
        yield path, _plain(value, folder) if isinstance(value, str) else value


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _job(job_folder: Path, folder: Path) -> Values:
    """Return the values of `result.json`, the placement, and digests of the other files."""
    values: Values = {"files": _names(job_folder)}
    values |= _flat(json.loads((job_folder / "result.json").read_text()), "result", folder)
    for name in values["files"]:
        if name == "assignment.json":
            document = json.loads((job_folder / name).read_text())
            placement = {key: document[key] for key in ("devices", "partitions", "modules")}
            values["placement"] = _digest(placement)
        elif not re.match("result|traceback|stages/|inputs/", name):
            values[f"digest of {name}"] = _digest(_plain((job_folder / name).read_text(), folder))
    return values


def _query(folder: Path, query: str, *values: str) -> list[Any]:
    path = folder / "outputs" / "mlflow.db"
    with closing(sqlite3.connect(path if path.exists() else ":memory:")) as store:
        return store.execute(query, values).fetchall() if path.exists() else []


def _runs(experiment: str, folder: Path) -> list[Any]:
    query = "SELECT run_uuid, r.name, status, artifact_uri FROM runs r JOIN experiments e"
    where = "USING (experiment_id) WHERE e.name = ? ORDER BY start_time"
    return _query(folder, f"{query} {where}", experiment)


def _logged(experiment: str, folder: Path) -> Iterator[tuple[str, Values]]:
    """Yield the name of each run of an MLflow experiment, and everything MLflow stores of it."""
    seen: Counter[str] = Counter()
    for run, name, status, uri in _runs(experiment, folder):
        values: Values = {"status": status, "artifacts": _names(Path(uri.removeprefix("file://")))}
        for table in ("params", "latest_metrics", "tags"):
            rows = _query(folder, f"SELECT key, value FROM {table} WHERE run_uuid = ?", run)
            values |= {f"{table}.{key}": value for key, value in rows}
        pieces = sorted(key for key in values if key.startswith("tags.config."))
        values["tags.config"] = json.loads("".join(values.pop(key) for key in pieces) or "{}")
        seen[name] += 1
        flat = (pair for top, entry in values.items() for pair in _flat(entry, top, folder))
        yield f"{name} #{seen[name]}", dict(flat)


def _compare(before: dict[str, Values], after: dict[str, Values]) -> bool:
    """Print the differences; return whether there are any."""
    changed, unmatched = 0, defaultdict(list)
    for run in {**before, **after}:
        if run not in before or run not in after:
            unmatched[f"run {'vanished' if run in before else 'appeared'}"].append(run)
            continue
        old, new = before[run], after[run]
        for key in {**old, **new}:
            if key not in old or key not in new:
                unmatched[f"value {'vanished' if key in old else 'appeared'}: {key}"].append(run)
            # Compared as text, so that NaN equals itself.
            elif json.dumps(old[key]) != json.dumps(new[key]):
                changed += 1
                print(f"changed: {run}: {key}: {old[key]} -> {new[key]}")
    for kind, runs in sorted(unmatched.items()):
        print(f"{kind}: in {len(runs)}, such as {', '.join(runs[:3])}")
    n_unmatched, count = sum(map(len, unmatched.values())), sum(map(len, before.values()))
    print(
        f"{len(before)} records, {count} values: {changed} changed, {n_unmatched} in one file alone"
    )
    return bool(changed or n_unmatched)


if __name__ == "__main__":
    main()
