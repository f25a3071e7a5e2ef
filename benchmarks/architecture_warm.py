"""Import and compile once everything that the processes of `benchmarks.architectures` share."""

from benchmarks.architecture_job import judge

judge("ViTModel")
