"""Folders of jobs, and the links in rows of the report."""

import json
import os
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest

from runner.report.from_store import job_folders
from runner.report.html import job_links, report_html
from tests.runner.report.sweeps import row, sweep
from tests.runner.report.test_html import Tags


def job(folder: Path, key: str | None, *files: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"key": key}))
    for name in files:
        (folder / name).write_text("<svg/>")
    return folder


def test_jobs_are_found_by_their_keys(tmp_path: Path) -> None:
    first = job(tmp_path / "s" / "0", "k0")
    later = job(tmp_path / "s" / "1", "k0")
    os.utime(first / "result.json", (1, 1))
    other = job(tmp_path / "t" / "0", "k1")
    job(tmp_path / "t" / "1", None)
    (job(tmp_path / "t" / "2", "k2") / "result.json").write_text("{")
    (job(tmp_path / "t" / "3", "k3") / "result.json").write_text("[]")
    folders = job_folders([tmp_path / "s", tmp_path / "t", tmp_path / "gone"])
    assert folders == {"k0": str(later), "k1": str(other)}


def test_a_relative_folder_may_be_another_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path / "s" / "0", "k0")
    monkeypatch.chdir(tmp_path)
    assert job_folders([Path("s")]) == {}


def test_links_lead_from_the_report_to_existing_files(tmp_path: Path) -> None:
    folder = job(tmp_path / "sweeps" / "a: 100% #1", "k0", "memory.svg", "other.svg")
    place = tmp_path / "reports" / "x"
    place.mkdir(parents=True)
    links = job_links(replace(row(1.0), folder=str(folder)), place)
    assert [words for _, words in links] == ["files", "memory"]
    targets = [place / unquote(address) for address, _ in links]
    assert [path.resolve() for path in targets] == [folder, folder / "memory.svg"]
    for gone in (None, str(tmp_path / "gone")):
        assert job_links(replace(row(1.0), folder=gone), place) == []


def test_a_row_has_its_full_run_id_and_links_where_its_folder_is_known(tmp_path: Path) -> None:
    folder = job(tmp_path / "0", "k0", "memory.svg", "partition_graph.svg")
    known = replace(row(1.0, run_id="0123456789abcdef" * 2), folder=str(folder))
    data = sweep([known, row(2.0, run_id="f" * 32)])
    page = Tags(report_html(data, tmp_path))
    assert page.addresses == [
        "data:,",
        "./0/",
        "./0/partition_graph.svg",
        "./0/memory.svg",
        "./0/",
    ]
    assert {"0123456789abcdef" * 2, "f" * 32} <= set(page.words)
    assert Tags(report_html(data)).addresses == ["data:,"]
