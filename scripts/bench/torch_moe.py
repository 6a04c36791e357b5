#!/usr/bin/env python3
"""PyTorch baseline that fp4train is measured against, on one GPU.

Geometry of a layer: Qwen3-30B-A3B (hidden 2048, 32 query / 4 key-value heads of 128, 128 experts, 8 per token,
expert FFN 768, QK-norm, RoPE, RMSNorm, SwiGLU, untied head), with 6 layers and a vocabulary of 50304, so that the
experts and not the head carry the time. Other geometries: see --help.
Training: bf16 weights, fp32 master weights and Adam moments, torch.compile, torch._grouped_mm experts, fused SDPA.
Decoding: static key-value cache, one CUDA graph per token, greedy.

Prints one JSON object a line: {"what": "train", "tokens_per_s": …, "mfu": …} and {"what": "decode", …}.
MFU counts model FLOPs (6 per active matmul weight and token, causal attention halved) over --peak (dense bf16, TFLOP/s).

--weights FILE starts from a safetensors file with fp4train's names and layouts, --tokens FILE trains on the rows of
its tensor `tokens` (I32 [rows, seq + 1], taken in turn), and --losses N prints the losses of the first N optimizer
steps: bench_gpu_model writes both files, so that the two can be compared number for number. --balance forced sends
token t to the experts t k, t k + 1, ... (modulo their number) with equal gates.
"""
import argparse, json, time
import torch, torch.nn as nn, torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend

def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

class Block(nn.Module):
    def __init__(s, c):
        super().__init__()
        h, d, e, f = c.hidden, c.head_dim, c.experts, c.ffn
        s.c = c
        s.n1, s.n2 = nn.RMSNorm(h, eps=1e-6), nn.RMSNorm(h, eps=1e-6)
        s.qn, s.kn = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        s.qkv = nn.Linear(h, (c.heads + 2 * c.kv_heads) * d, bias=False)
        s.o = nn.Linear(c.heads * d, h, bias=False)
        s.router = nn.Linear(h, e, bias=False)
        s.w13 = nn.Parameter(torch.randn(e, h, 2 * f) * 0.02)
        s.w2 = nn.Parameter(torch.randn(e, f, h) * 0.02)

    def attn(s, x, cos, sin, cache=None, pos=None):
        c = s.c; B, T, _ = x.shape
        q, k, v = s.qkv(s.n1(x)).split([c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim], -1)
        q = rope(s.qn(q.view(B, T, c.heads, c.head_dim)), cos, sin).transpose(1, 2)
        k = rope(s.kn(k.view(B, T, c.kv_heads, c.head_dim)), cos, sin).transpose(1, 2)
        v = v.view(B, T, c.kv_heads, c.head_dim).transpose(1, 2)
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            K, V, mask = cache
            K.index_copy_(2, pos, k); V.index_copy_(2, pos, v)
            y = F.scaled_dot_product_attention(q, K, V, attn_mask=mask, enable_gqa=True)
        return x + s.o(y.transpose(1, 2).reshape(B, T, -1))

    def moe(s, x):
        c = s.c; B, T, h = x.shape
        z = s.n2(x).view(-1, h)
        p = F.softmax(s.router(z).float(), -1)
        if c.balance == "forced":
            n = B * T * c.top_k
            idx = torch.arange(n, device=x.device).remainder(c.experts).view(B * T, c.top_k)
            w = p.gather(1, idx)
        else:
            w, idx = p.topk(c.top_k, -1)
        w = (w / w.sum(-1, keepdim=True)).to(x.dtype)
        flat = idx.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(c.experts, dtype=torch.int32, device=x.device).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        offs = counts.cumsum(0).to(torch.int32)
        xs = z[order // c.top_k]
        g = torch._grouped_mm(xs, s.w13, offs=offs)
        a, b = g.chunk(2, -1)
        y = torch._grouped_mm(F.silu(a) * b, s.w2, offs=offs)
        out = torch.empty_like(y).index_copy(0, order, y).view(-1, c.top_k, h)
        return x + (out * w.unsqueeze(-1)).sum(1).view(B, T, h)

    def forward(s, x, cos, sin, cache=None, pos=None):
        return s.moe(s.attn(x, cos, sin, cache, pos))

class Model(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.c = c
        s.emb = nn.Embedding(c.vocab, c.hidden)
        s.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        s.norm = nn.RMSNorm(c.hidden, eps=1e-6)
        s.head = nn.Linear(c.hidden, c.vocab, bias=False)
        t = torch.arange(c.max_seq).float()[:, None] * (1e6 ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim))
        s.register_buffer("cos", t.cos()[None, :, None]); s.register_buffer("sin", t.sin()[None, :, None])

    def forward(s, ids, targets):
        x = s.emb(ids); T = ids.shape[1]
        cos, sin = s.cos[:, :T].to(x.dtype), s.sin[:, :T].to(x.dtype)
        for b in s.blocks: x = b(x, cos, sin)
        return F.cross_entropy(s.head(s.norm(x)).view(-1, s.c.vocab).float(), targets.view(-1))

def flops_per_token(c, seq):
    attn = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    moe = c.top_k * 3 * c.hidden * c.ffn + c.hidden * c.experts
    mm = c.layers * (attn + moe) + c.hidden * c.vocab
    return 6 * mm + c.layers * 6 * seq * c.heads * c.head_dim   # QK^T and PV, causal half, forward + backward

def load_weights(m, path):
    """Our names and layouts into the model: experts are stored [experts, out, in] there."""
    from safetensors import safe_open
    with safe_open(path, "pt") as f, torch.no_grad():
        def put(p, name, transpose=False):
            t = f.get_tensor(name)
            p.copy_(t.transpose(-1, -2) if transpose else t)
        put(m.emb.weight, "embed.weight"); put(m.head.weight, "head.weight"); put(m.norm.weight, "norm.weight")
        for i, b in enumerate(m.blocks):
            at = f"layers.{i}."
            put(b.n1.weight, at + "attn_norm.weight"); put(b.n2.weight, at + "mlp_norm.weight")
            put(b.qn.weight, at + "attn.q_norm.weight"); put(b.kn.weight, at + "attn.k_norm.weight")
            put(b.qkv.weight, at + "attn.qkv.weight"); put(b.o.weight, at + "attn.out.weight")
            put(b.router.weight, at + "router.weight")
            put(b.w13, at + "experts.gate_up.weight", True); put(b.w2, at + "experts.down.weight", True)

def train(c, a, dev):
    torch.manual_seed(0)
    with torch.device(dev): m = Model(c)
    if a.weights: load_weights(m, a.weights)
    m = m.to(torch.bfloat16)
    ps = list(m.parameters())
    master = [p.detach().float() for p in ps]
    opt = torch.optim.AdamW(master, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    f = torch.compile(m, dynamic=False) if not a.eager else m
    if a.tokens:
        from safetensors.torch import load_file
        rows = load_file(a.tokens)["tokens"].long().to(dev)
        assert rows.shape[1] == a.seq + 1 and rows.shape[0] % a.batch == 0
        batches = list(rows.split(a.batch))
    else:
        batches = [torch.randint(0, c.vocab, (a.batch, a.seq + 1), device=dev)]
    ids = batches[0]
    backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[a.sdpa]
    def micro(ids=ids):
      with sdpa_kernel(backend):
        l = f(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()); l.backward(); return l
    def step():
        gs = [p.grad for p in ps]
        norm = torch.nn.utils.get_total_norm(gs)
        torch.nn.utils.clip_grads_with_norm_(ps, 1.0, norm)
        for q, p in zip(master, ps): q.grad = p.grad.float(); p.grad = None
        opt.step()
        with torch.no_grad(): torch._foreach_copy_(ps, master)
        for q in master: q.grad = None
    for i in range(a.losses):
        l = micro(batches[i % len(batches)])
        step()
        print(json.dumps({"what": "loss", "step": i, "loss": round(l.item(), 5)}), flush=True)
    for _ in range(3): l = micro()
    step(); torch.cuda.synchronize()
    t = []
    for _ in range(a.iters):
        e = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        e[0].record(); l = micro(); e[1].record(); step(); e[2].record(); torch.cuda.synchronize()
        t.append((e[0].elapsed_time(e[1]), e[1].elapsed_time(e[2])))
    fb = sorted(x for x, _ in t)[len(t) // 2]; op = sorted(y for _, y in t)[len(t) // 2]
    tok = a.batch * a.seq
    print(json.dumps({"what": "train", "fwd_bwd_ms": round(fb, 2), "optimizer_ms": round(op, 2), "tokens": tok,
        "tokens_per_s": round(tok / (fb + op) * 1e3), "tokens_per_s_fwd_bwd": round(tok / fb * 1e3),
        "mfu_fwd_bwd": round(flops_per_token(c, a.seq) * tok / fb / 1e9 / a.peak, 4),
        "mfu": round(flops_per_token(c, a.seq) * tok / (fb + op) / 1e9 / a.peak, 4),
        "params_B": round(sum(p.numel() for p in ps) / 1e9, 3), "peak_mem_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "loss": round(l.item(), 4)}), flush=True)

@torch.no_grad()
def decode(c, a, dev):
    torch.manual_seed(0)
    with torch.device(dev): m = Model(c)
    m = m.to(torch.bfloat16).eval()
    for B in a.decode_batch:
        L = a.context + a.new_tokens
        ids = torch.randint(0, c.vocab, (B, 1), device=dev)
        pos = torch.full((1,), a.context, device=dev, dtype=torch.long)
        kv = [(torch.randn(B, c.kv_heads, L, c.head_dim, device=dev, dtype=torch.bfloat16), torch.randn(B, c.kv_heads, L, c.head_dim, device=dev, dtype=torch.bfloat16)) for _ in m.blocks]
        ar = torch.arange(L, device=dev)
        def token(ids, pos):
            x = m.emb(ids)
            cos, sin = m.cos[:, pos].to(x.dtype), m.sin[:, pos].to(x.dtype)
            mask = (ar <= pos)[None, None, None]
            for b, (K, V) in zip(m.blocks, kv): x = b(x, cos, sin, (K, V, mask), pos)
            return m.head(m.norm(x))[:, -1].argmax(-1, keepdim=True)
        f = torch.compile(token, dynamic=False, fullgraph=False) if not a.eager else token
        for _ in range(3): f(ids, pos)
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            for _ in range(2): f(ids, pos)
        torch.cuda.current_stream().wait_stream(s)
        with torch.cuda.graph(g): out = f(ids, pos)
        torch.cuda.synchronize()
        ts = []
        for i in range(a.new_tokens):
            pos.fill_(a.context + i)
            e0, e1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            e0.record(); g.replay(); e1.record(); torch.cuda.synchronize()
            ts.append(e0.elapsed_time(e1))
        ms = sorted(ts)[len(ts) // 2]
        wbytes = 2 * sum(p.numel() for n, p in m.named_parameters() if "emb" not in n)
        print(json.dumps({"what": "decode", "batch": B, "context": a.context, "ms_per_token": round(ms, 3),
            "tokens_per_s": round(B / ms * 1e3), "weight_GB": round(wbytes / 1e9, 2)}), flush=True)
        del g, kv

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for k, v in dict(hidden=2048, head_dim=128, heads=32, kv_heads=4, experts=128, top_k=8, ffn=768, layers=6, vocab=50304).items():
        p.add_argument("--" + k.replace("_", "-"), type=int, default=v)
    p.add_argument("--seq", type=int, default=4096); p.add_argument("--batch", type=int, default=4)
    p.add_argument("--iters", type=int, default=10); p.add_argument("--peak", type=float, default=989.0)
    p.add_argument("--context", type=int, default=1024); p.add_argument("--new-tokens", type=int, default=32)
    p.add_argument("--decode-batch", type=int, nargs="*", default=[1, 16, 64, 256])
    p.add_argument("--sdpa", choices=["flash", "cudnn"], default="cudnn")
    p.add_argument("--weights"); p.add_argument("--tokens"); p.add_argument("--losses", type=int, default=0)
    p.add_argument("--balance", choices=["router", "forced"], default="router")
    p.add_argument("--eager", action="store_true"); p.add_argument("--only", choices=["train", "decode"])
    a = p.parse_args(); c = a; c.max_seq = max(a.seq, a.context + a.new_tokens)
    if a.only != "decode": train(c, a, "cuda")
    torch.cuda.empty_cache()
    if a.only != "train": decode(c, a, "cuda")
