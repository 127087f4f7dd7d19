"""GC-MoE: an expert-parallel FP8 x MXFP4 mixture-of-experts layer for decode."""
