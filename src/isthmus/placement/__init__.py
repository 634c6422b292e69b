"""Where a model goes and whether it fits, said from the file's header before any weight is read."""
