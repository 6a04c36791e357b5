#!/usr/bin/env python3
"""Round trips with Hugging Face transformers 5 (needs torch, transformers and safetensors; a CPU is enough).

For each family, models of random weights go out and back:
  1. transformers saves one; `fp4train import` reads it; `fp4train logits` on 16 prompts agrees within 1e-4 in FP32.
  2. `fp4train export` writes it; transformers loads that without a missing or unexpected tensor and agrees as well.
  3. `fp4train import` of the export gives the same bytes as the first import.
Where the package compressed-tensors is there, it decodes exports of NVFP4 and MXFP8, and what it finds is compared.

    python3 scripts/check_huggingface.py --binary build/fp4train
    python3 scripts/check_huggingface.py --oracles tests/golden/hf   # makes the folders that are not there yet
"""
import argparse
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

TOLERANCE = 1e-4
PROMPTS = 16

SHAPE = dict(vocab_size=257, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16, max_position_embeddings=128, attention_dropout=0.0)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=2.0)
MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, intermediate_size=96)

# name: (model_type, keys, type of the saved weights, largest file)
MODELS = {
    "qwen3": ("qwen3", dict(intermediate_size=96), "float32", "1GB"),
    "qwen3 tied, bf16": ("qwen3", dict(intermediate_size=96, tie_word_embeddings=True), "bfloat16", "1GB"),
    "qwen3 yarn": ("qwen3", dict(intermediate_size=96, rope_parameters=YARN), "float32", "1GB"),
    "qwen3_moe": ("qwen3_moe", dict(MOE, norm_topk_prob=True), "float32", "1GB"),
    "qwen3_moe unnormalised, first layer dense, in files":
        ("qwen3_moe", dict(MOE, norm_topk_prob=False, mlp_only_layers=[0]), "float32", "100KB"),
    "qwen3_moe padded vocabulary, f16":
        ("qwen3_moe", dict(MOE, norm_topk_prob=True, vocab_size=320), "float16", "1GB"),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=48), "float32", "1GB"),
    "mixtral bf16, in files":
        ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=48), "bfloat16", "100KB"),
    "llama": ("llama", dict(intermediate_size=96), "float32", "1GB"),
    "llama tied, llama3 rope": ("llama", dict(intermediate_size=96, tie_word_embeddings=True, rope_parameters=LLAMA3),
                                "float32", "1GB"),
    "llama linear rope": ("llama", dict(intermediate_size=96, rope_parameters=LINEAR), "float32", "1GB"),
}


def make_model(model_type, keys):
    """A model in eval mode whose logits are of the order of one, every vector of it random."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type, **{**SHAPE, **keys})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.copy_(1 + 0.2 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) * (p.shape[-1] ** -0.5))
    return model.eval()


def load(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            sys.exit(f"{folder}: {kind}: {info[kind]}")
    return model.eval()


def prompts_for(vocabulary):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocabulary, (int(torch.randint(2, 100, (1,), generator=generator)),),
                          generator=generator) for _ in range(PROMPTS)]


def logits_of(model, prompts):
    with torch.no_grad():
        return [model(p[None]).logits[0].float() for p in prompts]


def run(binary, *args):
    result = subprocess.run([binary, *map(str, args)], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, args))}: exit {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def content_hash(binary, checkpoint):
    return re.search(r"content hash: (\w+)", run(binary, "inspect", checkpoint, "--verify")).group(1)


def worst_difference(ours, theirs):
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def check(binary, name, work):
    model_type, keys, dtype, size = MODELS[name]
    model = make_model(model_type, keys).to(getattr(torch, dtype))
    model.save_pretrained(work / "theirs", max_shard_size=size)
    theirs = load(work / "theirs")  # the saved values, widened
    prompts = prompts_for(theirs.config.vocab_size)
    expected = logits_of(theirs, prompts)
    (work / "prompts.txt").write_text("".join(" ".join(map(str, p.tolist())) + "\n" for p in prompts))

    run(binary, "import", "--from", work / "theirs", "--to", work / "first")
    run(binary, "logits", "--checkpoint", work / "first", "--tokens", work / "prompts.txt", "--to", work / "logits")
    got = load_file(work / "logits")
    imported = worst_difference([got[f"logits.{i}"] for i in range(PROMPTS)], expected)

    run(binary, "export", "--checkpoint", work / "first", "--to", work / "ours", "--shard-size", "100KB")
    exported = worst_difference(logits_of(load(work / "ours"), prompts), expected)

    run(binary, "import", "--from", work / "ours", "--to", work / "second")
    same = content_hash(binary, work / "first") == content_hash(binary, work / "second")
    for file in sorted((work / "first").glob("*.safetensors")):
        same = same and file.read_bytes() == (work / "second" / file.name).read_bytes()
    scale = max(float(e.abs().max()) for e in expected)
    good = imported <= TOLERANCE and exported <= TOLERANCE and same
    print(f"{name:52} {imported:9.2e} {exported:9.2e}  {'equal' if same else 'DIFFER':6} {scale:6.2f}  "
          f"{'' if good else 'FAILED'}", flush=True)
    return good


E2M1 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])


def decoded(folder):
    """Coded matrices of a folder in ModelOpt's NVFP4 layout, or of MXFP8, in FP32."""
    tensors = load_file(folder / "model.safetensors")
    out = {}
    for module in [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]:
        codes, scales = tensors[module + ".weight"], tensors[module + ".weight_scale"]
        if module + ".weight_scale_2" in tensors:
            values = torch.stack([E2M1[(codes & 15).int()], E2M1[(codes >> 4).int()]], dim=-1).flatten(1)
            out[module] = values * scales.float().repeat_interleave(16, dim=1) * tensors[module + ".weight_scale_2"]
        else:
            out[module] = codes.float() * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1)
    return out


def check_coded(binary, work):
    """compressed-tensors decodes our NVFP4 and MXFP8 to what the bytes say, rounded to its BF16."""
    make_model("qwen3", dict(intermediate_size=96)).save_pretrained(work / "theirs")
    run(binary, "import", "--from", work / "theirs", "--to", work / "first")
    for layout, preset in (("modelopt_nvfp4", "nvidia_nvfp4"), ("compressed_tensors_nvfp4", "nvidia_nvfp4"),
                           ("mxfp8", "mxfp8")):
        run(binary, "export", "--checkpoint", work / "first", "--to", work / layout, "--format", layout, "--preset",
            preset, "--table", "pretrain.forward")
    good = True
    for layout, plain in (("compressed_tensors_nvfp4", "modelopt_nvfp4"), ("mxfp8", "mxfp8")):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            work / layout, output_loading_info=True,
            quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
        # Decoded weights are multiplied as they are: nothing reads scales of activations.
        extra = [k for k in info["unexpected_keys"] if not k.endswith(".input_global_scale")]
        if info["missing_keys"] or extra:
            sys.exit(f"{layout}: missing {info['missing_keys']}, unexpected {extra}")
        matrices = decoded(work / plain)
        worst = max(float((model.get_submodule(m).weight.detach().float() - v).abs().max() / v.abs().max())
                    for m, v in matrices.items())
        good = good and worst <= 2 ** -8
        print(f"{layout}: {len(matrices)} matrices decoded by compressed-tensors, differences of at most {worst:.1e} "
              f"of the largest magnitude", flush=True)
    return good


def make_oracle(name, folder):
    """Weights, logits, loss and gradients of a tiny model for the project's own tests."""
    model_type, keys, _, _ = MODELS[name]
    tiny = dict(vocab_size=37, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                intermediate_size=24)
    model = make_model(model_type, {**keys, **tiny})
    model.save_pretrained(folder)
    torch.manual_seed(2)
    ids = torch.randint(0, model.config.vocab_size, (2, 17))
    logits = model(ids[:, :-1]).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    out = {"input_ids": ids, "logits": logits.detach().contiguous(), "loss": loss.detach()[None]}
    for parameter, p in model.named_parameters():
        out["grad." + parameter] = p.grad.float().contiguous()
    save_file(out, folder / "oracle.safetensors")
    for file in folder.iterdir():
        file.chmod(0o644)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="build/fp4train")
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--oracles", type=pathlib.Path, help="make folders for the tests there, and check nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.oracles:
        for name in ("qwen3", "mixtral"):
            if not (options.oracles / name).exists():
                make_oracle(name, options.oracles / name)
        return
    print(f"transformers {transformers.__version__}, torch {torch.__version__}; largest differences of logits of "
          f"{PROMPTS} prompts, at most {TOLERANCE}")
    print(f"{'model':52} {'import':>9} {'export':>9}  {'again':6} {'|logit|':>6}")
    good = True
    for name in MODELS:
        if options.only and options.only not in name:
            continue
        work = pathlib.Path(tempfile.mkdtemp(prefix="fp4train_hf_"))
        good = check(options.binary, name, work) and good
        shutil.rmtree(work)
    if not options.only and importlib.util.find_spec("compressed_tensors"):
        with tempfile.TemporaryDirectory(prefix="fp4train_hf_") as work:
            good = check_coded(options.binary, pathlib.Path(work)) and good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
