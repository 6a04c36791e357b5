#!/usr/bin/env python3
"""torch._grouped_mm at the shapes of `bench_gpu_gemm grouped`, even groups: medians of event timings."""
import torch

EXPERTS, ROWS, HIDDEN, FFN = 128, 1024, 2048, 768
TOKENS = EXPERTS * ROWS


def normal(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def milliseconds(work, count=25):
    times = []
    for i in range(count + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return sorted(times)[count // 2]


offsets = (torch.arange(1, EXPERTS + 1, device="cuda") * ROWS).int()
x, h = normal(TOKENS, HIDDEN), normal(TOKENS, FFN)
dx, dh = normal(TOKENS, HIDDEN), normal(TOKENS, 2 * FFN)
up, down = normal(EXPERTS, 2 * FFN, HIDDEN), normal(EXPERTS, HIDDEN, FFN)
up_flops, down_flops = 4 * TOKENS * HIDDEN * FFN, 2 * TOKENS * HIDDEN * FFN
for name, flops, work in (
    ("gate+up forward", up_flops, lambda: torch._grouped_mm(x, up.transpose(1, 2), offs=offsets)),
    ("down forward", down_flops, lambda: torch._grouped_mm(h, down.transpose(1, 2), offs=offsets)),
    ("gate+up dgrad", up_flops, lambda: torch._grouped_mm(dh, up, offs=offsets)),
    ("down dgrad", down_flops, lambda: torch._grouped_mm(dx, down, offs=offsets)),
    ("gate+up wgrad", up_flops, lambda: torch._grouped_mm(dh.t(), x, offs=offsets)),
    ("down wgrad", down_flops, lambda: torch._grouped_mm(dx.t(), h, offs=offsets)),
):
    ms = milliseconds(work)
    print(f"torch._grouped_mm {name:18} {ms:8.3f} ms {flops / ms / 1e9:6.0f} TFLOP/s", flush=True)
