"""Drop-in replacements under the names of torch, inductor and slapo."""
