#!/usr/bin/env python3
"""Makes tests/golden/tokenizers: small vocabularies, hostile strings and the ids that Hugging Face's tokenizers gives.

    tests/reference/tokenizer_fixtures.py      (needs the Python packages that scripts/check_tokenizers.py needs)

Each vocabulary is a few hundred tokens trained on the sentences below. Of ill-formed bytes the library knows nothing:
each run of them is given to its model as a word of its own.
"""
import io
import json
import pathlib
import sys

import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import check_tokenizers as check  # noqa: E402

SENTENCES = """The quick brown fox jumps over the lazy dog, and the dog didn't like it: "You're late," they'll say.
A tokenizer that isn't tested on hostile text will fail on it; we've seen that in 1999, 2024 and 12345 times.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Où est l'élève? À la fête, naïve.
Съешь же ещё этих мягких французских булок, да выпей чаю. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.
敏捷的棕色狐狸跳过懒狗。いろはにほへと ちりぬるを。키스의 고유조건은 입술끼리 만나야 하고.
for (int i = 0; i < n; ++i) {\n    sum += values[i] * 2;\n\treturn sum;\n}\n\n\nif __name__ == "__main__":\n    main()\n
🙂🙂👍🏽 नमस्ते दुनिया ٣٤٥ 1,234.56 <b>bold</b> http://example.org/a?b=c&d=%20""".split("\n")

HOSTILE = {
    "empty": b"",
    "ascii": b"Hello, world! It's 2024-01-31; they'LL pay $1,234.56.",
    "contractions": "I'm you're he's we'll they've I'd IT'S CAN'T 'sup \u2019s it'\u017f".encode(),
    "emoji with joiners": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽🙂\ufe0f\u200d".encode(),
    "flags and keycaps": "🇩🇪🇫🇷 1️⃣2️⃣ ©️".encode(),
    "combining marks": "e\u0301 A\u030a\u0301 n\u0303o \u0301 o\u0327\u0302 \u1100\u1161\u11a8 q\u0323\u0307".encode(),
    "composed": "é Å ñ ệ 각 \u2126 \u212b \u0958 \ufb01".encode(),
    "zalgo": ("Z" + "\u0335\u0321\u0322\u0323" * 8 + "a" + "\u0300" * 20).encode(),
    "cjk": "今天天气很好。東京タワー、한국어 텍스트 測試！「引用」𠀀𪜶".encode(),
    "scripts": "Привет мир Ελληνικά עברית العربية हिन्दी ไทย தமிழ் ქართული".encode(),
    "right to left": "\u202eabc\u202c שלום 123 \u200fabc\u200e".encode(),
    "line ends": b"a\r\nb\rc\n\nd\n\r\n\r\n \n\t\n",
    "spaces": b"a  b   c    d\t\te \t f          \n          g   ",
    "leading spaces": b"     x\n     y",
    "only spaces": b"                                ",
    "many spaces": b" " * 300 + b"x" + b" " * 129,
    "unicode spaces": "a\u00a0b\u2003c\u3000d\u200be\u180ef\u2028g\u2029h\u0085i\u1680j\ufeffk \u00a0 \u2009\u2009l".encode(),
    "digits": "0123456789 ٠١٢٣٤ ०१२३ 一二三 ½ Ⅷ ⅷ ² ₃ ① 𝟘𝟙𝟚 12345678901234567890 1.5e-10 0x1F".encode(),
    "punctuation": b"!!! ... --- ?!? (((x))) [[y]] {{z}} <<>> && || // \\\\ ''' \"\"\" `` ~~ ^^ ## @@ $$ %%",
    "camel case": b"HTTPServerError camelCaseWord SCREAMING_SNAKE kebab-case XMLHttpRequest iPhone15Pro",
    "code": b"\tif (x<=0&&y!=NULL){\n\t\treturn -1;  // no\n\t}\n#include <a.h>\r\nprint(f'{a!r:>10}')\n",
    "long word": b"a" * 500 + b"b" * 77 + b"the" * 100,
    "long mixed word": ("äöü" * 90 + "狐狸" * 60).encode(),
    "special": b"a<|endoftext|>b <|im_start|>user\nHi<|im_end|>\n<|endoftext|><|endoftext|>",
    "special, almost": b"<|endoftext |> <|endoftex <|endoftext|<|endoftext|>|> < |im_end|>",
    "special of llama": b"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|end_of_text|>",
    "thinking": b"<think>\nwhy? </think>\n\n<tool_call>{\"a\": 1}</tool_call>x<think></think>",
    "marks of words": b"mask maskmask mask. amask mask1 1mask _mask mask_ (mask) mask",
    "strips": b"a  [L]  b  [R]  c  [LR]  d [L][R][LR]  [L] [L]\n\t[LR]\n\t e[L]f",
    "longest": b"<a><b> <a> <a><b><c> <a><a><b>   <a>",
    "normalized": "caf\u00e9 cafe\u0301 x\u00e9y x e\u0301 y \u00e9\u00e9".encode(),
    "nul": b"a\x00b\x00\x00 \x00<|endoftext|>\x00",
    "controls": bytes(range(1, 32)) + b"\x7f" + "\u0080\u009f\u00ad".encode(),
    "ill-formed alone": b"\xff\xfe\x80\xbf",
    "ill-formed inside": b"caf\xe9 \xc3\x28 ab\xe2\x82 cd\xf0\x9f\x98 ef\xed\xa0\x80 gh\xf8\x88\x80\x80\x80 \xc0\xaf",
    "ill-formed and spaces": b"a \xff b\xff  c  \xff\n\n\xff'\xffs 1\xff2",
    "ill-formed and special": b"\xff<|endoftext|>\xff<|im_end|>\xc3",
    "cut character": "狐".encode()[:2] + b" " + "🙂".encode()[:3],
    "noncharacters": "\uffff \ufffe \U0010ffff \ufffd".encode(),
    "every byte": bytes(range(256)),
}


def trained(sentences, pre_tokenizer, size):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(check.ALPHABET.values()), show_progress=False)
    tokenizer.train_from_iterator(sentences * 2, trainer)
    return json.loads(tokenizer.to_str())["model"]


def model_of(pattern, size=256 + 160):
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model = trained(SENTENCES, pre_tokenizers.Sequence([split, byte_level]), size)
    return model["vocab"], model["merges"]


def added(content, token_id, **flags):
    token = check.special(content, token_id) | {"special": False}
    return token | flags


def with_added(base, tokens):
    first = max(base["model"]["vocab"].values()) + 1
    base["added_tokens"] = [added(content, first + i, **flags) for i, (content, flags) in enumerate(tokens)]
    return base


def variants():
    special = {"special": True}
    vocab, merges = model_of(check.GPT2)
    by_rank = {bytes(): 0}
    base = check.tokenizer_json(by_rank, check.GPT2, {})
    base["model"]["vocab"], base["model"]["merges"] = vocab, [" ".join(m) for m in merges]
    base["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    del base["model"]["ignore_merges"], base["model"]["byte_fallback"]
    yield "gpt2", with_added(base, [("<|endoftext|>", special)])

    vocab, merges = model_of(check.CL100K)
    base = check.tokenizer_json(by_rank, check.CL100K, {})
    base["model"]["vocab"], base["model"]["merges"] = vocab, merges
    base["pre_tokenizer"]["pretokenizers"][0] |= {"behavior": "Removed", "invert": True}
    yield "cl100k", with_added(base, [("<|endoftext|>", special), ("<|fim_prefix|>", special)])

    vocab, merges = model_of(check.QWEN)
    base = check.tokenizer_json(by_rank, check.QWEN, {}, nfc=True)
    base["model"]["vocab"], base["model"]["merges"] = vocab, [" ".join(m) for m in merges]
    base["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    yield "qwen", with_added(base, [("<|endoftext|>", special), ("<|im_start|>", special), ("<|im_end|>", special),
                                    ("<tool_call>", {}), ("</tool_call>", {}), ("<think>", {}), ("</think>", {})])

    vocab, merges = model_of(check.LLAMA3)
    base = check.tokenizer_json(by_rank, check.LLAMA3, {}, ignore_merges=True)
    # Words that merges do not reach, which ignore_merges makes tokens all the same.
    for word in ("\u0120hostile", "\u0120tokenizer", "values"):
        vocab.setdefault(word, len(vocab))
    base["model"]["vocab"], base["model"]["merges"] = vocab, merges
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    base = with_added(base, [(name, special) for name in names])
    begin = {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, begin, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [len(vocab)],
                                                         "tokens": ["<|begin_of_text|>"]}}}
    base["post_processor"] = {"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}, template]}
    yield "llama3", base

    vocab, merges = model_of(check.GPT2)
    base = check.tokenizer_json(by_rank, check.GPT2, {}, nfc=True)
    base["model"]["vocab"], base["model"]["merges"] = vocab, merges
    base["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    base["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "Split", "pattern": {"String": "--"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}]}
    yield "flags", with_added(base, [
        ("<|endoftext|>", special), ("[L]", {"lstrip": True}), ("[R]", {"rstrip": True, "normalized": True}),
        ("[LR]", special | {"lstrip": True, "rstrip": True}), ("mask", {"single_word": True}),
        ("<a>", {"normalized": True}), ("<a><b>", {"normalized": True}), ("   ", {"normalized": True}),
        ("cafe\u0301", {"normalized": True}), ("x\u00e9", {}), ("\n\n", {})])


def sentencepiece_models():
    """Of the style of Llama 2 (bytes for what has no piece), and one that knows no bytes."""
    sentences = [s for s in SENTENCES if all(ord(c) < 0x370 for c in s)] * 3
    shared = {"character_coverage": 0.99, "normalization_rule_name": "identity", "minloglevel": 2, "num_threads": 1,
              "hard_vocab_limit": False}
    for name, options in {
            "llama2": {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False,
                       "split_digits": True, "allow_whitespace_only_pieces": True, "vocab_size": 420},
            "unigram": {"model_type": "unigram", "vocab_size": 160, "user_defined_symbols": ["<sep>"]}}.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, **shared,
                                                 **options)
        yield name, model.getvalue()


def chats(library, form, messages):
    """Ids of a conversation, written out here a second time."""
    if form == "chatml":
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
        text += "<|im_start|>assistant\n"
    else:
        text = "<|begin_of_text|>" + "".join(f"<|start_header_id|>{role}<|end_header_id|>\n\n{content.strip()}<|eot_id|>"
                                             for role, content in messages)
        text += "<|start_header_id|>assistant<|end_header_id|>\n\n"
    library.encode_special_tokens = False
    return library.encode(text, add_special_tokens=False).ids


CHAT = [("system", "Be brief."), ("user", "  What is 37+58?\n"), ("assistant", "95"), ("user", "Sicher? caf\u00e9 \U0001F642")]


def main():
    folder = ROOT / "tests/golden/tokenizers"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "hostile.jsonl", "w", encoding="utf-8") as out:
        for name, text in HOSTILE.items():
            out.write(json.dumps({"name": name, "hex": text.hex()}) + "\n")
    with open(folder / "expected.jsonl", "w", encoding="utf-8") as out:
        for name, content in variants():
            path = folder / f"{name}.json"
            path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
            library = tokenizers.Tokenizer.from_file(str(path))
            for text_name, text in HOSTILE.items():
                row = {"tokenizer": name, "text": text_name, "plain": check.reference_ids(library, text, False),
                       "marked": check.reference_ids(library, text, True)}
                out.write(json.dumps(row, separators=(",", ":")) + "\n")
        for name, model in sentencepiece_models():
            (folder / f"{name}.model").write_bytes(model)
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            for text_name, text in HOSTILE.items():
                ids = processor.encode(text)
                row = {"tokenizer": name, "text": text_name, "plain": ids, "decoded": processor.decode(ids).encode().hex()}
                out.write(json.dumps(row, separators=(",", ":")) + "\n")
    with open(folder / "chat.jsonl", "w", encoding="utf-8") as out:
        for name, form in [("qwen", "chatml"), ("llama3", "llama3")]:
            library = tokenizers.Tokenizer.from_file(str(folder / f"{name}.json"))
            row = {"tokenizer": name, "form": form, "messages": CHAT, "ids": chats(library, form, CHAT)}
            out.write(json.dumps(row) + "\n")
    print(f"tokenizers {tokenizers.__version__}: {len(HOSTILE)} strings")


if __name__ == "__main__":
    main()
