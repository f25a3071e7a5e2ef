"""What others measured on real machines and published, beside what fxpart predicts."""
