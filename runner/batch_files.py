"""`formulas.txt`, `formulas.tex`, `batch_sweep.csv` and `batch_sweep.svg` of a `BatchReport`."""

from pathlib import Path

from fxpart.symbolic.formula import MaxFormula
from fxpart.symbolic.sweep import BATCH
from fxpart.topology import Topology
from runner.batch_plot import batch_sweep_svg
from runner.batch_report import BatchReport
from runner.files import write_table
from runner.writing import write_text

__all__ = ["sweep_columns", "write_batch_files"]


def write_batch_files(folder: Path, report: BatchReport, topology: Topology) -> None:
    """Write the four files into `folder`. Raises `CacheError` when it cannot be written."""
    write_text(folder / "formulas.txt", _formulas_text(report))
    write_text(folder / "formulas.tex", _formulas_latex(report))
    write_table(folder / "batch_sweep.csv", sweep_columns(report))
    write_text(folder / "batch_sweep.svg", batch_sweep_svg(report, topology))


def sweep_columns(report: BatchReport) -> dict[str, list[object]]:
    """Return the sweep as columns; batches are those of all replicas together."""
    table = report.table
    columns: dict[str, list[object]] = {
        name: (table.sizes[:, place] * (report.replicas if name == BATCH else 1)).tolist()
        for place, name in enumerate(table.symbols)
    }
    columns["latency_ms"] = (table.latency_s * 1e3).tolist()
    columns["examples_per_s"] = (table.throughput_per_s * report.replicas).tolist()
    for device in range(table.peak_bytes.shape[1]):
        columns[f"peak_bytes_device_{device}"] = table.peak_bytes[:, device].tolist()
    columns["feasible"] = table.feasible.tolist()
    return columns


def _named_formulas(report: BatchReport) -> list[tuple[str, str, str]]:
    """Return what each formula is of, as text, and in both notations."""
    unrounded = ", before the allocator rounds" if report.rounding_bytes > 1 else ""
    found = [
        (
            f"peak bytes of tensors on device {device}{unrounded}{_range(peak)}",
            peak.text(),
            peak.latex(),
        )
        for device, peak in enumerate(report.peaks)
    ]
    found.append(("FLOPs of the whole model", report.flops.text(), report.flops.latex()))
    alone = ", without sums over replicas" if report.replicas > 1 else ""
    for latency in report.latencies:
        sizes = latency.checked_at
        low, high = sizes.min(axis=0).tolist(), sizes.max(axis=0).tolist()
        where = ", ".join(
            f"{name}={a}" if a == b else f"{name} from {a} to {b}"
            for name, a, b in zip(latency.formula.symbols, low, high, strict=True)
        )
        name = f"latency in seconds{alone}{unrounded}, equal to the simulation for {where}"
        found.append((name, latency.formula.text(), latency.formula.latex()))
    return found


def _range(formula: MaxFormula) -> str:
    """Return for what sizes a formula holds, where not for all."""
    ends = [(name, *formula.range_of(name)) for name in formula.symbols]
    said = [
        f"{name} from {low}" + (f" to {high}" if high is not None else "")
        for name, low, high in ends
        if low > 1 or high is not None
    ]
    return f", for {' and '.join(said)}" if said else ""


def _formulas_text(report: BatchReport) -> str:
    shared = (
        f"# {BATCH} is that of one replica, of {report.replicas}.\n" if report.replicas > 1 else ""
    )
    body = "\n".join(f"# {name}\n{text}\n" for name, text, _ in _named_formulas(report))
    return shared + body


def _formulas_latex(report: BatchReport) -> str:
    parts = [
        f"\\section*{{{name.capitalize()}}}\n{latex}\n"
        for name, _, latex in _named_formulas(report)
    ]
    return (
        "\\documentclass{article}\n\\usepackage{amsmath}\n\\allowdisplaybreaks\n\\begin{document}\n"
        + "\n".join(parts)
        + "\\end{document}\n"
    )
