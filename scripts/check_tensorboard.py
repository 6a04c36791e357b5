#!/usr/bin/env python3
"""Reads a run's TensorBoard files with TensorBoard itself and compares every value with metrics.jsonl.

    python3 -m venv venv && venv/bin/pip install tensorboard
    venv/bin/python scripts/check_tensorboard.py RUN

Every number and text of metrics.jsonl must be there under its tag and step, and nothing else. Numbers are FP32 in event
files: they are compared as such. Ends with a line of counts; the exit code is 1 when something differs.
"""
import argparse
import json
import math
import struct
import sys
from pathlib import Path


def as_fp32(value):
    if isinstance(value, str):
        return float(value)  # "nan", "inf", "-inf"
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def expected(run):
    """By tag: {step counted over all stages: value}, of numbers and of texts."""
    numbers, texts, before, steps = {}, {}, 0, {}
    stages = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(line)
        if line["kind"] == "header":
            stages = [s["name"] for s in line["stages"]]
            steps = {s["name"]: s["steps"] for s in line["stages"]}
            continue
        stage, kind = line["stage"], line["kind"]
        before = sum(steps[s] for s in stages[: stages.index(stage)])
        at = before + line["step"]
        for key, value in line.items():
            if key in ("kind", "stage", "step") or isinstance(value, list):
                continue
            is_text = isinstance(value, str) and value not in ("nan", "inf", "-inf")
            tag = f"{stage}/{key}" if kind == "step" or is_text else f"{stage}/{kind}/{key}"
            (texts if is_text else numbers).setdefault(tag, {})[at] = value
    return numbers, texts


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run folder")
    run = parser.parse_args().run
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard import version

    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    numbers, texts = expected(run)
    wrong = []
    compared = 0
    for tag in sorted(set(numbers) ^ set(tags["scalars"])):
        wrong.append(f"{tag}: only in {'metrics.jsonl' if tag in numbers else 'the event files'}")
    for tag in sorted(set(numbers) & set(tags["scalars"])):
        found = {e.step: e.value for e in accumulator.Scalars(tag)}
        for step in sorted(set(numbers[tag]) | set(found)):
            compared += 1
            if step not in found or step not in numbers[tag] or not same(found[step], as_fp32(numbers[tag][step])):
                wrong.append(f"{tag} step {step}: {numbers[tag].get(step)} in metrics.jsonl, {found.get(step)} here")
    for tag in sorted(set(texts) ^ set(tags["tensors"])):
        wrong.append(f"{tag}: text only in {'metrics.jsonl' if tag in texts else 'the event files'}")
    for tag in sorted(set(texts) & set(tags["tensors"])):
        found = {e.step: e.tensor_proto.string_val[0].decode() for e in accumulator.Tensors(tag)}
        plugin = accumulator.SummaryMetadata(tag).plugin_data.plugin_name
        for step, text in texts[tag].items():
            compared += 1
            shown = "\n".join("    " + part for part in text.split("\n"))
            if found.get(step) != shown or plugin != "text":
                wrong.append(f"{tag} step {step}: text {text!r} in metrics.jsonl, {found.get(step)!r} here ({plugin})")
    for text in wrong[:20]:
        print(text, file=sys.stderr)
    print(f"TensorBoard {version.VERSION}: {len(tags['scalars'])} scalar tags, {len(tags['tensors'])} text tags, "
          f"{compared} values, {len(wrong)} differ")
    return 1 if wrong or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
