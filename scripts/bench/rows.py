"""Rows of the table of benchmarks, with what they are to reach. Used by run.py."""
import threading

# kind: (must, first, goal) of the row's figure; None: the row stands there to be read.
TARGETS = {
    "forward+backward": (0.9, 1.0, 1.25), "optimizer step": (1.3, 1.5, 2.0), "whole step": (None, 1.15, 1.45),
    "nvidia_nvfp4 over own BF16": (0.65, 0.75, 0.90), "dense": (None, 0.90, 0.98), "grouped": (None, 1.0, 1.1),
    "attention forward": (None, 0.65, 0.95), "attention backward": (None, 0.5, 0.8), "quantise": (None, 0.6, 0.85),
    "decode BF16": (0.9, 1.0, 1.45), "decode NVFP4": (1.5, 1.8, 3.2),
    "equality of sampler and trainer": (25.0, 15.0, 3.0), "start": (None, 10.0, 3.0), "memory": (None, 1.0, 0.7),
    "first losses": (None, 0.02, None),
}
LESS_IS_BETTER = {"equality of sampler and trainer", "start", "memory", "first losses"}


def standing(kind, figure):
    """What of (must, first, goal) a figure reaches."""
    if kind not in TARGETS:
        return ""
    sign = -1 if kind in LESS_IS_BETTER else 1
    must, first, goal = (t is not None and sign * figure >= sign * t for t in TARGETS[kind])
    return "goal" if goal else "first" if first else "must" if must else "below"


class Rows:
    def __init__(self):
        self.rows, self.lock = [], threading.Lock()

    def add(self, kind, name, figure, form, **more):
        with self.lock:
            self.rows.append({"kind": kind, "row": name, "figure": figure, "shown": form,
                              "targets": TARGETS.get(kind), "reached": standing(kind, figure), **more})

    def ratio(self, kind, name, value, base, unit, swapped=False, **more):
        """value / base; `swapped` where less of the unit is better, so that ours is the base."""
        ours, theirs = (base, value) if swapped else (value, base)
        self.add(kind, name, value / base, f"{value / base:.2f}", value=ours, baseline=theirs, unit=unit, **more)

    def cost(self, kind, name, on, off, unit):
        percent = 100 * (1 - on / off)
        self.add(kind, name, percent, f"{percent:.1f}%", value=on, baseline=off, unit=unit)

    def seconds(self, kind, name, seconds):
        self.add(kind, name, seconds, f"{seconds:.1f} s", value=seconds, baseline=None, unit="s")

    def losses(self, name, ours, theirs):
        if len(ours) != len(theirs) or not ours:
            raise RuntimeError(f"{len(ours)} losses beside {len(theirs)}")
        worst = max(abs(a - b) for a, b in zip(ours, theirs))
        self.add("first losses", name, worst, f"{worst:.4f} apart at most", value=ours[-1], baseline=theirs[-1], unit="nat",
                 ours=ours, theirs=theirs)

    def table(self):
        lines = ["| what | row | ours | baseline | figure | must | first | goal | reached |",
                 "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
        order = list(TARGETS)
        kinds = sorted({r["kind"] for r in self.rows}, key=lambda k: (order.index(k) if k in order else len(order), k))
        for r in sorted(self.rows, key=lambda r: kinds.index(r["kind"])):
            targets = ["" if t is None else f"{t:g}" for t in r["targets"] or (None, None, None)]
            base = "" if r["baseline"] is None else f"{r['baseline']:.4g} {r['unit']}"
            lines.append(f"| {r['kind']} | {r['row']} | {r['value']:.4g} {r['unit']} | {base} | {r['shown']} "
                         f"| {' | '.join(targets)} | {r['reached']} |")
        return "\n".join(lines)
