"""Everything the model reads: a tokenizer, text, the way from files to patches, your own pictures, and rows to train on.

    python data.py                      # a small demonstration, a few seconds
    python data.py --show sheet.png     # a contact sheet of the default pictures with their captions, as the model sees them
    python data.py --check photos       # what training on this machine would use of a folder of your own, and why not the rest
    python data.py --check photos --preset base         # the same for another preset of train.py
    python data.py --check photos --show sheet.png      # and draw it
    python data.py --speed              # pictures and tokens a second that one process prepares; with --check: from that folder
    python data.py --train_tokenizer    # learn tokenizer.tiktoken again from the Python source on this machine

The idea. A native multimodal model reads one stream of tokens; pictures are just tokens of another kind. So this file
turns four things into one thing:

    text         Python source found on the reader's own machine (or --text)      -> tokens
    pictures     composed of OpenMoji drawings (pictures.py), or --images         -> patches + placeholder tokens
    clips        the same drawings moving, growing, turning; or your own          -> patches + placeholder tokens
    questions    a short question about a picture or clip, and its answer         -> tokens

and one sequence format for everything that is seen:

    [image start] [placeholder ...] [image end] ... [question] [sep] [answer] [end of document]

Only the answer and the end of document carry loss. Every row is a pure function of (seed, n), so resuming is only a matter of
remembering n. The drawings are OpenMoji (openmoji.org), CC BY-SA 4.0.

Your own pictures are data and nothing else: they are opened by Pillow as one of a few named formats (PostScript, which is a
program, is not among them), captions are plain text or JSON, and nothing in a file is ever run or unpickled.
"""

import argparse
import base64
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import re
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from statistics import median

import numpy as np
import tiktoken
import torch
from PIL import Image

# isort: off
from pictures import (  # noqa: F401  (all of it is also data.X)
    ATTRIBUTION, FORMATS, HELDOUT, MARK, MIX, MOTIONS, MOVES, MOVING, PHRASES, PICTURE_SUFFIXES, TASKS, Drawing, Example, Pictures, Prep,
    cache_dir, draw_sheet, film, frame_files, heldout, is_whole, load_visual, may_draw, pairs_of, parse_mix, picture_names, plain,
    render, scene, share, to_rgb, training_example, write_atomically,
)  # fmt: skip
# isort: on
from vit3d import patchify

RANK_FILE = Path(__file__).with_name("tokenizer.tiktoken")


# ------------------------------------------------------------------------------------------------------------------
# 1. Tokenizer: byte-level BPE. Text is first cut into pieces, then bytes inside a piece are merged, most frequent pair first.
#    The cuts are made for Python: a line break takes the indentation after it along, so "\n        " can be ONE token; a
#    word takes one space or its leading underscores; digits go by at most three. No look-around, so it runs in linear time.

PATTERN = r"[\r\n]+[ \t]*| ?_*[^\W\d_]+|\d{1,3}| ?[^\s\w]+|_+| +|\s+"
SPECIALS = ("<|endoftext|>", "<|image_start|>", "<|image_end|>", "<|image|>", "<|clip|>", "<|sep|>")
N_RANKS = 4096 - len(SPECIALS)


def train_bpe(counts: dict[str, int], n_ranks: int) -> dict[bytes, int]:
    """Pieces with their counts -> {token bytes: rank}. Pair counts are kept up to date merge by merge: only the words that
    hold the merged pair are touched, which makes 4,000 merges in pure Python a matter of seconds, not hours."""
    words = [[bytes([b]) for b in piece.encode()] for piece in counts]
    weight = list(counts.values())
    pairs, holders = Counter(), defaultdict(set)  # how often each pair stands in the text, and in which words

    def count(i, sign):
        """Add word i's pairs to the counts, or take them away."""
        for pair in itertools.pairwise(words[i]):
            pairs[pair] += sign * weight[i]
            if sign > 0:
                holders[pair].add(i)

    for i in range(len(words)):
        count(i, 1)
    ranks = {bytes([b]): b for b in range(256)}
    while len(ranks) < n_ranks and (most := max(pairs.values(), default=0)) > 0:
        pair = min(p for p, n in pairs.items() if n == most)
        merged = pair[0] + pair[1]
        ranks.setdefault(merged, len(ranks))
        for i in holders.pop(pair):
            count(i, -1)
            word, j = words[i], 0
            while j + 1 < len(word):
                if (word[j], word[j + 1]) == pair:
                    word[j : j + 2] = [merged]
                j += 1
            count(i, 1)
    return ranks


class Tokenizer:
    """Our BPE ranks run by tiktoken: nothing is downloaded. Special ids come after the ranks and never out of text: whatever a
    user types, `<|endoftext|>` included, is encoded as plain bytes. Tokenizer.from_state(tok.state()) is the same tokenizer.
    ValueError if the ranks are not a complete byte-level BPE."""

    def __init__(self, ranks: dict[bytes, int] | None = None, pattern: str = PATTERN):
        self.ranks = read_ranks(RANK_FILE.read_text()) if ranks is None else dict(ranks)
        self.pattern = pattern
        n = len(self.ranks)
        if sorted(self.ranks.values()) != list(range(n)) or any(bytes([b]) not in self.ranks for b in range(256)):
            raise ValueError(f"tokenizer: {n} ranks must be numbered 0..{n - 1} and hold all 256 single bytes")
        self.eod, self.image_start, self.image_end, self.image, self.clip, self.sep = range(n, n + len(SPECIALS))
        self.vocab_size = -(-(n + len(SPECIALS)) // 64) * 64  # padded: matrix products like multiples of 64
        self.encoding = tiktoken.Encoding("nanom3", pat_str=pattern, mergeable_ranks=self.ranks, special_tokens={})
        self.hash = hashlib.sha256((pattern + write_ranks(self.ranks)).encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode_bytes(self, ids) -> bytes:
        """Special and padding ids are structure, not text: they give no bytes."""
        n = len(self.ranks)
        return self.encoding.decode_bytes([i for i in map(int, ids) if 0 <= i < n])

    def decode(self, ids) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def state(self) -> dict:
        return {"pattern": self.pattern, "ranks": write_ranks(self.ranks)}

    @classmethod
    def from_state(cls, state: dict) -> "Tokenizer":
        return cls(read_ranks(state["ranks"]), state["pattern"])


def write_ranks(ranks: dict[bytes, int]) -> str:
    """tiktoken's own file format: a line per token, its bytes in base64, a space, its rank."""
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in sorted(ranks.items(), key=lambda x: x[1]))


def read_ranks(text: str) -> dict[bytes, int]:
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in text.splitlines() if line)}


def train_tokenizer(n_bytes: int = 24_000_000) -> dict[bytes, int]:
    """Learn the ranks from a sample of Python source plus every caption word; the captions weigh about a fifth."""
    counts, used = Counter(), 0
    for _, text in find_text()[0]:
        counts.update(re.findall(PATTERN, text))
        used += len(text)
        if used > n_bytes:
            break
    captions = Counter()
    for name in picture_names().values():
        for caption in (name, f"a {name} left of a {name}", f"a {name} above a {name}", f"the {name} moves up"):
            captions.update(re.findall(PATTERN, caption))
    for phrase in PHRASES:
        captions.update({piece: 200 for piece in re.findall(PATTERN, phrase)})
    weight = max(1, sum(counts.values()) // 4 // sum(captions.values()))
    counts.update({piece: n * weight for piece, n in captions.items()})
    return train_bpe(counts, N_RANKS)


# ------------------------------------------------------------------------------------------------------------------
# 2. Text: whole files of Python source, long ones kept long, each followed by end-of-document.
#    Found, never imported; in the order of their content's hash, so the last 1% (validation) and any cap are fair samples.

PACKAGES = ("torch", "transformers", "sympy", "networkx", "triton", "numpy", "matplotlib", "PIL", "jinja2", "mpmath",
            "fsspec", "setuptools", "tqdm")
MIN_BYTES = 1_000


def find_text(path: str | Path | None = None) -> tuple[list[tuple[str, str]], int]:
    """(content hash, text) of every distinct non-empty UTF-8 file, in order of the hash, and the number of files skipped because
    they are not UTF-8. path None: the standard library and PACKAGES; a file; or a folder (every file in it that is UTF-8).
    A named file that is not UTF-8, and a path that is not there, are a ValueError."""
    if path is None:
        roots = [Path(sysconfig.get_paths()["stdlib"])]
        for name in PACKAGES:  # find_spec looks a top-level package up without running any of its code
            spec = importlib.util.find_spec(name)
            roots += [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    elif not Path(path).exists():
        raise ValueError(f"text {path}: there is no such file or folder")
    else:
        roots = [Path(path)]
    files = [root for root in roots if root.is_file()]
    for root in roots:
        for folder, inner, names in os.walk(root):
            inner[:] = [d for d in inner if d not in ("site-packages", "__pycache__") and not d.startswith(".")]
            files += [Path(folder, f) for f in names if (path is not None and not f.startswith(".")) or f.endswith(".py")]
    texts, skipped = {}, 0
    for file in files:
        try:
            raw = file.read_bytes()
            if raw:
                texts[hashlib.sha256(raw).hexdigest()] = raw.decode()
        except (OSError, UnicodeDecodeError) as error:
            if file in roots and isinstance(error, UnicodeDecodeError):
                raise ValueError(f"text {path} is not UTF-8: give plain text in UTF-8") from None
            skipped += 1
    return sorted(texts.items()), skipped


def tokenised(texts: list[str], tok: Tokenizer):
    """Yield each text's tokens and end-of-document as bytes; a few MB at a time: lists of ints are ten times the text."""
    ends = itertools.accumulate(map(len, texts))
    for _, part in itertools.groupby(zip(ends, texts), lambda pair: pair[0] // 4_000_000):
        for ids in tok.encoding.encode_ordinary_batch([text for _, text in part], num_threads=os.cpu_count()):
            yield np.array([*ids, tok.eod], np.uint16).tobytes()


class Corpus:
    """.train and .val: uint16 tokens, memory-mapped from a cache; .val_bytes: the raw bytes behind .val, for bits per byte.
    .report: one line with files, bytes and the content hash that any quoted number should carry. Bits per byte is the summed loss
    over .val / ln 2 / len(val_bytes); the few end-of-documents in .val count as loss but not as bytes.

    path: a file or folder of UTF-8 text instead of Python source. max_bytes caps the training text (whole files), never the
    validation text. Fewer than 100 files: validation is the last 5% of the text instead of the last 1% of the files.
    ValueError when there is nothing to read, too little, or a file that is not UTF-8.
    """

    def __init__(self, tok: Tokenizer, path: str | Path | None = None, max_bytes: int | None = None):
        if tok.vocab_size > 65_536:
            raise ValueError(f"tokens are kept in 16 bits, a vocabulary of {tok.vocab_size} does not fit")
        texts, skipped = find_text(path)
        where = f"text {path}" if path else "Python source on this machine"
        content = hashlib.sha256("".join(h for h, _ in texts).encode()).hexdigest()[:12]
        texts = [text for _, text in texts]
        total = sum(len(text.encode()) for text in texts)
        if total < MIN_BYTES:
            raise ValueError(f"{where} holds {total} bytes of text; at least {MIN_BYTES:,} are needed to train on")
        if len(texts) >= 100:
            cut = len(texts) - len(texts) // 100
            ends = itertools.accumulate(len(text.encode()) for text in texts[:cut])
            train = [text for text, end in zip(texts, ends) if max_bytes is None or end <= max_bytes] or texts[:1]
            val = texts[cut:]
        else:
            whole = "\n".join(texts)
            cut = int(len(whole) * 0.95)
            train, val = [whole[:cut].encode()[:max_bytes].decode(errors="ignore")], [whole[cut:]]
        key = hashlib.sha256(f"2 {tok.hash} {content} {len(train)} {max_bytes}".encode()).hexdigest()[:16]
        self.paths = [cache_dir() / f"text-{key}-{part}.bin" for part in ("train", "val")]
        for file, part in zip(self.paths, (train, val)):
            if not is_whole(file):
                write_atomically(file, tokenised(part, tok))
        self.content, self.val_bytes = content, "".join(val).encode()
        self._open()
        n_bytes = sum(len(text.encode()) for text in train)
        self.report = (f"text: {where}: {len(texts):,} files, {total:,} bytes, content {content}; train {n_bytes:,} bytes "
                       f"{len(self.train):,} tokens, validation {len(self.val_bytes):,} bytes {len(self.val):,} tokens"
                       + (f"; {skipped} files skipped (not readable as UTF-8)" if skipped else ""))

    def _open(self):
        self.train, self.val = (np.memmap(path, dtype=np.uint16, mode="r")[: -MARK // 2] for path in self.paths)

    def __getstate__(self):  # worker processes map the files again instead of receiving a copy
        return {k: v for k, v in self.__dict__.items() if k not in ("train", "val")}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._open()


def secret(rng) -> tuple[str, str]:
    """A name and a value that nobody could guess: two words of three syllables."""
    return tuple("".join(rng.choice("bdlmnrsvz") + rng.choice("aeio") for _ in range(3)) for _ in range(2))


def needle_rows(tok: Tokenizer, filler, context: int, distance: int, n: int, seed: int = 0):
    """n rows that end in the beginning of a line `name = value` that stands whole `distance` tokens before it -> tokens [n,T],
    targets [n,T], -100 but at the value.

    filler: 1-D array of tokens to hide it in. All rows are about `context` long, wherever the definition stands. Definition, question
    and value take less than 64 tokens: distance may be context - 64 at most, and filler needs more than that. ValueError if not."""
    rng, room = random.Random(f"needle {seed} {distance}"), context - 64
    if not (0 <= distance <= room < len(filler)):
        raise ValueError(f"a definition {distance} tokens back in a row of {context}, of which 64 are taken, in {len(filler)} tokens of text")
    tokens, targets = torch.full((n, context), tok.eod), torch.full((n, context), -100)
    for i in range(n):
        name, value = secret(rng)
        start = rng.randrange(len(filler) - room)
        some = filler[start : start + room].tolist()
        ids = [tok.eod, *some[: room - distance], *tok.encode(f"\n{name} = {value}\n"), *some[room - distance :], *tok.encode(f"\n{name} =")]
        answer = tok.encode(f" {value}")
        end = len(ids) + len(answer) - 1
        tokens[i, :end] = torch.tensor(ids + answer[:-1])
        targets[i, len(ids) - 1 : end] = torch.tensor(answer)
    return tokens, targets


# ------------------------------------------------------------------------------------------------------------------
# 3. From pixels to patches and placeholders: ONE path for training, evaluation and sampling (its first half, from files to
#    pixels, is pictures.load_visual). Prep, which says how, travels inside the checkpoint.

def to_patches(clip, prep: Prep):
    """clip uint8 [T,3,h,w] -> patches uint8 [N, 3*tp*p*p], grids int64 [n,3], a (t,h,w) row in unmerged patches per segment."""
    return patchify(torch.as_tensor(np.asarray(clip)), prep.patch_size, prep.temporal_patch_size, prep.merge_size, prep.frames_per_segment)


def from_patches(patches: torch.Tensor, grids, prep: Prep) -> np.ndarray:
    """The way back, to see what the model sees: to_patches' (patches, grids) -> clip uint8 [T,3,h,w], T a multiple of tp."""
    p, tp, m = prep.patch_size, prep.temporal_patch_size, prep.merge_size
    h, w = (int(n) for n in grids[0, 1:])
    x = patches.view(-1, h // m, w // m, m, m, 3, tp, p, p)  # [t, h blocks, w blocks, m, m, 3, tp, p, p]
    return x.permute(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(-1, 3, h * p, w * p).numpy()  # -> [T,3,h,w]


def normalize(patches: torch.Tensor, prep: Prep) -> torch.Tensor:
    """patches uint8 [N, 3*tp*p*p] -> float32, same shape and device: (value/255 - mean) / std of each channel."""
    mean, std = (torch.tensor(v, device=patches.device, dtype=torch.float32)[:, None] for v in (prep.mean, prep.std))  # [3,1]
    return ((patches.float().view(len(patches), 3, -1) / 255 - mean) / std).view(patches.shape)  # [N,3,tp*p*p] -> [N,3*tp*p*p]


def visual_tokens(grids, is_clip: bool, tok: Tokenizer, prep: Prep) -> list[int]:
    """The ids that stand for one picture or clip: each temporal patch is [start] placeholders [end], one placeholder per token.
    The only place where placeholders are made, for training and for sampling."""
    place, ids = tok.clip if is_clip else tok.image, []
    for t, h, w in torch.as_tensor(grids).tolist():
        ids += ([tok.image_start] + [place] * (h * w // prep.merge_size**2) + [tok.image_end]) * t
    return ids


def build_prompt(tok: Tokenizer, prep: Prep, visuals, text: str = "") -> list[int]:
    """visuals: list of (grids, is_clip). -> [eod] visual tokens, question, [sep]; with no visuals [eod] and the text."""
    ids = [tok.eod]
    for grids, is_clip in visuals:
        ids += visual_tokens(grids, is_clip, tok, prep)
    return ids + tok.encode(text) + ([tok.sep] if visuals else [])


def encode_example(tok: Tokenizer, prep: Prep, example: Example):
    """-> prompt ids (build_prompt's), answer ids (ending in eod), patches uint8 [N,P], grids int64 [m,3]."""
    patches, grids = zip(*(to_patches(clip, prep) for clip, _ in example.visuals))
    prompt = build_prompt(tok, prep, [(g, is_clip) for g, (_, is_clip) in zip(grids, example.visuals)], example.question)
    return prompt, tok.encode(example.answer) + [tok.eod], torch.cat(patches), torch.cat(grids)


def count_tokens(tok: Tokenizer, prep: Prep, shapes: list, question: str, answer: str) -> tuple[int, int]:
    """Tokens of clips of these shapes [T,3,h,w] alone, and of the whole example: encode_example's, known without a pixel."""
    unit = prep.patch_size * prep.merge_size
    visual = sum(-(-T // prep.temporal_patch_size) * (h * w // unit**2 + 2) for T, _, h, w in shapes)
    return visual, visual + len(tok.encode(question)) + len(tok.encode(answer)) + 3  # sep, and end of document before and after


# ------------------------------------------------------------------------------------------------------------------
# 4. Your own pictures: a folder with metadata.jsonl (Hugging Face's imagefolder), or pictures beside same-named .txt.

MAX_CAPTION = 10_000  # characters
NAMED = 10  # so many names in a report, then a count


class Folder:
    """Your own pictures and clips as a sequence of Examples: len(folder), folder[i]. Only paths and captions are in memory, so the
    folder may be larger. Pixels are read from a file of all prepared ones, where load_folder kept them; else a picture is decoded
    whenever it is asked for. Either way inside the worker process that makes the row.

    kept                        that file's path, or None; clip i is uint8 [T,3,h,w] = shapes[i], from byte offsets[i] on
    paths, questions, captions  lists of n; a path is a file name, or the list of file names of a clip's frames
    lengths, visual             lists of n: tokens of the whole example and of its picture alone
    train, held                 indices of the training and of the held-out ones: about every 20th by the hash of the file's
                                content, so copies of one picture are on the same side; at least one, but none of fewer than 10
    content                     hash of all pictures and words
    """

    def __init__(self, prep: Prep, items: list):
        """items: (path, question, caption, length, visual, shape, content hash) of each."""
        self.prep, self.kept, self.missed = prep, None, False
        self.paths, self.questions, self.captions, self.lengths, self.visual, self.shapes, hashes = map(list, zip(*items))
        self.hashes, self.offsets = hashes, list(itertools.accumulate(map(math.prod, self.shapes), initial=0))
        held = {h for h in hashes if share("own", h) < 0.05} or {min(hashes, key=lambda h: share("own", h))}
        if len(items) < 10 or held >= set(hashes):
            held = set()
        self.train = [i for i, h in enumerate(hashes) if h not in held]
        self.held = [i for i, h in enumerate(hashes) if h in held]
        words = sorted(zip(hashes, self.questions, self.captions))
        self.content = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i) -> Example:
        return Example([self.read(i)], self.questions[i], self.captions[i], "own", 0.0)

    def read(self, i):
        """What load_visual gives for i, from the kept file if there is one; a word, once, if that has gone or been cut."""
        if self.kept:
            try:
                clip = np.fromfile(self.kept, np.uint8, math.prod(self.shapes[i]), offset=self.offsets[i]).reshape(self.shapes[i])
                return clip, len(clip) > 1 or isinstance(self.paths[i], list)
            except (OSError, ValueError):
                if not self.missed:
                    print(f"{self.kept} is not whole any more: its pictures are decoded at every use, which is slower", file=sys.stderr)
                self.missed = True
        return load_visual(self.paths[i], self.prep)

    def keep(self, file):
        """Move the file with all clips, one after another, into the cache. Its name is a hash of what is in it, in order."""
        key = hashlib.sha256(json.dumps([repr(self.prep), self.hashes]).encode()).hexdigest()[:12]
        self.kept = cache_dir() / f"own-{key}.bin"
        os.replace(file, self.kept)


def wanted(folder: Path) -> tuple[list, list[str]]:
    """(label, path or list of paths, question, caption) of everything in a folder that is meant to be used, with None for the path
    and the reason for the caption where words cannot be read; and what has a .txt, but is not named by a metadata.jsonl."""
    things, named, table = [], set(), folder / "metadata.jsonl"
    if table.is_file():
        for n, line in enumerate(table.read_bytes().split(b"\n"), 1):  # not splitlines: U+2028 in a caption ends no line
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig").strip())
                names = row.get("file_names") or row["file_name"]
                question, text = row.get("question") or "", row.get("text") or ""
                paths = [folder / name for name in ([names] if isinstance(names, str) else names)]
                if not isinstance(question, str) or not isinstance(text, str):
                    raise TypeError
                things.append((plain(names, 100), paths[0] if isinstance(names, str) else paths, question, text))
                named.update(paths)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                things.append((f"metadata.jsonl line {n}", None, "", "not a JSON object with file_name and text"))
        others = [f for f in sorted(folder.iterdir()) if f.suffix.lower() in PICTURE_SUFFIXES and f not in named]
        return things, [plain(f.name, 100) for f in others if f.with_suffix(".txt").is_file()]
    for file in sorted(folder.iterdir()):
        if file.name.startswith(".") or not (file.is_dir() or file.suffix.lower() in PICTURE_SUFFIXES):
            continue
        note, text = folder / f"{file.name if file.is_dir() else file.stem}.txt", ""
        try:
            if note.is_file():
                if folder not in note.resolve().parents:
                    raise ValueError("outside the folder")
                if note.stat().st_size > 4 * MAX_CAPTION:
                    raise ValueError(f"{note.stat().st_size:,} bytes, at most {MAX_CAPTION:,} characters are read")
                text = note.read_bytes().decode("utf-8-sig")
            things.append((plain(file.name, 100), file, "", text))
        except UnicodeDecodeError:
            things.append((plain(note.name, 100), None, "", "not UTF-8 text"))
        except (ValueError, OSError) as error:
            things.append((plain(note.name, 100), None, "", plain(getattr(error, "strerror", None) or error)))
    return things, []


def examine(item, root: Path, prep: Prep, tok: Tokenizer, context: int | None):
    """One thing of wanted() -> (Folder's tuple of it, what to say about its shape or "", clip uint8 [T,3,h,w]), or (None, reason, None)
    if it cannot be used. The picture is decoded here, to be sure that training can do it."""
    label, path, question, text = item
    try:
        if path is None:
            raise ValueError(text)
        files, several = frame_files(path)
        given = files if isinstance(path, list) else [path, *files]  # each of them may be a link
        if not all(root in p.resolve().parents for p in given):
            raise ValueError("outside the folder")
        question, text = (s.strip().encode("utf-8", "replace").decode() for s in (question, text))
        if not text:
            raise ValueError("no caption")
        if len(text) + len(question) > MAX_CAPTION:
            raise ValueError(f"a caption of {len(text) + len(question):,} characters, at most {MAX_CAPTION:,} are read")
        clip, _ = load_visual(files if several else files[0], prep)
        visual, length = count_tokens(tok, prep, [clip.shape], question, text)
        if context is not None and length > context:
            raise ValueError(f"takes {length} tokens, a row has {context}: fewer frames or words, or a longer context")
        with Image.open(files[0], formats=FORMATS) as im:
            before = max(im.size) / min(im.size)
        digest = hashlib.sha256(f"{len(files)}".encode())
        for file in files:
            with open(file, "rb") as f:
                digest.update(hashlib.file_digest(f, "sha256").digest())
    except (ValueError, OSError, RuntimeError) as error:  # paths too long, with a zero byte, in a loop of links, not ours to read
        reason = plain(getattr(error, "strerror", None) or error).replace(f"{plain(root)}{os.sep}", "")
        named = reason.startswith((f"{label}:", f"{label}{os.sep}"))  # the picture itself, or a frame in its folder
        return None, reason if named else f"{label}: {reason}", None
    after = max(clip.shape[2:]) / min(clip.shape[2:])
    squeezed = f"{label} from {before:.0f} : 1 to {after:.0f} : 1" if before > 2 * after else ""
    path = [str(f) for f in files] if several else str(files[0])
    return (path, question, text, length, visual, clip.shape, digest.hexdigest()), squeezed, clip


def load_folder(folder: str | Path, prep: Prep, tok: Tokenizer | None = None, context: int | None = None,
                keep: bool = False) -> tuple[Folder, str]:
    """Your own pictures -> (Folder, report). Either metadata.jsonl, a JSON object a line with "file_name" (or "file_names": the
    frames of a clip), "text" and perhaps "question"; or pictures (and folders of frames) beside a same-named .txt.

    What cannot be used (unreadable, no caption, outside the folder, longer than context) is left out and named in the report.
    keep: the prepared pixels go to a file in the cache, so that training reads them instead of decoding a picture at each use;
    where there is no room for it, the report says so and nothing else changes. ValueError if nothing is left.
    """
    from tqdm import tqdm

    folder, tok = Path(folder), tok or Tokenizer()
    if not folder.is_dir():
        raise ValueError(f"images {plain(folder)}: there is no such folder")
    root = folder.resolve()
    (things, beside), items, bad, squeezed = wanted(root), [], [], []
    spool, full = keep and cache_dir() / f"own.{os.getpid()}.tmp", []
    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # threads are enough: Pillow decodes without Python's lock
            results = pool.map(lambda thing: examine(thing, root, prep, tok, context), things)
            bar = tqdm(results, "checking pictures", len(things), mininterval=1, leave=False, disable=len(things) < 500)
            for item, said, clip in bar:
                if said:
                    (squeezed if item else bad).append(said)
                if item and keep and not full:
                    try:
                        with open(spool, "ab" if items else "wb") as file:
                            clip.tofile(file)
                    except OSError as error:
                        full = [f"  no room in the cache for the prepared pixels, so every use decodes a picture ({plain(error)})"]
                if item:
                    items.append(item)
        own = Folder(prep, items) if items else None
        if own and keep and not full:
            own.keep(spool)
    finally:
        if keep:
            spool.unlink(missing_ok=True)
    lines = [f"images {plain(folder)}: used {len(items):,} of {len(things):,}"]
    if items:
        lines[0] += f", {len(own.train):,} to train on and {len(own.held):,} held out; content {own.content}"
        for what, n in (("tokens a picture or clip", own.visual), ("tokens with words", own.lengths)):
            lines.append(f"  {what}: {min(n):,} at least, {median(n):,g} in the middle, {max(n):,} at most")
        if own.kept:
            lines.append(f"  prepared pixels: {own.kept.stat().st_size / 1e6:,.1f} MB, kept in {own.kept}")
        if not own.held:
            lines.append("  nothing is held out (that takes ten different ones): evaluations will not ask about your own pictures")
    for what, names in (("left out", bad), ("squeezed to fit", squeezed),
                        ("has a .txt, but metadata.jsonl, which decides, does not name it", beside)):
        lines += [f"  {what}: {name}" for name in names[:NAMED]]
        lines += [f"  {what}: and {len(names) - NAMED:,} more"] if len(names) > NAMED else []
    report = "\n".join(lines + full)
    if not items:
        raise ValueError(f"{report}\n  give metadata.jsonl with file_name and text, or pictures beside same-named .txt files")
    return own, report


# ------------------------------------------------------------------------------------------------------------------
# 5. Rows: what training reads. Documents are packed one after another without a mask between them, as in nanoGPT: the model
#    learns to start afresh after end-of-document. targets[t] = tokens[t+1]; -100 means no loss.


def pack(encoded: list, tok: Tokenizer, context: int):
    """Encoded examples -> tokens [T], targets [T], patches [N,P], grids [m,3]; the rest is eod without loss. The first one's
    own eod begins the row, the others use the one before them. ValueError if they do not fit: nothing is ever cut."""
    ids, learn = [tok.eod], []  # learn: what follows each of ids
    for prompt, answer, _, _ in encoded:
        ids += prompt[1:] + answer
        learn += [-100] * (len(prompt) - 1) + answer
    if len(ids) > context:
        raise ValueError(f"examples of {len(ids)} tokens do not fit a row of {context}")
    tokens = np.array(ids + [tok.eod] * (context - len(ids)), np.int64)  # by way of numpy: torch takes five times as long for a list
    targets = np.array(learn + [-100] * (context - len(learn)), np.int64)
    _, _, patches, grids = zip(*encoded)
    return torch.from_numpy(tokens), torch.from_numpy(targets), torch.cat(patches), torch.cat(grids)


@lru_cache(2)  # the text's and that of the other text beside it
def shuffled(chunks: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(chunks)


class Rows:
    """Training rows of `context` tokens, each a pure function of (seed, n): in any order and process, resumed or not.

    text(n)   -> tokens int64 [T], targets int64 [T]: the training text's chunks in a shuffled order, reshuffled each epoch. It
                 depends on the text, context, seed and n alone, so every recipe reads the same text in the same order.
    vision(n) -> tokens [T], targets [T], patches uint8 [N,P], grids int64 [m,3]: whole examples until the next does not fit.
    corpus or pictures may be None where only the other kind is wanted. mix: {task: weight}.
    own: load_folder's pictures; they are own_share of the examples seen (of the training ones only), or all without pictures.
    beside: a second corpus; text_share of the text rows, evenly spread, are then from corpus and the others from beside.
    ValueError if context is too short for the text, a clip or one of your own, or a share is not in (0, 1].
    """

    def __init__(self, tok: Tokenizer, prep: Prep, corpus: Corpus | None, pictures: Pictures | None, context: int, seed: int = 0,
                 own: "Folder | None" = None, mix: dict = MIX, own_share: float = 0.5, beside: Corpus | None = None,
                 text_share: float = 1.0):
        if not mix or set(mix) - set(TASKS):
            raise ValueError(f"the mix must give weights to some of {', '.join(TASKS)}, not {mix}")
        if not (0 < own_share <= 1 and 0 < text_share <= 1):
            raise ValueError(f"a share of your own data must be above 0 and at most 1, not {own_share} or {text_share}")
        self.mix, self.own, self.own_share, self.beside = mix, own, own_share, beside
        self.tok, self.prep, self.corpus, self.pictures, self.context, self.seed = tok, prep, corpus, pictures, context, seed
        self.text_share = text_share if beside else 1.0
        self.gone = set()  # own pictures that could not be read
        if own is not None and max(own.lengths) > context:
            i = own.lengths.index(max(own.lengths))
            raise ValueError(f"the example captioned {plain(own.captions[i], 60)!r} takes {own.lengths[i]} tokens, a row has {context}")
        for text in (corpus, beside):
            if text is not None and len(text.train) <= context:
                raise ValueError(f"the text has {len(text.train)} training tokens, too few for a row of {context}: "
                                 "give more text or a smaller context")
        if pictures is not None:
            unit = prep.patch_size * prep.merge_size
            if pictures.size % unit or pictures.size**2 > prep.max_pixels:
                raise ValueError(f"a canvas of {pictures.size} pixels must be a multiple of {unit} and within max_pixels "
                                 f"{prep.max_pixels}")
            longest = max(len(tok.encode(name)) for name in pictures.names)
            still = not any(mix.get(k) for k in MOVING)
            most = count_tokens(tok, prep, [(1 if still else 8, 3, pictures.size, pictures.size)], "", "")[0] + 3 * longest + 32
            if most > context:
                raise ValueError(f"a row of {context} tokens cannot hold every {'picture' if still else 'clip'} with its words: "
                                 f"the longest takes about {most}")

    def text(self, n: int):
        before = math.floor(n * self.text_share)  # rows from corpus among the first n
        mine = math.floor((n + 1) * self.text_share) > before
        source = self.corpus if mine else self.beside
        chunks = (len(source.train) - 1) // self.context
        epoch, k = divmod(before if mine else n - before, chunks)
        start = int(shuffled(chunks, self.seed, epoch)[k]) * self.context
        row = source.train[start : start + self.context + 1].astype(np.int64)
        return torch.from_numpy(row[:-1]), torch.from_numpy(row[1:].copy())  # no memory in common

    def vision(self, n: int):
        rng, encoded, room = random.Random(f"vision {self.seed} {n}"), [], self.context
        while True:
            mine = self.own is not None and (self.pictures is None or rng.random() < self.own_share)
            new = self.one_of_own(rng, room) if mine else self.one_drawn(rng, room)
            if new is None:
                return pack(encoded, self.tok, self.context)
            encoded.append(new)
            room -= len(new[0]) + len(new[1]) - 1  # an end of document is shared

    def one_drawn(self, rng, room: int):
        """The next example, encoded; None, and no pixel is drawn, if it takes more tokens than there is room for."""
        e = training_example(self.pictures, rng, self.mix)
        length = count_tokens(self.tok, self.prep, [clip.shape for clip, _ in e.visuals], e.question, e.answer)[1]
        return encode_example(self.tok, self.prep, e) if length <= room else None

    def one_of_own(self, rng, room: int):
        """The next of your own, or None. All could be read when training began; one that has since gone or changed is named, once,
        and another one taken. ValueError when half of them are gone."""
        while 2 * len(self.gone) < len(self.own.train):
            i = rng.choice(self.own.train)
            if self.own.lengths[i] > room:  # asked first, so that where a row ends does not depend on what this process has missed
                return None
            if i in self.gone:
                continue
            try:
                new = encode_example(self.tok, self.prep, self.own[i])
                if len(new[0]) + len(new[1]) == self.own.lengths[i]:
                    return new
                raise ValueError(f"{plain(self.own.paths[i])}: has another size than when training began")
            except ValueError as error:
                self.gone.add(i)
                print(f"passed over from here on: {error}", file=sys.stderr, flush=True)
        raise ValueError(f"{len(self.gone)} of your own {len(self.own.train)} pictures cannot be read any more: is their folder still there?")


# ------------------------------------------------------------------------------------------------------------------
# 6. To look at.


def contact_sheet(file: str | Path, examples, prep: Prep, note: str) -> int:
    """Draw examples with their words as the model sees them, cut into patches and put back -> how many found room."""
    seen = ((from_patches(*to_patches(e.frames, prep), prep), f"{e.question} {e.answer}") for e in examples)
    return draw_sheet(file, seen, note)


def own_sheet(file: str | Path, own: Folder) -> str:
    """The contact sheet of your own pictures, evenly chosen -> what to print about it."""
    some = (own[i] for i in range(0, len(own), -(-len(own) // 48)))
    note = f"{len(own):,} pictures and clips of your own, as the model sees them: at most {own.prep.max_pixels:,} pixels"
    return f"  {contact_sheet(file, some, own.prep, note)} of them drawn as the model sees them: {file}"


def default_sheet(file: str | Path, pictures: Pictures, prep: Prep, seed: int = 0) -> int:
    """The contact sheet of the default data, 24 stills before 12 clips, with OpenMoji's attribution."""
    rng, stills, clips = random.Random(f"sheet {seed}"), [], []
    while len(stills) < 24 or len(clips) < 12:
        e = training_example(pictures, rng)
        (clips if e.visuals[0][1] else stills).append(e)
    return contact_sheet(file, stills[:24] + clips[:12], prep, f"Pictures: {ATTRIBUTION}")


def speed(rows: Rows, seconds: float = 10.0) -> dict:
    """How fast this one process prepares picture rows; with DataLoader workers multiply by their number."""
    n = pictures = frames = 0
    rows.vision(0)  # the first pays for opening things
    start = time.time()
    while time.time() - start < seconds:
        n += 1
        tokens, _, _, grids = rows.vision(n)
        pictures += int((tokens == rows.tok.sep).sum())
        frames += int(grids[:, 0].sum())
    rates = {"pictures_per_s": pictures, "frames_per_s": frames, "tokens_per_s": n * rows.context}
    return {k: round(v / (time.time() - start), 1) for k, v in rates.items()}


def demonstrate():
    tok = Tokenizer()
    text = "def area(r):\n        return math.pi * r ** 2\n"
    ids = tok.encode(text)
    print(f"tokenizer: {len(tok.ranks):,} ranks, vocabulary {tok.vocab_size:,}, hash {tok.hash}")
    print(f"  {len(text)} characters -> {len(ids)} tokens: {[tok.decode([i]) for i in ids]}")
    print(f"  '<|endoftext|>' typed by a user is {len(tok.encode('<|endoftext|>'))} plain tokens; the real one is id {tok.eod}")
    pictures, prep = Pictures(56, limit=64), Prep()
    print(pictures.report)
    e = heldout("clip", 1, pictures)[0]
    patches, grids = to_patches(e.frames, prep)
    ids = visual_tokens(grids, True, tok, prep)
    print(f"  a clip {list(e.frames.shape)} is {len(patches)} patches and {len(ids)} tokens; it says {e.answer!r}")
    print(f"  patches put together again are the clip: {bool((from_patches(patches, grids, prep) == e.frames).all())}")
    rows, start = Rows(tok, prep, None, pictures, 1024), time.time()
    tokens, targets, patches, grids = rows.vision(0)
    n = int((tokens == tok.sep).sum())
    print(f"a packed row of {len(tokens)} tokens: {n} examples, {len(grids)} segments, {len(patches)} patches of "
          f"{patches.shape[1]} bytes, {int((targets >= 0).sum())} targets, {time.time() - start:.3f} s")


# What train.py's presets see: side of the largest picture in pixels (--canvas), tokens in a row of pictures (--vision_context).
SEEN = {"tiny": (56, 80), **dict.fromkeys(("study", "base", "gpt", "long"), (112, 256))}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_tokenizer", action="store_true", help="learn tokenizer.tiktoken again")
    parser.add_argument("--check", metavar="DIR", help="say what training would use of a folder of your own pictures")
    parser.add_argument("--show", metavar="PNG", help="draw what the model sees: of the default data, or of --check's folder")
    parser.add_argument("--speed", action="store_true", help="measure how fast rows are made of it")
    parser.add_argument("--preset", choices=SEEN, help="with --check: as this preset of train.py; default: base on a GPU, tiny elsewhere")
    parser.add_argument("--canvas", type=int, help="canvas of the pictures, pixels; default 112, with --check the preset's")
    parser.add_argument("--max_pixels", type=int, help="largest picture, in pixels; default canvas x canvas")
    parser.add_argument("--context", type=int, help="tokens in a row; default 2048, with --check the preset's")
    args = parser.parse_args(argv)
    for k, users in {"preset": "check", "context": "check speed", "canvas": "check show speed", "max_pixels": "check show speed"}.items():
        if getattr(args, k) is not None and not any(getattr(args, user) for user in users.split()):
            raise ValueError(f"--{k} does nothing without --{' or --'.join(users.split())}")
    if args.show:
        may_draw(args.show)
    if args.train_tokenizer:
        RANK_FILE.write_text(write_ranks(train_tokenizer()))
        print(f"wrote {RANK_FILE.name}")
        return
    preset = args.preset or ("base" if torch.cuda.is_available() else "tiny")
    size, context = SEEN[preset] if args.check else (112, 2048)
    size, context = args.canvas or size, args.context or context
    own, prep = None, Prep(max_pixels=args.max_pixels or size**2)
    if args.check:
        start = time.time()
        why = "" if args.preset else f", the default {'with' if preset == 'base' else 'without'} a GPU"
        print(f"as train.py --preset {preset}{why}: pictures of at most {prep.max_pixels:,} pixels, rows of {context} tokens; "
              "for another give --preset, or --max_pixels and --context (train.py's --vision_context)")
        own, report = load_folder(args.check, prep, context=context)
        print(f"{report}\n  checked in {time.time() - start:.1f} s")
    if args.show and own is not None:
        print(own_sheet(args.show, own))
    elif args.show:
        default_sheet(args.show, Pictures(size), prep)
        print(f"wrote {args.show}; pictures: {ATTRIBUTION}")
    if args.speed:
        print(json.dumps(speed(Rows(Tokenizer(), prep, None, None if own else Pictures(size), context, own=own))))
    if not (args.check or args.show or args.speed):
        demonstrate()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"data.py: {error}")
