"""Files that are complete or absent."""

from pathlib import Path

import pytest

from fxpart.errors import CacheError
from fxpart.support.whole_file import whole_file, write_whole


@pytest.mark.parametrize("content", ["ü\r\n", b"\x00\xff"])
def test_written_content_replaces_the_old_file(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "made" / "a.bin"
    write_whole(path, "old", "a", "b")
    write_whole(path, content, "a", "b")
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(path.parent.iterdir()) == [path]


def test_a_failing_block_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail_half_way() -> None:
        with whole_file(path, "it", "stop") as temporary:
            temporary.write_text("half")
            raise KeyError(path.read_text())

    with pytest.raises(KeyError, match="old"):
        fail_half_way()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write_whole(path, "text", "it", "stop")
    assert path.read_text() == "text"


def test_an_unwritable_path_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"^cannot write the cat: .*; buy a dog$"):
        write_whole(tmp_path / "file" / "a", "", "the cat", "buy a dog")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CacheError, match="Is a directory"):
        write_whole(tmp_path / "folder", "", "the cat", "buy a dog")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
