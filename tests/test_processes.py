"""The same answer in every process, for any hash seed and any addresses of objects."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests.placement.test_contract import places
from tests.torch_compat.partitioner.test_determinism import answers

ROOT = Path(__file__).resolve().parents[1]


def digests() -> list[tuple[str, str]]:
    """Return a digest of what each mode, and each of torch's partitioner, decides."""
    return [
        (mode, hashlib.sha256(repr(decided).encode()).hexdigest())
        for mode, decided in (*places().items(), *answers().items())
    ]


def test_every_process_gives_the_same_answer() -> None:
    # Earlier objects move the nodes to other addresses, by which a set would order them. This
    # process is the third.
    code = (
        "import sys; ballast = [object() for _ in range(int(sys.argv[1]))]\n"
        "from tests.test_processes import digests; print(digests())"
    )
    decided = digests()
    assert {"pipeline", "sparse_nn"} <= {mode for mode, _ in decided}
    for hash_seed, ballast in (("1", "4321"), ("77", "98765")):
        process = subprocess.run(
            [sys.executable, "-c", code, ballast],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        assert process.stdout == f"{decided}\n"
