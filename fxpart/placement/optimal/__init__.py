"""The best placement within a time limit, and a lower bound to judge it by."""
