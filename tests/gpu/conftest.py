"""The kernels run in triton's interpreter: on CPU tensors, a program after the other. Set before triton is
imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
