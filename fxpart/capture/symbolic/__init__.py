"""One capture for any batch size: sizes as polynomials."""
