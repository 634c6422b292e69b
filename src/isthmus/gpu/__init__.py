"""Triton kernels for what lives on a GPU, each beside a torch reference of the same signature.

The references (`reference*`) run on any device and need torch alone: they are the oracle of the kernels and
the path of a machine without a GPU. Importing a module of kernels imports triton, which comes with CUDA
builds of torch; so nothing outside this package imports one at its top level.

    tiles        packed weights in device memory: the CPU's bytes as they are
    unpack       what the bits of Q8_0, Q4_K, Q5_K, Q6_K and MXFP4 mean; all that a format contributes here
    products     the two inner loops over packed weights: few rows (fp32 fma), many rows (bf16 tensor cores)
    linear       out = W x + bias + residual
    dequantise   packed weights as bf16 in memory, and `linear` of so many rows that it pays
    plain        products with weights that are bf16 or fp32, by torch
    fp8          matrices of FP8 with scales by block, row or at all, and products with them, by torch
    embedding    rows of a packed matrix
    experts      routed experts that are resident: rows grouped by slot, SwiGLU, weighted sum in fixed order
    grouping     pairs of a step by slot, without waiting for the device
    rows         RMS norm with residual, weighted sums
    activation   of a gated FFN
    cache        rows of a paged cache, of bf16 or q8_0: all that is known of how they lie
    rope         head norms, rotation and cache writes in one pass
    router       scores, groups, top k
    decode       attention of single rows over a paged cache, keys split over programs (GQA and absorbed MLA)
    prefill      attention of chunks of rows, over a paged cache or over expanded keys (GQA and MLA)

`kernels` and `reference_kernels` hold all of them under the same names, for who takes either.

Every wrapper checks shapes and dtypes on the host, reads no device memory there, allocates by shapes alone
and has a grid that depends on shapes alone, so a step of them can be captured in a CUDA graph. Indices
inside device tensors (slots, block tables, positions) are trusted: who writes them checks them.
"""
