"""Fuzz tests: random odd user input, files and models, and how the project handles them."""
