"""Export plans to the formats of other tools, so that those can run them."""

from fxpart.plan_export.carriers import Carriers, carriers, map_carriers
from fxpart.plan_export.device_map import DeviceMap, Place, device_map, tiered_device_map
from fxpart.plan_export.engines import EngineFiles, EnginePlan, engine_files, stages_of
from fxpart.plan_export.place_script import place_script
from fxpart.plan_export.split_points import SplitPlace, split_points

__all__ = [
    "Carriers",
    "DeviceMap",
    "EngineFiles",
    "EnginePlan",
    "Place",
    "SplitPlace",
    "carriers",
    "device_map",
    "engine_files",
    "map_carriers",
    "place_script",
    "split_points",
    "stages_of",
    "tiered_device_map",
]
