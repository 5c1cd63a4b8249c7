#!/usr/bin/env python3
"""Writes crates/quant/tests/data/dequant.bin: bytes of every weight format and the f32 weights that outside code
makes of them: the `gguf` package for GGUF block formats, `mlx` (CPU) for MLX affine and MLX mxfp4.

    pip install gguf 'mlx[cpu]' && tools/make_quant_vectors.py

File, little endian: u32 number of cases; per case: u8 length and name, u32 rows, u32 cols, u8 planes, per plane u32 length
and bytes, then rows * cols f32.
"""
import struct
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np

rng = np.random.default_rng(20240607)
cases = []


def f16_bytes(n, scale=0.02):
    """n random halves, some negative, some denormal, as bytes [n, 2]."""
    x = (rng.standard_normal(n) * scale).astype(np.float16)
    x[:: 7] = np.float16(3e-6)
    return x.view(np.uint8).reshape(n, 2)


def gguf_case(name, qtype, cols, put_scales):
    rows = 2
    elements, size = gguf.GGML_QUANT_SIZES[qtype]
    blocks = rng.integers(0, 256, (rows * cols // elements, size), dtype=np.uint8)
    put_scales(blocks)
    expected = gguf.quants.dequantize(blocks.reshape(rows, -1), qtype).astype(np.float32)
    assert expected.shape == (rows, cols) and np.isfinite(expected).all()
    cases.append((name, rows, cols, [blocks.tobytes()], expected))


def halves_at(*offsets):
    def put(blocks):
        for o in offsets:
            blocks[:, o : o + 2] = f16_bytes(len(blocks))
    return put


def e8m0(blocks):
    blocks[:, 0] = rng.integers(90, 160, len(blocks))
    blocks[:4, 0] = [0, 1, 2, 252]


def iq1_m(blocks):
    # The top nibbles of four words, lowest first, are the half.
    half = f16_bytes(len(blocks)).view(np.uint16)[:, 0]
    for i in range(4):
        blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | (half >> 4 * i & 15) << 4


Q = gguf.GGMLQuantizationType
gguf_case("Q8_0", Q.Q8_0, 160, halves_at(0))
gguf_case("Q4_0", Q.Q4_0, 160, halves_at(0))
gguf_case("Q5_1", Q.Q5_1, 160, halves_at(0, 2))
gguf_case("IQ4_NL", Q.IQ4_NL, 160, halves_at(0))
gguf_case("Q4_1", Q.Q4_1, 160, halves_at(0, 2))
gguf_case("Q5_0", Q.Q5_0, 160, halves_at(0))
gguf_case("Q4_K", Q.Q4_K, 512, halves_at(0, 2))
gguf_case("Q6_K", Q.Q6_K, 512, halves_at(208))
gguf_case("Q2_K", Q.Q2_K, 512, halves_at(80, 82))
gguf_case("Q3_K", Q.Q3_K, 512, halves_at(108))
gguf_case("Q5_K", Q.Q5_K, 512, halves_at(0, 2))
for qtype in Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS, Q.IQ3_S, Q.IQ1_S, Q.IQ4_XS:
    gguf_case(qtype.name, qtype, 512, halves_at(0))
gguf_case("IQ1_M", Q.IQ1_M, 512, iq1_m)
gguf_case("MXFP4", Q.MXFP4, 160, e8m0)
for name, qtype in ("F16", Q.F16), ("BF16", Q.BF16):
    x = rng.standard_normal((2, 40)).astype(np.float32)
    data = gguf.quants.quantize(x, qtype)
    expected = gguf.quants.dequantize(data, qtype).astype(np.float32)
    cases.append((name, 2, 40, [data.tobytes()], expected))

mx.set_default_device(mx.cpu)
for bits, group, params in [
    (4, 32, "F32"), (4, 64, "BF16"), (8, 64, "BF16"), (8, 128, "F16"), (4, 128, "F16"),
    (2, 64, "F32"), (3, 64, "F32"), (5, 64, "BF16"), (6, 128, "F32"), (8, 32, "F32"),
]:
    rows, cols = 2, 256 if group < 128 else 384
    words = rng.integers(0, 2**32, (rows, cols * bits // 32), dtype=np.uint32)
    scales, biases = (rng.standard_normal((2, rows, cols // group)) * 0.05).astype(np.float32)
    dtype = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}[params]
    planes = [words.tobytes()]
    for p in (scales, biases):
        p = mx.array(p).astype(dtype)
        planes.append(np.array(p.view(mx.uint16 if params != "F32" else mx.uint32)).tobytes())
    # The parameters' exact values as f32, so that MLX computes in f32 and does not round to the parameters' type.
    s, b = (mx.array(p).astype(dtype).astype(mx.float32) for p in (scales, biases))
    expected = np.array(mx.dequantize(mx.array(words), s, b, group_size=group, bits=bits))
    cases.append((f"MLX {bits} {group} {params}", rows, cols, planes, expected))

words = rng.integers(0, 2**32, (2, 160 // 8), dtype=np.uint32)
scales = rng.integers(90, 160, (2, 160 // 32), dtype=np.uint8)
expected = mx.dequantize(mx.array(words), mx.array(scales), group_size=32, bits=4, mode="mxfp4")
expected = np.array(expected.astype(mx.float32))
cases.append(("MXFP4 split", 2, 160, [words.tobytes(), scales.tobytes()], expected))

out = bytearray(struct.pack("<I", len(cases)))
for name, rows, cols, planes, expected in cases:
    out += struct.pack("<B", len(name)) + name.encode() + struct.pack("<IIB", rows, cols, len(planes))
    for plane in planes:
        out += struct.pack("<I", len(plane)) + plane
    expected = np.ascontiguousarray(expected, dtype="<f4")
    assert expected.shape == (rows, cols), (name, expected.shape)
    out += expected.tobytes()
path = Path(__file__).parent.parent / "crates/quant/tests/data/dequant.bin"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_bytes(out)
print(f"{path}: {len(cases)} cases, {len(out)} bytes")
