"""What a training step needs beyond forward and backward: the optimizer's updates and state."""

from fxpart.training.optimizer import IMPLEMENTATIONS, OPTIMIZERS, Optimizer, with_optimizer

__all__ = ["IMPLEMENTATIONS", "OPTIMIZERS", "Optimizer", "with_optimizer"]
