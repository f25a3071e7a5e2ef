"""Cost of a placement of a published problem, from its JSON file and the published definition.

After Tarnawski et al.: Efficient Algorithms for Device Placement of DNN Graph Operators, NeurIPS
2020, arXiv:2006.16423. Independent of fxpart, so that values of fxpart can be checked against it.
"""

import json
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

__all__ = ["largest_load_ms", "read_nodes", "sample_ms"]

Nodes = Mapping[str, Mapping[str, Any]]
"""By name; with `successors`, a list of names, and `move_ms`, the time to move the output."""


def read_nodes(path: Path, placement: Mapping[str, int]) -> tuple[Nodes, int]:
    """Return the nodes of a problem and its number of accelerators, after checking a placement.

    `placement` maps each node to a device: accelerators first, then CPU cores.

    Raises:
        ValueError: if the problem does not allow the placement, or two nodes have the same name.

    """
    document = json.loads(path.read_text())
    accelerators = int(document["maxFPGAs"])
    name_of = {node["id"]: str(node.get("name", node["id"])) for node in document["nodes"]}
    nodes = {
        name_of[node["id"]]: {**node, "successors": [], "move_ms": 0.0}
        for node in document["nodes"]
    }
    if len(nodes) < len(name_of) or set(nodes) != set(placement):
        raise ValueError(f"{path}: a placement by name needs a name of its own for every node")
    for edge in document["edges"]:
        source = nodes[name_of[edge["sourceId"]]]
        source["move_ms"] = edge["cost"]
        source["successors"].append(name_of[edge["destId"]])
    held_bytes = [0.0] * accelerators
    colours: dict[object, int] = {}
    for name, node in nodes.items():
        device, colour = placement[name], node.get("colorClass")
        if colour is not None and colours.setdefault(colour, device) != device:
            raise ValueError(f"{path}: {name} is apart from another of its colour")
        if device < accelerators:
            held_bytes[device] += node["size"]
            if not node.get("supportedOnFpga", True):
                raise ValueError(f"{path}: {name} cannot run on an accelerator")
    if max(held_bytes, default=0.0) > document["maxSizePerFPGA"]:
        raise ValueError(f"{path}: an accelerator holds {max(held_bytes):.0f} bytes, too many")
    return nodes, accelerators


def largest_load_ms(path: Path, placement: Mapping[str, int]) -> float:
    """Return the largest load of an accelerator or a CPU core."""
    nodes, accelerators = read_nodes(path, placement)
    loads = dict.fromkeys(placement.values(), 0.0)
    for name, node in nodes.items():
        own_device = placement[name]
        loads[own_device] += node["fpgaLatency" if own_device < accelerators else "cpuLatency"]
        other_devices = {placement[reader] for reader in node["successors"]} - {own_device}
        for device in other_devices | ({own_device} if other_devices else set()):
            if device < accelerators:
                loads[device] += node["move_ms"]
    return max(loads.values())


def sample_ms(path: Path, placement: Mapping[str, int]) -> float:
    """Return the time of one sample, where an accelerator runs all its nodes as one piece.

    Raises:
        graphlib.CycleError: if two pieces wait for each other.

    """
    nodes, accelerators = read_nodes(path, placement)
    piece_of = {n: d if d < accelerators else n for n, d in placement.items()}
    time_of: dict[str | int, float] = dict.fromkeys(piece_of.values(), 0.0)
    waits_for: dict[str | int, set[str | int]] = {piece: set() for piece in time_of}
    for name, node in nodes.items():
        own_piece = piece_of[name]
        time_of[own_piece] += node["cpuLatency" if own_piece == name else "fpgaLatency"]
        other_pieces = {piece_of[reader] for reader in node["successors"]} - {own_piece}
        for piece in other_pieces:
            waits_for[piece].add(own_piece)
        for piece in other_pieces | ({own_piece} if other_pieces else set()):
            if isinstance(piece, int):
                time_of[piece] += node["move_ms"]
    done: dict[str | int, float] = {}
    for piece in TopologicalSorter(waits_for).static_order():
        done[piece] = time_of[piece] + max((done[p] for p in waits_for[piece]), default=0.0)
    return max(done.values())
