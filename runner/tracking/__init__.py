"""Where runs are kept: the protocol of a tracker, MLflow, and no tracker at all."""
