"""What a run shows and writes: terminal, figures, text and JSON files."""
