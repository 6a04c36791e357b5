#!/usr/bin/env python3
"""Cases of the policy objective, computed from the papers' formulas and nothing of the engine.

Writes tests/golden/policy.jsonl, which tests/unit/rl_objectives.cpp reads:  python3 tests/reference/policy.py
Slopes are central differences of the losses, so they share no derivation with the engine either.
"""
import json
import math
import os
import random
import struct

H = 1e-6


def single(x):
    """The nearest FP32, as the engine is given it."""
    return struct.unpack("f", struct.pack("f", x))[0]


def kl(estimator, log_ref, log_p):
    d = log_ref - log_p
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[estimator]


def clip(x, low, high):
    return min(max(x, low), high)


def policy(form, low, high, dual, log_p, ratio, frozen_ratio, a):
    """The policy's term to be minimised. `frozen_ratio` is what a stop-gradient sees."""
    if form == "none":
        return -ratio * a
    if form == "cispo":
        return -clip(frozen_ratio, 1 - low, 1 + high) * a * log_p
    inner = min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)
    if dual > 0 and a < 0:
        inner = max(inner, dual * a)
    return -inner


def difference(f, x):
    return (f(x + H) - f(x - H)) / (2 * H)


def token_case(rng):
    c = {"form": rng.choice(["ppo", "ppo", "cispo", "none"]), "low": rng.choice([0.2, 1.0, 0.1]),
         "high": rng.choice([0.2, 0.28, 5.0]), "dual": 0.0, "kl": rng.choice([0.0, 0.05]),
         "estimator": rng.choice(["k1", "k2", "k3"]), "entropy": rng.choice([0.0, 0.01])}
    if c["form"] == "ppo" and rng.random() < 0.4:
        c["dual"] = 3.0
    if c["form"] == "none":
        c["low"] = c["high"] = 0.0
    old = rng.uniform(-4, -0.2)
    now = old + rng.gauss(0, 0.6)
    ref = old + rng.gauss(0, 0.6)
    a = rng.choice([-2.0, -0.5, 0.0, 0.75, 1.5])
    f = rng.choice([0.0, 0.5, 1.0, 2.0])
    h = rng.uniform(0, 2)
    now, old, ref, h = (single(x) for x in (now, old, ref, h))

    def loss(x):
        value = f * policy(c["form"], c["low"], c["high"], c["dual"], x, math.exp(x - old), math.exp(now - old), a)
        if c["kl"] > 0:
            value += c["kl"] * kl(c["estimator"], ref, x)
        return value - c["entropy"] * h

    ratio = math.exp(now - old)
    clipped = 0
    if f != 0 and c["form"] == "ppo":
        if a > 0 and ratio > 1 + c["high"]:
            clipped = 2
        elif a < 0 and ratio < 1 - c["low"]:
            clipped = 1
        elif a < 0 and c["dual"] > 0 and ratio > c["dual"]:
            clipped = 3
    if f != 0 and c["form"] == "cispo" and a != 0:
        clipped = 1 if ratio < 1 - c["low"] else 2 if ratio > 1 + c["high"] else 0
    return {"case": "token", **c, "now": now, "old": old, "reference": ref, "advantage": a, "importance": f,
            "h": h, "loss": loss(now), "slope": difference(loss, now), "clipped": clipped}


def sequence_case(rng):
    """GSPO: one completion, s = (p(y) / p_old(y))^(1/n); its term stands once, tokens have weight 1/n."""
    n = rng.choice([1, 2, 7, 33, 70])
    old = [rng.uniform(-3, -0.1) for _ in range(n)]
    now = [x + rng.gauss(0, 0.2) for x in old]
    old = [single(x) for x in old]
    now = [single(x) for x in now]
    a = rng.choice([-1.0, 0.5, 2.0])
    low, high = rng.choice([(3e-4, 4e-4), (0.2, 0.2)])

    def loss(p):
        s = math.exp(sum(x - y for x, y in zip(p, old)) / n)
        return policy("ppo", low, high, 0.0, 0.0, s, s, a)

    slopes = []
    for t in range(n):
        slopes.append(difference(lambda x: loss(now[:t] + [x] + now[t + 1:]), now[t]))
    return {"case": "sequence", "low": low, "high": high, "now": now, "old": old, "advantage": a,
            "loss": loss(now), "slopes": slopes}


def importance_case(rng):
    n = rng.choice([1, 3, 12])
    spread = rng.choice([0.01, 0.5, 1.5])
    mu = [single(rng.uniform(-3, -0.1)) for _ in range(n)]
    old = [single(x + rng.gauss(0, spread)) for x in mu]
    spec = {"importance": rng.choice(["off", "truncated", "raw"]), "cap": rng.choice([1.5, 2.0]), "token_low": 0.0,
            "token_high": 0.0, "sequence_low": 0.0, "sequence_high": 0.0, "veto": 0.0}
    if rng.random() < 0.4:
        spec["token_low"], spec["token_high"] = 0.5, 5.0
    if rng.random() < 0.4:
        spec["sequence_low"], spec["sequence_high"] = 0.9, 1.1
    if rng.random() < 0.3:
        spec["veto"] = 0.2
    rho = [math.exp(x - y) for x, y in zip(old, mu)]
    geometric = math.exp(sum(math.log(r) for r in rho) / n)
    veto = any(r < spec["veto"] for r in rho)
    dropped = spec["sequence_high"] > 0 and not spec["sequence_low"] <= geometric <= spec["sequence_high"]
    f, masked, truncated = [], 0, 0
    for r in rho:
        if veto or dropped:
            f.append(0.0)
            continue
        if spec["token_high"] > 0 and not spec["token_low"] <= r <= spec["token_high"]:
            f.append(0.0)
            masked += 1
            continue
        truncated += spec["importance"] == "truncated" and r > spec["cap"]
        f.append({"off": 1.0, "raw": r, "truncated": min(r, spec["cap"])}[spec["importance"]])
    return {"case": "importance", **spec, "old": old, "mu": mu, "f": f, "truncated": truncated, "masked": masked,
            "sequences_masked": int(dropped), "vetoed": int(veto)}


def advantage_case(rng):
    n = rng.choice([2, 4, 5])
    rewards = [rng.choice([0.0, 1.0, 0.25]) for _ in range(3 * n)]
    baseline = rng.choice(["group_mean", "leave_one_out"])
    normalise = baseline == "group_mean" and rng.random() < 0.5
    out = []
    for g in range(0, 3 * n, n):
        group = rewards[g:g + n]
        for i, r in enumerate(group):
            others = group[:i] + group[i + 1:]
            a = r - (sum(group) / n if baseline == "group_mean" else sum(others) / (n - 1))
            if normalise:
                mean = sum(group) / n
                a /= math.sqrt(sum((x - mean)**2 for x in group) / (n - 1)) + 1e-6
            out.append(a)
    return {"case": "advantages", "rewards": rewards, "samples": n, "baseline": baseline, "normalise": normalise,
            "advantages": out}


def main():
    rng = random.Random(20)
    path = os.path.join(os.path.dirname(__file__), "..", "golden", "policy.jsonl")
    with open(path, "w") as out:
        for make, count in ((token_case, 120), (sequence_case, 16), (importance_case, 40), (advantage_case, 12)):
            for _ in range(count):
                out.write(json.dumps(make(rng)) + "\n")


if __name__ == "__main__":
    main()
