"""The best placement within a time, and a bound that shows how good it is."""
