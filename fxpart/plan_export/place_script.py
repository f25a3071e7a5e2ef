"""Export a script that loads a checkpoint by a `device_map`."""

from fxpart.plan_export.device_map import Place

__all__ = ["place_script"]

_SCRIPT = '''\
"""Load a checkpoint on the devices of this plan, as `model`: python -i place.py CHECKPOINT."""
import json, sys
from pathlib import Path
import torch
from accelerate import dispatch_model, init_empty_weights, load_checkpoint_in_model
from transformers import AutoConfig, {architecture}

weights, offload = sys.argv[1], "offload"  # the latter for modules on disk
places = json.loads(Path(__file__).with_name("device_map.json").read_text())
with init_empty_weights():
    model = {architecture}._from_config(AutoConfig.from_pretrained(weights), dtype={dtype})
model.tie_weights()
load_checkpoint_in_model(model, weights, places, offload_folder=offload, dtype={dtype})
model = dispatch_model(model.eval(), places, main_device={main!r}, offload_dir=offload)
'''


def place_script(architecture: str, dtype: str, main_device: Place) -> str:
    """Return a Python script for a transformers class, to lie beside ``device_map.json``."""
    return _SCRIPT.format(architecture=architecture, dtype=f"torch.{dtype}", main=main_device)
