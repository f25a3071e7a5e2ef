"""Models and constants measured on one GPU, for predictions to be compared with."""
