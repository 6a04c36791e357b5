#!/usr/bin/env python3
"""Compares the tokenizers of this program with the reference libraries, on hostile strings and on mixed text.

    scripts/check_tokenizers.py --bench build-cpu-bench/tests/bench/bench_tokenizer [--work DIR] [--text FILE]

Needs the Python packages tokenizers, tiktoken, sentencepiece and wheel, and pip's network for published vocabularies: those
that the packages litellm, dashscope, openai-whisper and mistral-common ship, taken from their archives into --work. For each vocabulary
it prints how many texts have the same ids, and both speeds on one thread (MB a second of processor time). Exits with
1 where an id differs.
"""
import argparse
import base64
import json
import pathlib
import random
import subprocess
import sys
import tarfile
import time
import zipfile

import sentencepiece
import tiktoken
import tokenizers

ROOT = pathlib.Path(__file__).resolve().parent.parent
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
LLAMA3 = CL100K
QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])


def byte_alphabet():
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in prints]
    return {**{b: chr(b) for b in prints}, **{b: chr(256 + i) for i, b in enumerate(others)}}


ALPHABET = byte_alphabet()


def spelt(data):
    return "".join(ALPHABET[b] for b in data)


def merges_of(ranks):
    """The merges behind ranked tokens: how each is made when only those of lower rank are joined."""
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], 1 << 60))
            if ranks.get(parts[best] + parts[best + 1], 1 << 60) >= rank:
                break
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            pairs.append((rank, parts))
    return [[spelt(left), spelt(right)] for _, (left, right) in pairs]


def special(content, token_id):
    return {"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True}


def tokenizer_json(ranks, pattern, specials, nfc=False, ignore_merges=False):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [special(content, token_id) for content, token_id in specials.items()],
            "normalizer": {"type": "NFC"} if nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                                                "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                      "ignore_merges": ignore_merges, "vocab": {spelt(t): r for t, r in ranks.items()},
                      "merges": merges_of(ranks)}}


def read_ranks(data):
    return {base64.b64decode(token): int(rank) for token, rank in
            (line.split() for line in data.decode("ascii").splitlines() if line)}


def fetch(work, package):
    found = sorted(work.glob(package.replace("-", "_") + "-*"))
    if not found:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "-d", work,
                        package], check=True)
        found = sorted(work.glob(package.replace("-", "_") + "-*"))
    archive = found[-1]
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as zipped:
            return {name: zipped.read(name) for name in zipped.namelist() if "tokenizers/" in name or "tiktoken" in name or ".model." in name}
    with tarfile.open(archive) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers() if m.name.endswith(".tiktoken")}


def vocabularies(work):
    """Name, tokenizer.json as a dictionary, and what tiktoken needs for the same or None."""
    litellm, dashscope, whisper = (fetch(work, p) for p in ("litellm", "dashscope", "openai-whisper"))

    def ranked(files, ending):
        return read_ranks(next(data for name, data in files.items() if name.endswith(ending)))

    for name, files, ending, pattern, ends, nfc, ignore in [
            ("gpt2 (openai-whisper)", whisper, "gpt2.tiktoken", GPT2, ["<|endoftext|>"], False, False),
            ("whisper multilingual", whisper, "multilingual.tiktoken", GPT2, ["<|endoftext|>", "<|en|>"], False, False),
            ("cl100k (litellm)", litellm, "9b5ad71b2ce5302211f9c61530b329a4922fc6a4", CL100K, ["<|endoftext|>"], False,
             False),
            ("cl100k as Llama 3, ignore_merges", litellm, "9b5ad71b2ce5302211f9c61530b329a4922fc6a4", LLAMA3,
             ["<|end_of_text|>", "<|begin_of_text|>"], False, True),
            ("o200k (litellm)", litellm, "fb374d419588a4632f3f557e76b4b70aebbca790", O200K, ["<|endoftext|>"], False,
             False),
            ("qwen, with Qwen2's NFC (dashscope)", dashscope, "qwen.tiktoken", QWEN,
             ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], True, False)]:
        ranks = ranked(files, ending)
        specials = {end: max(ranks.values()) + 1 + i for i, end in enumerate(ends)}
        yield name, tokenizer_json(ranks, pattern, specials, nfc, ignore), (None if nfc else (pattern, ranks, specials))
    for name, data in litellm.items():
        if name.endswith(".json"):
            yield pathlib.Path(name).stem + " (litellm)", json.loads(data), None


def reference_ids(tokenizer, text, marked):
    """Of bytes: each well-formed stretch by the library; what is ill-formed is one word for the model."""
    tokenizer.encode_special_tokens = not marked
    ids, at = [], 0
    while at < len(text):
        try:
            good = text[at:].decode("utf-8")
            end = len(text)
        except UnicodeDecodeError as error:
            end = at + error.start
            good = text[at:end].decode("utf-8")
        if good:
            ids += tokenizer.encode(good, add_special_tokens=False).ids
        at = end
        bad = at
        while bad < len(text):
            try:
                text[bad:bad + 4].decode("utf-8")
                break
            except UnicodeDecodeError as error:
                if error.start > 0:
                    break
                bad += 1
        if bad > at:
            ids += [t.id for t in tokenizer.model.tokenize(spelt(text[at:bad]))]
        at = bad
    return ids


def hostile():
    lines = (ROOT / "tests/golden/tokenizers/hostile.jsonl").read_text(encoding="utf-8").splitlines()
    return [bytes.fromhex(json.loads(line)["hex"]) for line in lines]


def random_texts(count, seed=7):
    """Pieces of hostile strings in random order, and random code points."""
    draw = random.Random(seed)
    pool = hostile()
    ranges = [(0x20, 0x7F), (0xA0, 0x530), (0x900, 0xE00), (0x1100, 0x1200), (0x2000, 0x2070), (0x3000, 0x3100),
              (0x4E00, 0x9FA0), (0xAC00, 0xD7A4), (0x1F300, 0x1F650), (0x9, 0x21)]
    texts = []
    for _ in range(count):
        text = b""
        for _ in range(draw.randint(1, 8)):
            if draw.random() < 0.5:
                piece = draw.choice(pool)
                begin = draw.randrange(len(piece)) if piece else 0
                text += piece[begin:begin + draw.randint(1, 20)]
            else:
                low, high = draw.choice(ranges)
                text += "".join(chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 6))).encode("utf-8")
        texts.append(text)
    return texts


def mixed_text(path):
    """About 1 MB of documents: the file given, or prose and sources of this repository with other scripts between."""
    if path:
        return path.read_bytes().decode("utf-8", "replace").split("\n%\n")
    names = subprocess.run(["git", "ls-files", "*.md", "*.cpp", "*.py", "*.yaml"], cwd=ROOT, capture_output=True, text=True,
                           check=True).stdout.split()
    documents = [(ROOT / name).read_text(encoding="utf-8") for name in names]
    fortunes = pathlib.Path("/usr/share/games/fortunes")
    for file in sorted(fortunes.glob("*.u8")):
        documents += file.read_text(encoding="utf-8").split("\n%\n")
    random.Random(3).shuffle(documents)
    foreign = [t.decode("utf-8", "replace") for t in random_texts(2000, 11)]
    mixed, size = [], 0
    for i, document in enumerate(documents):
        mixed.append(document)
        mixed += foreign[i % 1000 * 2:i % 1000 * 2 + 2]
        size += len(document.encode("utf-8"))
        if size > 1_000_000:
            break
    return mixed


def run(bench, work, tokenizer_path, texts):
    (work / "texts.hex").write_text("".join(t.hex() + "\n" for t in texts), encoding="ascii")
    done = subprocess.run([bench, "encode", tokenizer_path, work / "texts.hex", work / "ids.txt"], capture_output=True,
                          text=True, check=False)
    if done.returncode != 0:
        return done.stderr.strip(), None, None
    lines = [list(map(int, line.split())) for line in (work / "ids.txt").read_text(encoding="ascii").splitlines()]
    return "", lines[0::2], lines[1::2]


def pieces_of(documents, size=8192):
    """Documents joined to texts of about `size` bytes: calls from Python take a share of the library's time."""
    texts, current = [], ""
    for document in documents:
        current += document + "\n"
        if len(current) >= size:
            texts.append(current)
            current = ""
    return texts + [current] if current else texts


def library_speed(tokenizer, texts):
    tokenizer.encode_special_tokens = False
    size, best = sum(len(text.encode("utf-8")) for text in texts), 0
    for _ in range(5):
        start = time.thread_time()
        for text in texts:
            tokenizer.encode(text, add_special_tokens=False)
        best = max(best, size / (time.thread_time() - start) / 1e6)
    return best


def check_sentencepiece(bench, work, texts):
    """Mistral's models against the library's Python package; whether any id differs."""
    failed = False
    for name, model in sorted(fetch(work, "mistral-common").items()):
        if not name.endswith((".v1", ".v3")):
            continue
        path = work / "tokenizer.model"
        path.write_bytes(model)
        library = sentencepiece.SentencePieceProcessor(model_proto=model)
        refusal, plain, _ = run(bench, work, path, texts)
        if refusal:
            print(f"{name}: refused: {refusal}")
            continue
        equal = sum(ids == library.encode(t) for t, ids in zip(texts, plain))
        print(f"{pathlib.Path(name).name} (mistral-common): {equal} of {len(texts)} equal")
        failed |= equal < len(texts)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/fp4train_tokenizers"))
    parser.add_argument("--text", type=pathlib.Path, help="mixed text, documents between lines with %%")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    strings = hostile() + random_texts(3000)
    documents = mixed_text(arguments.text)
    size = sum(len(d.encode("utf-8")) for d in documents)
    print(f"tokenizers {tokenizers.__version__}, tiktoken {tiktoken.__version__}; {len(strings)} hostile strings, "
          f"{len(documents)} documents of {size / 1e6:.2f} MB")
    failed = False
    for name, content, ranked in vocabularies(arguments.work):
        path = arguments.work / "tokenizer.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        library = tokenizers.Tokenizer.from_file(str(path))
        texts = strings + [d.encode("utf-8") for d in documents]
        refusal, plain, marked = run(arguments.bench, arguments.work, path, texts)
        if refusal:
            print(f"{name}: refused: {refusal}")
            continue
        wrong = sum(ids != reference_ids(library, t, False) for t, ids in zip(texts, plain))
        wrong += sum(ids != reference_ids(library, t, True) for t, ids in zip(texts, marked))
        line = f"{name}: {2 * len(texts) - wrong} of {2 * len(texts)} equal"
        if ranked:
            other = tiktoken.Encoding("check", pat_str=ranked[0], mergeable_ranks=ranked[1], special_tokens=ranked[2])
            differs = sum(ids != other.encode(d, disallowed_special=()) for d, ids in
                          zip(documents, plain[len(strings):]))
            line += f", {len(documents) - differs} of {len(documents)} documents equal to tiktoken's"
        long_texts = pieces_of(documents)
        (arguments.work / "texts.hex").write_text("".join(t.encode("utf-8").hex() + "\n" for t in long_texts),
                                                  encoding="ascii")
        ours = float(subprocess.run([arguments.bench, "speed", path, arguments.work / "texts.hex"], capture_output=True,
                                    text=True, check=True).stdout)
        theirs = library_speed(library, long_texts)
        print(f"{line}; {ours:.1f} MB/s, the library {theirs:.1f} MB/s, {ours / theirs:.1f} times")
        failed |= wrong > 0
    failed |= check_sentencepiece(arguments.bench, arguments.work, texts)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
