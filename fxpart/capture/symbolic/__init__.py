"""One capture for any input sizes, with sizes and costs as polynomials."""
