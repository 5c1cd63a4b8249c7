#!/usr/bin/env python3
"""Writes reference answers (models/reference/*.json) with the Hugging Face implementation: fp32, eager, CPU.

    pip install torch transformers gguf
    tools/golden_from_gguf.py models/tiny-qwen3-moe/qwen3_moe-Q4_K_M.gguf --prompts models/reference/prompts.json \\
        --out models/reference/qwen3_moe-Q4_K_M.json
    tools/golden_from_gguf.py models/tiny-gpt-oss --prompts models/reference/prompts.json \\
        --out models/reference/gpt_oss-hf.json

MODEL is a GGUF file (architecture qwen3moe or gemma4), whose weights the `gguf` package dequantises and whose keys give the
transformers configuration, or a folder that transformers opens itself. Nothing of Forebay takes part.

Per prompt: the top 40 logits and the log-sum-exp at four positions, logits of the last one (whole in the first case,
the first --last-logits in the others, to keep the file small), greedy tokens, and the margin between first and second at
each greedy step.
"""
import argparse
import json
import re
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

# Names of a layer's tensors: in GGUF, and in transformers.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
GEMMA4_LAYER = {
    **{k: v for k, v in LAYER.items() if k.startswith("attn")},
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "router.proj",
}
# Whole names, which end differently in the two.
GEMMA4_WHOLE = {
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "layer_output_scale.weight": "layer_scalar",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def gemma4_config(field, vocab, tensors):
    """Keys of Gemma 4. The part of a full layer's heads that turns is where rope_freqs holds no huge divisor."""
    sliding = [bool(x) for x in field("attention.sliding_window_pattern")]
    kv_heads = [int(x) for x in field("attention.head_count_kv")]
    turning = float((tensors["rope_freqs.weight"].data < 1e20).mean())
    return transformers.Gemma4TextConfig(
        vocab_size=vocab,
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        moe_intermediate_size=field("expert_feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=kv_heads[sliding.index(True)],
        num_global_key_value_heads=kv_heads[sliding.index(False)],
        head_dim=field("attention.key_length_swa"),
        global_head_dim=field("attention.key_length"),
        attention_k_eq_v=f"blk.{sliding.index(False)}.attn_v.weight" not in tensors,
        enable_moe_block=True,
        num_experts=field("expert_count"),
        top_k_experts=field("expert_used_count"),
        layer_types=["sliding_attention" if s else "full_attention" for s in sliding],
        sliding_window=field("attention.sliding_window"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=field("context_length"),
        final_logit_softcapping=field("final_logit_softcapping"),
        hidden_size_per_layer_input=0,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": turning,
                               "rope_theta": field("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": field("rope.freq_base_swa")},
        },
        tie_word_embeddings="output.weight" not in tensors,
        attn_implementation="eager",
    )


def from_gguf(path):
    """A transformers model in fp32 with the dequantised weights of a GGUF file."""
    import gguf

    reader = gguf.GGUFReader(path)
    key = lambda name: reader.fields[name].contents()
    arch = key("general.architecture")
    if arch not in ("qwen3moe", "gemma4"):
        raise SystemExit(f"{path}: architecture {arch} has no mapping here")
    field = lambda name: key(f"{arch}.{name}")
    tensors = {t.name: t for t in reader.tensors}
    vocab = len(key("tokenizer.ggml.tokens"))
    layer_names = GEMMA4_LAYER if arch == "gemma4" else LAYER
    config = gemma4_config(field, vocab, tensors) if arch == "gemma4" else transformers.Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        moe_intermediate_size=field("expert_feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        head_dim=field("attention.key_length"),
        num_experts=field("expert_count"),
        num_experts_per_tok=field("expert_used_count"),
        norm_topk_prob=True,
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=field("context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors,
        attn_implementation="eager",
    )

    def weight(name):
        # [rows, cols] or [experts, rows, cols]: GGUF lists the fastest dimension first.
        t = tensors[name]
        data = gguf.quants.dequantize(t.data, t.tensor_type)
        return torch.from_numpy(data.copy()).reshape([int(n) for n in reversed(t.shape)]).float()

    state = {}
    for name in tensors:
        part, _, kind = name.rpartition(".")
        if part in TOP:
            state[f"{TOP[part]}.{kind}"] = weight(name)
            continue
        if name == "rope_freqs.weight":
            continue
        layer, part = re.fullmatch(r"blk\.(\d+)\.(\w+)", part).groups()
        at = f"model.layers.{layer}"
        if arch == "gemma4" and f"{part}.{kind}" in GEMMA4_WHOLE:
            state[f"{at}.{GEMMA4_WHOLE[f'{part}.{kind}']}"] = weight(name)
        elif part in layer_names:
            state[f"{at}.{layer_names[part]}.{kind}"] = weight(name)
        elif part == "ffn_gate_exps":
            up = weight(name.replace("gate_exps", "up_exps"))
            state[f"{at}.mlp.experts.gate_up_proj"] = torch.cat([weight(name), up], dim=1)
        elif part == "ffn_down_exps":
            state[f"{at}.mlp.experts.down_proj"] = weight(name)
        elif part != "ffn_up_exps":
            raise SystemExit(f"{path}: {name} has no mapping here")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [m for m in missing if not (m == "lm_head.weight" and config.tie_word_embeddings)]
    if missing or unexpected:
        raise SystemExit(f"{path}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model, arch


def from_folder(path):
    """A folder as transformers opens it, in fp32."""
    config = json.loads((path / "config.json").read_text())
    more = {}
    if "quantization_config" in config:
        more["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **more)
    return model, config["model_type"]


def rounded(values, digits):
    return [round(v, digits) for v in values.tolist()]


@torch.no_grad()
def case(model, prompt, steps, last_logits):
    n = len(prompt)
    result = model(torch.tensor([prompt]), use_cache=True)
    logits = result.logits[0]  # [n, vocab]
    out = {"prompt": prompt, "positions": [], "last_logits": rounded(logits[-1][:last_logits], 4), "greedy": [], "margin": []}
    for position in sorted({0, n // 3, max(n - 2, 0), n - 1}):
        top = logits[position].topk(40)
        out["positions"].append({
            "position": position,
            "logsumexp": round(logits[position].logsumexp(-1).item(), 5),
            "top_ids": top.indices.tolist(),
            "top_logits": rounded(top.values, 5),
        })
    past, row = result.past_key_values, logits[-1]
    for _ in range(steps):
        top = row.topk(2)
        out["greedy"].append(top.indices[0].item())
        out["margin"].append(round((top.values[0] - top.values[1]).item(), 4))
        result = model(top.indices[:1].view(1, 1), past_key_values=past, use_cache=True)
        past, row = result.past_key_values, result.logits[0, -1]
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="a JSON list of lists of token ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--greedy", type=int, default=48, help="greedy tokens per prompt")
    parser.add_argument("--last-logits", type=int, default=1024, help="logits kept of the last rows but the first")
    args = parser.parse_args()
    torch.set_num_threads(2)
    model, name = from_folder(args.model) if args.model.is_dir() else from_gguf(args.model)
    model = model.float().eval()
    prompts = json.loads(args.prompts.read_text())
    whole = model.config.vocab_size
    cases = [case(model, p, args.greedy, args.last_logits if i else whole) for i, p in enumerate(prompts)]
    how = f"transformers {transformers.__version__}, torch {torch.__version__}, fp32, eager, CPU, weights dequantised to fp32"
    report = {"reference": how, "model": name, "file": args.model.name, "cases": cases}
    args.out.write_text(json.dumps(report, separators=(",", ":")) + "\n")
    print(args.out, args.out.stat().st_size, "bytes; smallest margins", [min(c["margin"]) for c in cases])


if __name__ == "__main__":
    main()
