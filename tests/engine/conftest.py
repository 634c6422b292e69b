"""As in a loaded engine: torch has one thread, since the native pool has the cores."""

import torch

torch.set_num_threads(1)
