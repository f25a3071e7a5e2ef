"""Export a script that loads a checkpoint by a `device_map`."""

__all__ = ["place_script"]

_SCRIPT = '''\
"""Load a checkpoint on the devices of this plan, as `model`: python -i place.py CHECKPOINT."""
import json, sys
from pathlib import Path
import torch
from transformers import {architecture}

places = json.loads(Path(__file__).with_name("device_map.json").read_text())
model = {architecture}.from_pretrained(
    sys.argv[1],  # a folder, or a name on the hub
    device_map=places,  # modules on cpu and disk are copied to the first device in it
    offload_folder="offload",  # for modules on disk
    dtype={dtype},
).eval()
'''


def place_script(architecture: str, dtype: str) -> str:
    """Return a Python script for a transformers class, to lie beside ``device_map.json``."""
    return _SCRIPT.format(architecture=architecture, dtype=f"torch.{dtype}")
