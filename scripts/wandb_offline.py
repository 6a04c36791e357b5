#!/usr/bin/env python3
"""Writes a run as an offline run of Weights & Biases, with its own library; `wandb sync` uploads the folder later.

    python3 -m venv venv && venv/bin/pip install wandb
    venv/bin/python scripts/wandb_offline.py RUN [--dir DIR] [--project NAME] [--entity NAME] [--check]

Numbers of metrics.jsonl become <stage>/<key>, of evaluations <stage>/eval/<key>, at the step counted over all stages;
with times.jsonl also `seconds`. Expert loads become histograms, sample texts a table, the resolved recipe the config,
summary.json the summary. Nothing is sent. --check reads the written file again and compares every number.
"""
import argparse
import json
import math
import struct
import sys
import time
from pathlib import Path

SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def read_json(path):
    return json.loads(path.read_text()) if path.exists() else {}


def read_times(path):
    if not path.exists():
        return {}
    times = {}
    for text in path.read_text().splitlines():
        try:
            entry = json.loads(text)
            times[entry["line"]] = entry["seconds"]
        except (ValueError, KeyError, TypeError):
            continue  # a torn line
    return times


def read_metrics(run):
    """The header, and for every other line (step over all stages, numbers, lists, texts)."""
    header, rows = {}, []
    times = read_times(run / "times.jsonl")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except ValueError as e:
            if number == len(lines):
                print(f"{run}/metrics.jsonl: the last line is cut and left out", file=sys.stderr)
                break
            sys.exit(f"{run}/metrics.jsonl:{number}: {e}")
        if line["kind"] == "header":
            header = line
            continue
        stages = header.get("stages", [])
        names = [s["name"] for s in stages]
        before = sum(s["steps"] for s in stages[: names.index(line["stage"])]) if line["stage"] in names else 0
        prefix = line["stage"] + ("/" if line["kind"] == "step" else f"/{line['kind']}/")
        numbers, lists, texts = {}, {}, {}
        for key, value in line.items():
            if key in ("kind", "stage", "step"):
                continue
            if isinstance(value, list):
                lists[prefix + key] = value
            elif isinstance(value, str) and value not in SPECIAL:
                texts[key] = value
            else:
                numbers[prefix + key] = SPECIAL.get(value, value) if isinstance(value, str) else value
        if number in times:
            numbers["seconds"] = times[number]
        rows.append((before + line["step"], line, numbers, lists, texts))
    return header, rows


def convert(run, options):
    import wandb

    header, rows = read_metrics(run)
    plan = read_json(run / "plan.json")
    settings = wandb.Settings(mode="offline", console="off", x_disable_stats=True, x_disable_meta=True,
                              disable_git=True, save_code=False, silent=True)
    out = wandb.init(project=options.project, entity=options.entity, name=header.get("name", run.name),
                     dir=str(options.dir), config=plan.get("recipe", {}), settings=settings)
    folder = Path(out.dir).parent
    samples = wandb.Table(columns=["stage", "step", "sample", "text"])
    for step, line, numbers, lists, texts in rows:
        loads = {k: wandb.Histogram(np_histogram=(v, list(range(len(v) + 1))))
                 for k, v in lists.items() if "/expert_load." in k and 0 < len(v) <= 512}
        out.log({**numbers, **loads}, step=step)
        for key, text in texts.items():
            samples.add_data(line["stage"], line["step"], key, text)
    if samples.data:
        out.log({"samples": samples})
    out.summary.update(read_json(run / "summary.json"))
    out.finish()
    return folder, rows


def log_records(data):
    """Records of the library's file: a header of 7 bytes, then blocks of 32 KiB as in LevelDB's log."""
    block, at, parts = 32768, 7, []
    while at + 7 <= len(data):
        left = block - at % block
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)  # behind the checksum
        parts.append(data[at + 7: at + 7 + length])
        at += 7 + length
        if at > len(data):
            return  # still being written
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def finished_records(folder):
    """All records; the library's process may still be writing when the run is finished."""
    from wandb.proto import wandb_internal_pb2

    deadline = time.monotonic() + 60
    while True:
        records = []
        for data in log_records(next(folder.glob("*.wandb")).read_bytes()):
            records.append(wandb_internal_pb2.Record())
            records[-1].ParseFromString(data)
        if any(r.WhichOneof("record_type") == "exit" for r in records):
            return records
        if time.monotonic() > deadline:
            sys.exit(f"{folder}: the library has not finished the file")
        time.sleep(0.2)


def check(folder, rows):
    """Every number of the run, read back from the library's own file."""
    found = {}
    for record in finished_records(folder):
        if record.WhichOneof("record_type") != "history":
            continue
        items = {"/".join(i.nested_key) if i.nested_key else i.key: json.loads(i.value_json)
                 for i in record.history.item}
        found.setdefault(items.get("_step", record.history.step.num), {}).update(items)
    expected, wrong = {}, 0
    for step, _, numbers, _, _ in rows:
        expected.setdefault(step, {}).update(numbers)  # of lines at one step the last counts
    for step, numbers in expected.items():
        for key, value in numbers.items():
            got = found.get(step, {}).get(key)
            got = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(got, got)
            same = got == value or (isinstance(got, float) and isinstance(value, float)
                                    and math.isnan(got) and math.isnan(value))
            if not same:
                wrong += 1
                if wrong <= 20:
                    print(f"step {step}, {key}: {value} in metrics.jsonl, {got} in the offline run", file=sys.stderr)
    total = sum(len(v) for v in expected.values())
    print(f"{total} numbers at {len(expected)} steps, {wrong} differ")
    return wrong == 0 and total > 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--dir", type=Path, help="where the offline run goes (the run folder): DIR/wandb/offline-run-*")
    parser.add_argument("--project", default="fp4train")
    parser.add_argument("--entity")
    parser.add_argument("--check", action="store_true", help="read the file again and compare")
    options = parser.parse_args()
    options.dir = options.dir or options.run
    options.dir.mkdir(parents=True, exist_ok=True)
    folder, rows = convert(options.run, options)
    print(folder)
    return 0 if not options.check or check(folder, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
