"""Tensor formats as data: their sizes (`spec`), and what their bits mean (`reference`)."""
