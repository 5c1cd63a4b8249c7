#!/usr/bin/env python3
"""Makes what block drafters with sliding and causal layers are compared with.

Usage: make_dflash_reference.py TARGET_DIR DRAFTER_DIR PROMPTS.json OUT.json

A published drafter is run with other `layer_types`, windows and causality than it was trained with, over hidden states that hooks take from
the target: what it drafts then is worth little, its logits are as well defined. The drafter's layers are transformers' Qwen3 parts; the
attention over context and block is written out here. fp32, eager, CPU. Needs transformers, torch, safetensors.
"""

import json
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb)

# Changes to config.json.
VARIANTS = [
    dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=16),
    dict(layer_types=["sliding_attention", "sliding_attention"], use_sliding_window=True, sliding_window=5),
    dict(is_causal=True),
    dict(dflash_config=dict(causal=True)),
]


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T


def norm(weights, name, x, eps):
    module = Qwen3RMSNorm(x.shape[-1], eps)
    module.weight.data = weights[f"{name}.weight"]
    return module(x)


def places(weights, config, features, block, n):
    """Hidden states [B, d] after the last norm; features [n, taps * d], block [B, d]."""
    eps, heads, kv_heads, d = (config[k] for k in ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim"))
    rope = Qwen3RotaryEmbedding(Qwen3Config(
        head_dim=d, hidden_size=config["hidden_size"], num_attention_heads=heads, max_position_embeddings=4096,
        rope_parameters=dict(rope_type="default", rope_theta=config["rope_theta"])))
    size = block.shape[0]
    positions = torch.arange(n + size)
    cos, sin = rope(block, positions[None])
    context = norm(weights, "hidden_norm", linear(weights, "fc", features), eps)
    told = config["dflash_config"].get("causal", config.get("is_causal"))
    x = block
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}"
        sliding = config["use_sliding_window"] and config["layer_types"][i] == "sliding_attention"
        causal = sliding if told is None else told
        u = norm(weights, f"{at}.input_layernorm", x, eps)
        both = torch.cat([context, u])
        q = linear(weights, f"{at}.self_attn.q_proj", u).view(size, heads, d)
        k = linear(weights, f"{at}.self_attn.k_proj", both).view(n + size, kv_heads, d)
        v = linear(weights, f"{at}.self_attn.v_proj", both).view(n + size, kv_heads, d)
        q = norm(weights, f"{at}.self_attn.q_norm", q, eps).transpose(0, 1)[None]
        k = norm(weights, f"{at}.self_attn.k_norm", k, eps).transpose(0, 1)[None]
        q, _ = apply_rotary_pos_emb(q, q, cos[:, n:], sin[:, n:])
        k, _ = apply_rotary_pos_emb(k, k, cos, sin)
        k = k[0].repeat_interleave(heads // kv_heads, 0)
        v = v.transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
        distance = positions[n:, None] - positions[None, :]
        seen = torch.ones(size, n + size, dtype=torch.bool)
        if causal:
            seen &= distance >= 0
        if sliding:
            seen &= distance < config["sliding_window"]
        scores = (q[0] @ k.transpose(1, 2)) * d**-0.5
        out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        x = x + linear(weights, f"{at}.self_attn.o_proj", out.transpose(0, 1).reshape(size, heads * d))
        mlp = Qwen3MLP(Qwen3Config(hidden_size=config["hidden_size"], intermediate_size=config["intermediate_size"], hidden_act="silu"))
        mlp.load_state_dict({f"{p}.weight": weights[f"{at}.mlp.{p}.weight"] for p in ("gate_proj", "up_proj", "down_proj")})
        x = x + mlp(norm(weights, f"{at}.post_attention_layernorm", x, eps))
    return norm(weights, "norm", x, eps)


@torch.no_grad()
def main():
    target_dir, drafter_dir, prompts, out = sys.argv[1:5]
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32, attn_implementation="eager").float().eval()
    weights = {k: v.float() for k, v in load_file(f"{drafter_dir}/model.safetensors").items()}
    config = json.load(open(f"{drafter_dir}/config.json"))
    taps, mask = config["dflash_config"]["target_layer_ids"], config["dflash_config"]["mask_token_id"]
    seen = {}
    for tap in taps:
        def hook(module, args, out, tap=tap):
            seen[tap] = (out[0] if isinstance(out, tuple) else out)[0]
        model.model.layers[tap].register_forward_hook(hook)
    cases = []
    for prompt in json.load(open(prompts))[1:3]:
        prompt = prompt[:90]
        anchor = model(torch.tensor([prompt])).logits[0, -1].argmax().item()
        features = torch.cat([seen[tap] for tap in taps], -1)
        block = model.get_input_embeddings()(torch.tensor([anchor] + [mask] * (config["block_size"] - 1)))
        for change in [{}] + VARIANTS:
            own = {**config, **change, "dflash_config": {**config["dflash_config"], **change.get("dflash_config", {})}}
            logits = model.lm_head(places(weights, own, features, block, len(prompt)))[1:]
            case = dict(prompt=prompt, anchor=anchor, change=change, places=[])
            for row in logits:
                top = row.topk(8)
                case["places"].append(dict(
                    logsumexp=round(row.logsumexp(-1).item(), 5), top_ids=top.indices.tolist(),
                    top_logits=[round(v, 5) for v in top.values.tolist()]))
            cases.append(case)
            print(len(prompt), change, [p["top_ids"][0] for p in case["places"]])
    json.dump(dict(reference="transformers' Qwen3 parts, fp32 eager CPU", cases=cases), open(out, "w"))


main()
