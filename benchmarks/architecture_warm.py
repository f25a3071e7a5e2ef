"""Imports and compiles once what every process of `benchmarks.architectures` needs."""

from benchmarks.architecture_job import judge

judge("ViTModel")
