"""Several commands in one process, so that imports are paid once."""

import json
from pathlib import Path

from tests.runner.command import Done, run

_MARK = "== command ended with "
_PROGRAM = f"""
import json
import sys
from runner.app import main
from runner.cli import ending

commands = json.loads(sys.argv[1])
for command in commands:
    ending._codes.clear()
    sys.argv[1:] = command
    code = main()
    for stream in (sys.stdout, sys.stderr):
        print("{_MARK}" + str(code), file=stream, flush=True)
"""


def run_several(folder: Path, *commands: list[str]) -> list[Done]:
    """Run the commands in `folder`, one after the other; return their results."""
    whole = run(folder, json.dumps(commands), program=("-c", _PROGRAM))
    outs, errs = (text.split(_MARK) for text in (whole.out, whole.err))
    assert len(outs) == len(errs) == len(commands) + 1, whole.err
    # The text after a mark begins with the exit code of the command before.
    codes = [int(part.partition("\n")[0]) for part in outs[1:]]
    streams = [
        [parts[0], *(part.partition("\n")[2] for part in parts[1:])] for parts in (outs, errs)
    ]
    return [Done(*result) for result in zip(codes, streams[0][:-1], streams[1][:-1], strict=True)]
