#!/usr/bin/env python3
"""Prints the bitmaps of crates/quant/src/grid_points.rs from the grids of the `gguf` package.

    pip install gguf && tools/make_grids.py

A grid of the IQ formats is a sorted list of points with 8 digits of base 3 or 4 digits of base 8, the first digit lowest: bit
n of a bitmap says that point n is in it.
"""
import gguf.quants as q
import numpy as np

for name, c in (
    ("IQ2_XXS", q.IQ2_XXS), ("IQ2_XS", q.IQ2_XS), ("IQ2_S", q.IQ2_S), ("IQ1", q.IQ1_S),
    ("IQ3_XXS", q.IQ3_XXS), ("IQ3_S", q.IQ3_S),
):
    c.init_grid()
    base, (_, digits) = len(c.grid_map), c.grid_shape
    index = np.searchsorted(c.grid_map, c.grid.reshape(c.grid_shape))
    points = (index * base ** np.arange(digits)).sum(1)
    assert (np.diff(points) > 0).all()
    bitmap = sum(1 << int(p) for p in points)
    words = [bitmap >> i & 2**64 - 1 for i in range(0, base**digits, 64)]
    print(f"const {name}_BITS: [u64; {len(words)}] = [")
    for i in range(0, len(words), 5):
        print("    " + " ".join(f"0x{w:016x}," for w in words[i : i + 5]))
    print("];\n")
