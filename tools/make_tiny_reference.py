#!/usr/bin/env python3
"""Makes the tiny models of crates/forebay/tests/families/ and their reference answers.

Usage: make_tiny_reference.py OUT_DIR [--llama-cpp DIR] [FAMILY ...]

For each family: random bf16 weights scaled so that logits are of order 1 to 10, saved by transformers
(`model.safetensors`, `config.json`), answers of transformers in fp32 (eager, CPU; `golden.json`, the schema of
`forebay eval golden`), and, with --llama-cpp (a source tree that has convert_hf_to_gguf.py), the same
weights as `gguf/model.gguf`. Weights are a function of the family's name. Needs transformers, torch, tokenizers.
"""

import argparse
import json
import os
import subprocess
import sys
import zlib

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 96
COMMON = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=16, intermediate_size=48, max_position_embeddings=256,
              rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=0, pad_token_id=0)

FAMILIES = {
    # Llama 3 scaling with pairs in all three zones; biases everywhere.
    "llama": dict(model_type="llama", tie_word_embeddings=False, attention_bias=True, mlp_bias=True,
                  rope_parameters=dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0,
                                       high_freq_factor=4.0, original_max_position_embeddings=32)),
    "mistral": dict(model_type="mistral", tie_word_embeddings=False, sliding_window=16,
                    rope_parameters=dict(rope_type="default", rope_theta=1000.0)),
    "mixtral": dict(model_type="mixtral", tie_word_embeddings=False, intermediate_size=16, num_local_experts=4,
                    num_experts_per_tok=2, sliding_window=None,
                    rope_parameters=dict(rope_type="default", rope_theta=1000.0)),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True, use_sliding_window=False,
                  rope_parameters=dict(rope_type="default", rope_theta=1000.0)),
    "qwen3": dict(model_type="qwen3", tie_word_embeddings=False, attention_bias=False, use_sliding_window=False,
                  rope_parameters=dict(rope_type="default", rope_theta=1000.0)),
    # Seven layers, because the period of sliding layers is not stored in GGUF files.
    "gemma3": dict(model_type="gemma3_text", tie_word_embeddings=True, hidden_size=24, num_hidden_layers=7,
                   num_attention_heads=2, num_key_value_heads=1, intermediate_size=20, sliding_window=12,
                   query_pre_attn_scalar=16, hidden_activation="gelu_pytorch_tanh",
                   rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=2.0),
                                        sliding_attention=dict(rope_type="default", rope_theta=100.0))),
    # One gated delta net with two value heads per key head, one full layer with a gated output and partial rope.
    "qwen3_5": dict(model_type="qwen3_5_text", tie_word_embeddings=False, head_dim=32, num_attention_heads=2,
                    num_key_value_heads=1, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
                    linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
                    full_attention_interval=2,
                    rope_parameters=dict(rope_type="default", rope_theta=1000.0, partial_rotary_factor=0.25,
                                         mrope_section=[2, 1, 1], mrope_interleaved=True)),
    # Factors of layers and experts that are not 1, which trained tiny models have.
    "gemma4": dict(model_type="gemma4_text", tie_word_embeddings=True, num_attention_heads=2,
                   num_key_value_heads=2, intermediate_size=28, sliding_window=12, enable_moe_block=True,
                   num_experts=4, top_k_experts=2, moe_intermediate_size=16, hidden_size_per_layer_input=0,
                   vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=0, attention_k_eq_v=True,
                   layer_types=["sliding_attention", "full_attention"], final_logit_softcapping=8.0,
                   global_head_dim=32, num_global_key_value_heads=1,
                   rope_parameters=dict(full_attention=dict(rope_type="proportional", rope_theta=5000.0,
                                                            partial_rotary_factor=0.25),
                                        sliding_attention=dict(rope_type="default", rope_theta=100.0))),
}
NO_GGUF = {"mistral"}  # its window is not stored there


def randomize(model, family, generator):
    gemma = family.startswith("gemma")
    tensors = list(model.named_parameters()) + [b for b in model.named_buffers() if "layer_scalar" in b[0]]
    for name, p in tensors:
        r = torch.randn(p.shape, generator=generator)
        if name.endswith("layer_scalar") or "scale" in name:
            value = 1 + 0.3 * r
        elif name.endswith("A_log"):
            value = 0.5 * r
        elif name.endswith("dt_bias"):
            value = 0.5 * r - 1
        elif "conv1d" in name:
            value = 0.5 * r
        elif "norm" in name:
            # Norms that compute 1 + w; the one inside linear attention is plain.
            plus_one = family == "gemma3" or family == "qwen3_5" and "linear_attn" not in name
            value = 0.3 * r + (0 if plus_one else 1)
        elif name.endswith("bias"):
            value = 0.3 * r
        elif "embed_tokens" in name:
            value = r * (0.5 if gemma else 1.0)
        elif "lm_head" in name:
            value = r * 3 * p.shape[-1] ** -0.5
        elif "gate.weight" in name or "router.proj" in name:
            value = r * 2 * p.shape[-1] ** -0.5
        else:
            value = r * 1.2 * p.shape[-1] ** -0.5
        p.data.copy_(value)


def golden(folder, model_type, prompts, steps):
    m = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").float().eval()
    cases = []
    with torch.no_grad():
        for p in prompts:
            n = len(p)
            r = m(torch.tensor([p]), use_cache=True)
            logits = r.logits[0]
            case = dict(prompt=p, positions=[])
            for pos in sorted({0, n // 3, max(n - 2, 0), n - 1}):
                t = logits[pos].topk(40)
                case["positions"].append(dict(position=pos, logsumexp=round(logits[pos].logsumexp(-1).item(), 5),
                                              top_ids=t.indices.tolist(),
                                              top_logits=[round(v, 5) for v in t.values.tolist()]))
            case["last_logits"] = [round(v, 5) for v in logits[-1].tolist()]
            case["greedy"], case["margin"] = [], []
            past, row = r.past_key_values, logits[-1]
            for _ in range(steps):
                t = row.topk(2)
                case["greedy"].append(t.indices[0].item())
                case["margin"].append(round((t.values[0] - t.values[1]).item(), 4))
                r = m(t.indices[:1].view(1, 1), past_key_values=past, use_cache=True)
                past, row = r.past_key_values, r.logits[0, -1]
            cases.append(case)
    largest = max(abs(v) for c in cases for v in c["last_logits"])
    print(f"  largest logit {largest:.2f}, smallest margin {min(min(c['margin']) for c in cases)}")
    return dict(reference="transformers fp32 eager CPU", model=model_type, cases=cases)


def write_tokenizer(folder):
    """Byte-level BPE with one merge over the printable characters of ASCII."""
    vocab = {"<|endoftext|>": 0}
    for c in range(33, 33 + VOCAB - 3):
        vocab[chr(c)] = len(vocab)
    vocab["\u0120"] = len(vocab)
    vocab["th"] = len(vocab)
    piece = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    special = dict(id=0, content="<|endoftext|>", single_word=False, lstrip=False, rstrip=False,
                   normalized=False, special=True)
    tokenizer = dict(version="1.0", truncation=None, padding=None, added_tokens=[special], normalizer=None,
                     pre_tokenizer=piece, post_processor=None, decoder=piece,
                     model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None,
                                end_of_word_suffix=None, fuse_unk=False, byte_fallback=False,
                                ignore_merges=False, vocab=vocab, merges=[["t", "h"]]))
    with open(f"{folder}/tokenizer.json", "w") as f:
        json.dump(tokenizer, f, ensure_ascii=False)
    with open(f"{folder}/tokenizer_config.json", "w") as f:
        json.dump(dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<|endoftext|>"), f)


CONVERT = """
import runpy, sys
sys.path.insert(0, {tree!r}); sys.path.insert(0, {tree!r} + '/gguf-py')
import conversion.base as base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: 'gpt-2'
import importlib
for name in ('llama', 'qwen', 'gemma'):
    module = importlib.import_module('conversion.' + name)
    for value in vars(module).values():
        if isinstance(value, type) and 'set_vocab' in vars(value):
            value.set_vocab = base.TextModel._set_vocab_gpt2
sys.argv = ['convert_hf_to_gguf.py', {folder!r}, '--outfile', {out!r}, '--outtype', 'bf16'] + {more!r}
runpy.run_path({tree!r} + '/convert_hf_to_gguf.py', run_name='__main__')
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--llama-cpp")
    parser.add_argument("families", nargs="*")
    args = parser.parse_args()
    for family in args.families or FAMILIES:
        print(family)
        generator = torch.Generator().manual_seed(zlib.crc32(family.encode()))
        folder = f"{args.out}/{family}"
        os.makedirs(folder, exist_ok=True)
        settings = dict(COMMON, **FAMILIES[family])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomize(model, family, generator)
        model.to(torch.bfloat16).save_pretrained(folder)
        generation = f"{folder}/generation_config.json"
        if os.path.exists(generation):
            os.remove(generation)
        write_tokenizer(folder)
        draw = lambda n: torch.randint(1, VOCAB, (n,), generator=generator).tolist()
        answers = golden(folder, config.model_type, [draw(3), draw(44)], 12)
        with open(f"{folder}/golden.json", "w") as f:
            json.dump(answers, f, separators=(",", ":"))
        if args.llama_cpp and family not in NO_GGUF:
            tree = os.path.abspath(args.llama_cpp)
            os.makedirs(f"{folder}/gguf", exist_ok=True)
            code = CONVERT.format(tree=tree, folder=os.path.abspath(folder),
                                  out=os.path.abspath(f"{folder}/gguf/model.gguf"),
                                  more=["--no-mtp"] if family == "qwen3_5" else [])
            subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL,
                           stderr=None if os.environ.get("VERBOSE") else subprocess.DEVNULL)


main()
