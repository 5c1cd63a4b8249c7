#!/usr/bin/env python3
"""Makes what steering and capture are compared with: forward hooks in transformers on the same checkpoints.

Usage: make_tap_reference.py HF_DIR PROMPTS.json OUT_DIR

Writes random directions (`directions.safetensors`, and `directions.gguf` in the layout of llama.cpp's control vectors), one file of
answers for each way of steering (`steered-N.json`, the schema of `forebay eval golden`, with the options under `steer`), and what
passes the points of some layers, unsteered and steered (`captured.json`). fp32, eager, CPU. Needs transformers, torch,
safetensors, gguf.
"""

import json
import os
import sys

import gguf
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

GREEDY = 12
CLAMP = 0.25


def load(path):
    config = json.load(open(f"{path}/config.json"))
    more = {}
    if "quantization_config" in config:
        from transformers import Mxfp4Config
        more["quantization_config"] = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **more)
    return model.float().eval()


def parts(layer):
    """The norm whose input is the stream after attention, and the router or None."""
    names = ["pre_feedforward_layernorm", "post_attention_layernorm"]
    norm = next(getattr(layer, name) for name in names if hasattr(layer, name))
    router = None
    for owner in (layer, getattr(layer, "mlp", None)):
        for name in ("router", "gate"):
            module = getattr(owner, name, None)
            if module is not None and router is None and type(module).__name__.endswith("Router"):
                router = module
    return norm, router


class Hooks:
    """Steers and records. Edits change the stream's own tensor, so whatever reads it later sees the change."""

    def __init__(self, model, edits, keep):
        self.seen = {}
        self.edits, self.keep, self.handles = edits, keep, []
        for index, layer in enumerate(model.model.layers):
            norm, router = parts(layer)
            self.handles.append(norm.register_forward_pre_hook(self.before(index, "attention")))
            self.handles.append(layer.register_forward_hook(self.after(index)))
            if router is not None:
                self.handles.append(router.register_forward_hook(self.routed(index)))
                if hasattr(router, "proj"):
                    self.handles.append(router.proj.register_forward_hook(self.logits(index)))

    def stream(self, index, point, x):
        for edit in self.edits:
            edit(index, point, x)
        self.record(point, index, x[0])

    def record(self, name, index, rows):
        if self.keep:
            self.seen.setdefault(name, {}).setdefault(index, []).append(rows.clone())

    def before(self, index, point):
        return lambda module, args: self.stream(index, point, args[0])

    def after(self, index):
        def hook(module, args, out):
            self.stream(index, "feed_forward", out[0] if isinstance(out, tuple) else out)
        return hook

    def routed(self, index):
        def hook(module, args, out):
            logits, weights, ids = out
            if not hasattr(module, "proj"):
                self.record("router", index, logits)
            self.record("choice", index, ids)
            self.record("choice.weights", index, weights)
        return hook

    def logits(self, index):
        return lambda module, args, out: self.record("router", index, out)

    def remove(self):
        for handle in self.handles:
            handle.remove()


def edit(directions, point, mode, strength, layers=None, low=None, high=None):
    def apply(index, at, x):
        if at != point or index not in directions or (layers and not layers[0] <= index <= layers[1]):
            return
        v = directions[index]
        unit = (v.double() / v.double().norm()).float()
        if mode == "add":
            x.copy_(x + strength * v)
        elif mode == "renormalise":
            y = x + strength * v
            x.copy_(y * (x.norm(dim=-1, keepdim=True) / y.norm(dim=-1, keepdim=True)))
        else:
            p = (x @ unit).unsqueeze(-1)
            held = p.clamp(low, high) if mode == "clamp" else torch.zeros_like(p)
            x.copy_(x + strength * (held - p) * unit)
    return apply


def answers(model, prompt):
    out = model(torch.tensor([prompt]), use_cache=True)
    logits = out.logits[0]
    case = dict(prompt=prompt, positions=[], greedy=[], margin=[])
    for position in sorted({0, len(prompt) // 2, len(prompt) - 1}):
        top = logits[position].topk(12)
        case["positions"].append(dict(
            position=position, logsumexp=round(logits[position].logsumexp(-1).item(), 5),
            top_ids=top.indices.tolist(), top_logits=[round(v, 5) for v in top.values.tolist()]))
    last, cache = logits[-1], out.past_key_values
    for _ in range(GREEDY):
        top = last.topk(2)
        case["greedy"].append(top.indices[0].item())
        case["margin"].append(round((top.values[0] - top.values[1]).item(), 4))
        out = model(top.indices[:1].view(1, 1), past_key_values=cache, use_cache=True)
        cache, last = out.past_key_values, out.logits[0, -1]
    return case


@torch.no_grad()
def main():
    path, prompts, out = sys.argv[1], json.load(open(sys.argv[2])), sys.argv[3]
    torch.set_num_threads(2)
    os.makedirs(out, exist_ok=True)
    model = load(path)
    vocab = model.config.get_text_config().vocab_size
    prompts = [[token % vocab for token in prompt] for prompt in prompts[:2]]
    watch = Hooks(model, [], True)
    model(torch.tensor([prompts[1]]))
    watch.remove()
    torch.manual_seed(7)
    directions = {}
    for index, rows in watch.seen["feed_forward"].items():
        norm = rows[0].norm(dim=-1).mean()
        v = torch.randn(rows[0].shape[-1])
        directions[index] = 0.4 * norm * v / v.norm()
    save_file({f"direction.{i}": v for i, v in directions.items()}, f"{out}/directions.safetensors")
    writer = gguf.GGUFWriter(f"{out}/directions.gguf", "controlvector")
    writer.add_string("controlvector.model_hint", model.config.model_type)
    writer.add_uint32("controlvector.layer_count", len(directions) - 1)
    for index, v in directions.items():
        if index > 0:
            writer.add_tensor(f"direction.{index}", v.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    st, gg = "directions.safetensors", "directions.gguf"
    last = len(directions) - 1
    above = {i: v for i, v in directions.items() if i > 0}
    ways = [
        ([f"{st}:strength=0.8"], [edit(directions, "feed_forward", "add", 0.8)]),
        ([f"{gg}:strength=-1.2"], [edit(above, "feed_forward", "add", -1.2)]),
        ([f"{st}:mode=ablate,point=attention", f"{st}:strength=0.5,layers=1-{last}"],
         [edit(directions, "attention", "ablate", 1.0),
          edit(directions, "feed_forward", "add", 0.5, (1, last))]),
        ([f"{st}:mode=clamp,min=-{CLAMP},max={CLAMP / 2}", f"{st}:mode=clamp,point=attention,min={CLAMP},strength=0.5"],
         [edit(directions, "feed_forward", "clamp", 1.0, None, -CLAMP, CLAMP / 2),
          edit(directions, "attention", "clamp", 0.5, None, CLAMP, float("inf"))]),
        ([f"{st}:mode=renormalise,point=attention,strength=1.5", f"{st}:mode=ablate,strength=0.7"],
         [edit(directions, "attention", "renormalise", 1.5), edit(directions, "feed_forward", "ablate", 0.7)]),
    ]
    plain = [answers(model, prompt) for prompt in prompts]
    for number, (options, edits) in enumerate(ways):
        hooks = Hooks(model, edits, False)
        cases = [answers(model, prompt) for prompt in prompts]
        hooks.remove()
        moved = max(abs(a["positions"][-1]["logsumexp"] - b["positions"][-1]["logsumexp"]) for a, b in zip(cases, plain))
        differs = sum(a["greedy"] != b["greedy"] for a, b in zip(cases, plain))
        print(number, options, "logsumexp moved by", round(moved, 3), "greedy differs in", differs, "of", len(cases))
        json.dump(dict(reference="transformers fp32 eager CPU, forward hooks", steer=options, cases=cases),
                  open(f"{out}/steered-{number}.json", "w"))
    captured = []
    layers = sorted({0, last // 2, last})
    for options, edits in [([], []), ways[2]]:
        hooks = Hooks(model, edits, True)
        model(torch.tensor([prompts[0]]))
        hooks.remove()
        points = {}
        for name, by_layer in hooks.seen.items():
            points[name] = {}
            for layer in layers:
                if layer in by_layer:
                    rows = by_layer[layer][0][[0, len(prompts[0]) - 1]]
                    points[name][str(layer)] = [[round(v, 5) for v in row] for row in rows.tolist()]
        captured.append(dict(steer=options, prompt=prompts[0], rows=[0, len(prompts[0]) - 1], points=points))
    json.dump(captured, open(f"{out}/captured.json", "w"))


main()
