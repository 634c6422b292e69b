"""From a model file to named tensors: readers that validate, and map without copying. No torch."""
