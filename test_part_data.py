"""Checks of data.py: tokenizer, text, pictures, splits, rows, and files that broke others."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import data

SAMPLE = "def f(x):\n    return x + 1\n\n" * 400
PREP = data.Prep(max_pixels=56 * 56)


def small_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOM3_CACHE", str(tmp_path / "cache"))


def shared_pictures(monkeypatch, tmp_path_factory, limit=64):
    """Drawn once for all tests of a run: the cache is keyed by what is drawn."""
    monkeypatch.setenv("NANOM3_CACHE", str(tmp_path_factory.getbasetemp() / "pictures"))
    return data.Pictures(56, limit)


def text_corpus(tmp_path, text=SAMPLE):
    file = tmp_path / "words.txt"
    file.write_text(text)
    return data.Corpus(data.Tokenizer(), file)


# ---- tokenizer


@pytest.mark.parametrize("text", ["é🔥中", "", "<|endoftext|>", "<|image|><|clip|><|sep|>x", " \t\r\n\n   \u00a0\u2028",
                                  "a" * 5000, "x²_·__init__ 12345\x00", "def f():\n        return 1\n"])
def test_tokenizer_round_trip(text):
    """Pieces that the split pattern does not cover are lost, or text that looks special becomes a structure token."""
    tok = data.Tokenizer()
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert all(i < tok.eod for i in ids)


def test_tokenizer_every_character_class_survives():
    """A character that falls between the pattern's alternatives (combining marks, connectors, odd spaces) disappears silently."""
    tok = data.Tokenizer()
    text = "".join(chr(c) + "a" for c in range(0x3000) if not 0xD800 <= c < 0xE000)
    assert tok.decode(tok.encode(text)) == text


def test_tokenizer_indentation_is_one_token():
    """A tokenizer made for prose spends a token per space of Python's indentation."""
    tok = data.Tokenizer()
    for spaces in (4, 8, 12, 16):
        assert len(tok.encode("\n" + " " * spaces)) == 1


def test_tokenizer_ids_are_distinct_and_padded():
    """Special ids that collide with ranks, or an embedding too small for them."""
    tok = data.Tokenizer()
    special = {tok.eod, tok.image_start, tok.image_end, tok.image, tok.clip, tok.sep}
    assert len(special) == 6 and min(special) == len(tok.ranks) and max(special) < tok.vocab_size and tok.vocab_size % 64 == 0
    assert tok.decode([*tok.encode("ab"), tok.eod, tok.vocab_size - 1, tok.sep]) == "ab"


def test_tokenizer_travels_in_a_checkpoint(tmp_path):
    """State that only a full unpickle can read, or that comes back as another tokenizer."""
    tok = data.Tokenizer()
    torch.save(tok.state(), tmp_path / "t.pt")
    again = data.Tokenizer.from_state(torch.load(tmp_path / "t.pt", weights_only=True))
    assert again.hash == tok.hash and again.encode(SAMPLE) == tok.encode(SAMPLE)


def test_tokenizer_needs_no_network(tmp_path):
    """tiktoken's named encodings download on first use: ours must not, with an empty cache and no sockets."""
    code = ("import socket\ndef no(*a, **k): raise OSError('network used')\nsocket.socket.connect = no\nsocket.getaddrinfo = no\n"
            "import data\nprint(data.Tokenizer().decode(data.Tokenizer().encode('ok')))")
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    here = Path(data.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=here, check=False)
    assert done.stdout.strip() == "ok", done.stderr
    assert not list(tmp_path.iterdir())


def test_train_bpe_merges_most_frequent_first():
    """Stale pair counts after a merge give ranks in another order than recounting from scratch."""
    rng = random.Random(0)
    counts = {"".join(rng.choices("abc", k=rng.randrange(1, 9))): rng.randrange(1, 50) for _ in range(200)}
    words = {w: [bytes([b]) for b in w.encode()] for w in counts}
    slow = {bytes([b]): b for b in range(256)}
    while len(slow) < 300:
        pairs = {}
        for w, parts in words.items():
            for p in itertools.pairwise(parts):
                pairs[p] = pairs.get(p, 0) + counts[w]
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        slow.setdefault(best[0] + best[1], len(slow))
        for w, parts in words.items():
            out = []
            while parts:
                n = 2 if tuple(parts[:2]) == best else 1
                out.append(b"".join(parts[:n]))
                parts = parts[n:]
            words[w] = out
    assert data.train_bpe(counts, 300) == slow and len(slow) > 260


# ---- text


@pytest.mark.parametrize("content", [b"", b"ten bytes!", b"one line\n", b"\xff\xfe\x00bad" * 500])
def test_corpus_too_small_or_not_text(tmp_path, monkeypatch, content):
    """A traceback from deep inside, instead of one sentence that names the file."""
    small_cache(monkeypatch, tmp_path)
    (tmp_path / "words.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"words\.txt"):
        data.Corpus(data.Tokenizer(), tmp_path / "words.txt")


def test_corpus_missing_path(tmp_path, monkeypatch):
    """A misspelt --text silently trains on something else."""
    small_cache(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="nowhere"):
        data.Corpus(data.Tokenizer(), tmp_path / "nowhere")


def test_corpus_one_long_line(tmp_path, monkeypatch):
    """Splitting validation off by lines leaves nothing of a file that is one line."""
    small_cache(monkeypatch, tmp_path)
    c = text_corpus(tmp_path, "word " * 2000)
    assert len(c.val) > 0 and len(c.val_bytes) == 500
    tok = data.Tokenizer()
    assert tok.decode(c.train) + tok.decode(c.val) == "word " * 2000


def test_corpus_folder_deduplicates_splits_and_caps(tmp_path, monkeypatch):
    """Copies of one file in both train and validation, validation that changes with max_bytes, or an end-of-document lost."""
    small_cache(monkeypatch, tmp_path)
    folder = tmp_path / "many"
    folder.mkdir()
    for k in range(240):
        (folder / f"{k}.txt").write_text(f"file number {k % 120}\n" * 5)
    (folder / "bad.txt").write_bytes(b"\xff\xff")
    tok = data.Tokenizer()
    c, capped = data.Corpus(tok, folder), data.Corpus(tok, folder, max_bytes=2000)
    assert int((c.train == tok.eod).sum()) == 119 and int((c.val == tok.eod).sum()) == 1
    assert "120 files" in c.report and "1 files skipped" in c.report
    train = set(tok.decode(c.train).splitlines())
    assert not train & set(c.val_bytes.decode().splitlines()) and len(train) == 119
    assert capped.val_bytes == c.val_bytes and 0 < len(capped.train) < len(c.train)
    assert np.array_equal(capped.train, c.train[: len(capped.train)])
    files = {p.name for p in (tmp_path / "cache").iterdir()}
    assert data.Corpus(tok, folder).report == c.report and files == {p.name for p in (tmp_path / "cache").iterdir()}
    assert not any(name.endswith(".tmp") for name in files)


def test_corpus_two_processes_at_once(tmp_path):
    """Two runs that start together read each other's half-written cache."""
    (tmp_path / "words.txt").write_text("".join(f"value_{i} = {i}\n" for i in range(40_000)))
    code = (f"import data; c = data.Corpus(data.Tokenizer(), {str(tmp_path / 'words.txt')!r}); "
            "print(len(c.train), int(c.train.astype(int).sum()))")
    env = {**os.environ, "NANOM3_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    here = Path(data.__file__).parent
    command = [sys.executable, "-c", code]
    runs = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=here) for _ in range(2)]
    said = [p.communicate(timeout=60)[0] for p in runs]
    assert said[0] == said[1] and said[0].strip()


# ---- pictures and splits


def test_picture_names_are_plain_and_unique():
    """Underscores, capitals or two pictures of one name in the captions."""
    names = list(data.picture_names().values())
    assert len(names) > 3900 and len(set(names)) == len(names)
    assert not [n for n in names if "_" in n or n != n.lower() or n != n.strip() or "  " in n]
    assert {"red apple", "rocket", "flag of peru", "woman firefighter: medium skin tone"} <= set(names)


def test_variant_triples_are_seen_apart_never_together():
    """Held-out compositions that are in training after all, or whose parts were never seen together in pairs."""
    p = data.Pictures.__new__(data.Pictures)
    p.names = list(data.picture_names().values())
    p.sequences = list(data.picture_names())
    p._split()
    held = {p.triples[i] for i in p.variant}
    seen = {p.triples[i] for i in p.train if i in p.triples}
    assert len(held) > 0.07 * len(p.triples) and not held & seen
    pairs = {pair for t in seen for pair in data.pairs_of(t)}
    assert all(pair in pairs for t in held for pair in data.pairs_of(t))
    assert len(p.unseen) == pytest.approx(0.03 * len(p.names), rel=0.05)
    assert not {*p.unseen, *p.variant} & set(p.train) and len(p.train) + len(p.unseen) + len(p.variant) == len(p.names)


def test_training_never_shows_what_is_held_out(monkeypatch, tmp_path_factory):
    """A task that forgets to ask whether its pictures, their pair or their motion are kept for the test."""
    p = shared_pictures(monkeypatch, tmp_path_factory)
    shown, real = [], data.render
    monkeypatch.setattr("pictures.render", lambda pictures, rng, frames: shown.append(frames) or real(pictures, rng, frames))
    rng = random.Random(0)
    examples = [data.training_example(p, rng) for _ in range(1500)]
    train = set(p.train)
    for frames, e in zip(shown, examples, strict=True):
        who = sorted({t[0] for t in frames[0]})
        assert set(who) <= train
        assert not any(p.pair_held(i, j) for k, i in enumerate(who) for j in who[:k]), e
        for part in e.answer.split(" and the ") if e.kind == "clip" else []:
            motion = next(m for m in (*data.MOTIONS, "stays still") if part.endswith(" " + m))
            name = part.removeprefix("the ").removesuffix(" " + motion)
            assert motion == "stays still" or not p.motion_held(p.names.index(name), motion), e
        if e.kind == "question" and e.question in ("what does it do?", "which way does it move?"):
            assert not p.motion_held(who[0], e.answer if e.question == "what does it do?" else f"moves {e.answer}"), e
    shown.clear()
    for e, frames in zip([data.scene(p, random.Random(k), held=True) for k in range(50)], shown):
        assert p.pair_held(*[t[0] for t in frames[0]]), e


def test_tiles_never_overlap_or_leave_the_canvas(monkeypatch, tmp_path_factory):
    """Tiles that cover each other make a caption that the pixels do not tell."""
    p = shared_pictures(monkeypatch, tmp_path_factory)

    def check(pictures, rng, frames):
        for things in frames:
            boxes = [(x, y, x + p.sizes[k], y + p.sizes[k]) for _, k, x, y, _ in things]
            for n, (a, b, c, d) in enumerate(boxes):
                assert 0 <= a and 0 <= b and c <= p.size and d <= p.size
                assert all(c <= e or g <= a or d <= f or h <= b for e, f, g, h in boxes[:n]), things
        return np.zeros((len(frames), 3, p.size, p.size), np.uint8)

    monkeypatch.setattr("pictures.render", check)
    rng = random.Random(0)
    for _ in range(3000):
        data.training_example(p, rng)


@pytest.mark.parametrize("motion", data.MOTIONS)
def test_motion_is_told_by_the_pixels(monkeypatch, tmp_path_factory, motion):
    """A label that does not match what moves on the canvas: the centre of what is drawn must go where the words say."""
    p, placed, real = shared_pictures(monkeypatch, tmp_path_factory), [], data.render
    monkeypatch.setattr("pictures.render", lambda pictures, rng, frames: placed.append(frames) or real(pictures, rng, frames))
    for k in range(8):
        i = [i for i, turns in enumerate(p.turns) if turns][k]
        frames = data.film(p, random.Random(k), [(i, motion)]).astype(int)
        ink = np.abs(frames - frames[:, :, :1, :1]).sum(1)  # [T,c,c]: distance from the ground
        area = (ink > 30).sum((1, 2))
        ys, xs = (np.array([c[ink[t] > 30].mean() for t in range(len(ink))]) for c in np.mgrid[:56, :56])
        if motion in data.MOVES:
            dx, dy = data.MOVES[motion]
            along = xs * dx + ys * dy
            assert (np.diff(along) > 0.5).all() and along[-1] - along[0] > 9
            assert np.ptp(ys if dx else xs) < 1
        elif motion in ("grows", "shrinks"):
            assert (area[-1] / area[0] > 1.6) if motion == "grows" else (area[0] / area[-1] > 1.6)
        else:
            _, k, x, y, _ = placed[-1][0][0]
            tiles = frames[:, :, y : y + p.sizes[k], x : x + p.sizes[k]]
            quarter = -1 if motion == "turns clockwise" else 1  # numpy counts counterclockwise
            assert (tiles[1] == np.rot90(tiles[0], quarter, (1, 2))).all()
            assert (tiles[1] != np.rot90(tiles[0], -quarter, (1, 2))).any()


def test_heldout_is_fixed_and_chance_is_stated(monkeypatch, tmp_path_factory):
    """A test set that moves with the seed of training or the order of calls."""
    p = shared_pictures(monkeypatch, tmp_path_factory)
    random.seed(1)
    first = {k: data.heldout(k, 12, p) for k in data.HELDOUT}
    random.seed(2)
    for kind in reversed(data.HELDOUT):
        again = data.heldout(kind, 12, p)
        old, new = ([(e.question, e.answer, e.frames.tobytes()) for e in some] for some in (first[kind], again))
        assert old == new
        assert all(0 < e.chance <= 0.5 and e.answer for e in again)
        assert len(again) == (0 if kind == "variant" else 12)
    assert {e.answer for e in data.heldout("unseen_clip", 200, p)} >= {"up", "down", "left", "right", "grows", "shrinks"}
    few = data.Pictures(56, 24)
    assert all(len(data.heldout(kind, 3, few)) == 3 for kind in data.HELDOUT if kind != "variant")
    with pytest.raises(ValueError, match="scenery"):
        data.heldout("scenery", 1, p)


# ---- rows


def test_text_rows_walk_every_chunk_once_an_epoch(tmp_path, monkeypatch):
    """Rows that repeat or miss text, differ by order of asking, or have targets that are not the next token."""
    small_cache(monkeypatch, tmp_path)
    c = text_corpus(tmp_path)
    rows = data.Rows(data.Tokenizer(), PREP, c, None, 64, seed=3)
    chunks = (len(c.train) - 1) // 64
    epoch = [rows.text(n) for n in range(chunks)]
    wanted = [c.train[k * 64 : k * 64 + 64].astype(np.int64).tobytes() for k in range(chunks)]
    assert sorted(t.numpy().tobytes() for t, _ in epoch) == sorted(wanted)
    assert all(torch.equal(t[1:], y[:-1]) for t, y in epoch)
    second = [rows.text(n)[0] for n in range(chunks, 2 * chunks)]
    assert any(not torch.equal(a, b[0]) for a, b in zip(second, epoch))
    fresh = data.Rows(data.Tokenizer(), PREP, c, None, 64, seed=3)
    assert torch.equal(fresh.text(2 * chunks - 1)[0], second[-1]) and torch.equal(fresh.text(0)[1], epoch[0][1])
    with pytest.raises(ValueError, match="too few"):
        data.Rows(data.Tokenizer(), PREP, c, None, 10**6)


def test_vision_rows_are_exact_in_workers(monkeypatch, tmp_path_factory):
    """A row that depends on the process, on earlier rows or on global random state cannot be resumed."""
    p = shared_pictures(monkeypatch, tmp_path_factory)
    rows = data.Rows(data.Tokenizer(), PREP, None, p, 512, seed=1)

    class Some(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, n):
            return rows.vision(n)

    here = [rows.vision(n) for n in reversed(range(6))][::-1]
    for n, row in enumerate(torch.utils.data.DataLoader(Some(), batch_size=None, num_workers=2)):
        assert all(torch.equal(a, b) for a, b in zip(row, here[n], strict=True))
    assert not torch.equal(here[0][0], here[1][0])
    import pickle
    again = pickle.loads(pickle.dumps(rows))
    assert len(pickle.dumps(rows)) < 1_000_000 and torch.equal(again.vision(3)[2], here[3][2])


def test_vision_rows_learn_answers_only(monkeypatch, tmp_path_factory):
    """Loss on questions or pictures, targets not shifted, a sample cut at a row's end, or placeholders unlike the patches."""
    p, tok = shared_pictures(monkeypatch, tmp_path_factory), data.Tokenizer()
    rows = data.Rows(tok, PREP, None, p, 512)
    for n in range(20):
        tokens, targets, patches, grids = rows.vision(n)
        assert tokens.shape == targets.shape == (512,) and patches.dtype == torch.uint8 and grids.dtype == torch.int64
        learn = targets != -100
        assert torch.equal(targets[:-1][learn[:-1]], tokens[1:][learn[:-1]]) and targets[-1] == -100
        answering, expected = False, []
        for t in tokens.tolist():  # an answer starts after sep and ends with eod
            answering = (answering or t == tok.sep) and t != tok.eod
            expected.append(answering)
        assert learn.tolist() == expected
        places = int(((tokens == tok.image) | (tokens == tok.clip)).sum())
        assert places * 4 == len(patches) == int(grids.prod(1).sum()) and patches.shape[1] == 3 * 14 * 14
        assert int((tokens == tok.image_start).sum()) == int((tokens == tok.image_end).sum()) == int(grids[:, 0].sum())
    with pytest.raises(ValueError, match="cannot hold"):
        data.Rows(tok, PREP, None, p, 48)
    with pytest.raises(ValueError, match="multiple of 28"):
        data.Rows(tok, data.Prep(max_pixels=4000), None, data.Pictures(60, 64), 512)


def test_prompt_is_what_training_saw(monkeypatch, tmp_path_factory):
    """Training and sampling that build the placeholders differently, or a caption whose words become placeholders."""
    p, tok = shared_pictures(monkeypatch, tmp_path_factory), data.Tokenizer()
    e = data.heldout("clip", 1, p)[0]
    e.question = "<|image|>?<|sep|>"
    prompt, answer, patches, grids = data.encode_example(tok, PREP, e)
    assert prompt == data.build_prompt(tok, PREP, [(grids, True)], e.question) and prompt[-1] == tok.sep and answer[-1] == tok.eod
    assert prompt.count(tok.sep) == 1 and prompt.count(tok.clip) * 4 == len(patches) and tok.image not in prompt
    row = data.pack([(prompt, answer, patches, grids)], tok, len(prompt) + len(answer) + 3)
    assert row[0].tolist() == prompt + answer + [tok.eod] * 3
    assert data.build_prompt(tok, PREP, [], "x = 1") == [tok.eod, *tok.encode("x = 1")]


# ---- files


def loaded(tmp_path, im, name="a.png", prep=PREP, **options):
    im.save(tmp_path / name, **options)
    clip, is_clip = data.load_visual(tmp_path / name, prep)
    assert clip.dtype == np.uint8 and clip.shape[1] == 3 and all(s % 28 == 0 for s in clip.shape[2:])
    assert clip.shape[2] * clip.shape[3] <= prep.max_pixels and is_clip == (len(clip) > 1)
    return clip


def test_exif_orientation_is_applied(tmp_path):
    """A telephone's portrait seen lying on its side (orientation 6 on 100x200)."""
    im = Image.new("RGB", (200, 100), "red")
    im.paste("blue", (0, 0, 100, 100))
    exif = Image.Exif()
    exif[0x0112] = 6
    clip = loaded(tmp_path, im, "a.jpg", data.Prep(max_pixels=112 * 112), exif=exif)
    assert clip.shape[2] > clip.shape[3]
    assert clip[0, 2, 5].mean() > 200 and clip[0, 0, -5].mean() > 200  # the left half is on top: blue above red


def test_transparency_shows_the_background(tmp_path):
    """RGBA (255,0,0,0) is not red, and a transparent palette entry is not its hidden colour."""
    assert (loaded(tmp_path, Image.new("RGBA", (60, 60), (255, 0, 0, 0))) == 255).all()
    prep = data.Prep(max_pixels=3136, background=(10, 20, 30))
    assert (loaded(tmp_path, Image.new("RGBA", (60, 60), (255, 0, 0, 0)), prep=prep)[0, :, 3, 3] == (10, 20, 30)).all()
    im = Image.new("P", (60, 60), 0)
    im.putpalette([255, 0, 0, 0, 255, 0])
    im.paste(1, (0, 0, 60, 30))
    clip = loaded(tmp_path, im, transparency=0)
    assert (clip[0, :, -4, 9] == 255).all() and clip[0, :, 4, 9].tolist() == [0, 255, 0]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16B", "I", "F", "LAB", "HSV"])
def test_every_mode_is_read(tmp_path, mode):
    """Modes whose plain conversion raises, or clips 16 bits to white. Every picture here is half black, half bright."""
    ramp = np.zeros((64, 64, 3), np.uint8)
    ramp[:, 32:] = bright = 255 if mode in ("1", "P") else 200  # those two dither
    grey = ramp[..., 0]
    if mode.startswith("I"):
        im = Image.fromarray(grey.astype(np.uint16) * 257)  # I;16
        if mode == "I":
            im = im.convert("I")
        elif mode == "I;16B":
            im = Image.frombytes(mode, im.size, (grey.astype(np.uint16) * 257).astype(">u2").tobytes())
    elif mode == "F":
        im = Image.fromarray(grey.astype(np.float32) / 255)
    elif mode == "LAB":
        im = Image.frombytes("LAB", (64, 64), np.stack([grey, 0 * grey, 0 * grey], -1).tobytes())
    else:
        im = Image.fromarray(ramp).convert(mode)
    rgb = np.asarray(data.to_rgb(im, (255, 255, 255)), dtype=int)
    assert rgb.shape == (64, 64, 3) and rgb[:, :30].max() < 20
    assert np.abs(rgb[:, 34:] - bright).max() < 12
    if mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        assert loaded(tmp_path, im)[0, :, :, :20].max() < 40
    if mode == "CMYK":
        assert loaded(tmp_path, im, "a.tif")[0, :, :, :20].max() < 40


@pytest.mark.parametrize("size", [(1, 1), (3, 1000), (5000, 2), (27, 29), (400, 300), (56, 56)])
def test_sizes_fit_without_cropping(tmp_path, size):
    """Small pictures refused, long ones cropped or larger than max_pixels."""
    im = Image.new("RGB", size, "green")
    im.putpixel((size[0] - 1, size[1] - 1), (255, 0, 0))
    clip = loaded(tmp_path, im)
    assert size != (56, 56) or (np.asarray(im).transpose(2, 0, 1) == clip[0]).all()
    assert (clip.shape[2] > clip.shape[3]) == (size == (3, 1000)) and (clip.shape[2] < clip.shape[3]) == (size in ((5000, 2),))


def test_hostile_files_are_named(tmp_path, monkeypatch):
    """Half a JPEG, an empty file, HTML named .jpg, a decompression bomb, an empty folder: a traceback, not one sentence."""
    Image.effect_noise((300, 300), 90).convert("RGB").save(tmp_path / "whole.jpg")
    raw = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "half.jpg").write_bytes(raw[: len(raw) // 2])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "page.jpg").write_text("<html><body>404</body></html>")
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    Image.new("1", (9_000, 9_000)).save(tmp_path / "big.png")
    png = (tmp_path / "a.png", Image.new("RGB", (40, 40)))
    png[1].save(png[0])
    bad = bytearray(png[0].read_bytes())
    bad[45] ^= 255
    (tmp_path / "flipped.png").write_bytes(bad)
    (tmp_path / "none").mkdir()
    for name in ("half.jpg", "empty.png", "page.jpg", "bomb.png", "big.png", "flipped.png", "none", "missing.png"):
        with pytest.raises(ValueError, match=name.replace(".", r"\.")) as error:
            data.load_visual(tmp_path / name, PREP)
        assert "\n" not in str(error.value) and error.value.__cause__ is None, name


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_animations_are_clips(tmp_path, form):
    """Only the first frame of an animation is read, or a still is taken for a clip."""
    frames = [Image.new("RGB", (60, 40), c) for c in ("red", "lime", "blue")]
    frames[0].save(tmp_path / f"a.{form.lower()}", format=form, save_all=True, append_images=frames[1:], lossless=True)
    clip, is_clip = data.load_visual(tmp_path / f"a.{form.lower()}", PREP)
    assert is_clip and clip.shape == (3, 3, 28, 56)
    assert [int(f.mean((1, 2)).argmax()) for f in clip] == [0, 1, 2]


def test_frames_in_folders_and_lists(tmp_path):
    """frame10 sorted before frame2, a stray file in the folder, or frames of another size squeezed in silently."""
    for k in range(12):
        Image.new("RGB", (56, 56), (k * 20, 0, 0)).save(tmp_path / f"frame{k}.png")
    (tmp_path / "notes.txt").write_text("not a frame")
    clip, is_clip = data.load_visual(tmp_path, PREP)
    assert is_clip and clip[:, 0, 0, 0].tolist() == [k * 20 for k in range(12)]
    clip, is_clip = data.load_visual([tmp_path / "frame3.png"], PREP)
    assert is_clip and clip.shape == (1, 3, 56, 56)
    Image.new("RGB", (30, 56)).save(tmp_path / "odd.png")
    with pytest.raises(ValueError, match=r"odd\.png"):
        data.load_visual([tmp_path / "frame3.png", tmp_path / "odd.png"], PREP)


def test_second_picture_in_a_jpeg_is_no_frame(tmp_path):
    """Telephones put a preview behind the picture (MPO): that is a still."""
    ims = [Image.new("RGB", (60, 60), c) for c in ("red", "blue")]
    ims[0].save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=ims[1:])
    clip, is_clip = data.load_visual(tmp_path / "a.jpg", PREP)
    assert not is_clip and len(clip) == 1


@pytest.mark.parametrize("temporal", [1, 2])
def test_placeholders_match_patches_at_any_temporal_size(monkeypatch, tmp_path_factory, temporal):
    """Doubled stills and an odd last frame (temporal patch 2), or a clip over several segments, counted differently in tokens."""
    p, tok = shared_pictures(monkeypatch, tmp_path_factory), data.Tokenizer()
    prep = data.Prep(max_pixels=56 * 56, temporal_patch_size=temporal, frames_per_segment=2)
    frames = data.heldout("clip", 1, p)[0].frames
    for T in (1, 2, 3, 4):
        e = data.Example([(np.concatenate([frames, frames])[:T], T > 1)], "", "x", "own", 0.0)
        prompt, _, patches, grids = data.encode_example(tok, prep, e)
        steps = -(-T // temporal)
        assert grids[:, 0].tolist() == [2] * (steps // 2) + [1] * (steps % 2) and patches.shape == (steps * 16, 588 * temporal)
        assert prompt.count(tok.image) + prompt.count(tok.clip) == steps * 4 and prompt.count(tok.image_start) == steps
    rows = data.Rows(tok, prep, None, p, 256)
    assert rows.vision(0)[2].shape[1] == 588 * temporal


def test_same_file_same_patches(tmp_path):
    """A picture prepared twice, or through a saved Prep, gives other patches."""
    import dataclasses
    Image.effect_noise((90, 70), 80).convert("RGB").save(tmp_path / "a.png")
    prep = data.Prep(**dataclasses.asdict(PREP))
    a, b = (data.to_patches(data.load_visual(tmp_path / "a.png", q)[0], q) for q in (PREP, prep))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[0].dtype == torch.uint8
    x = data.normalize(a[0], PREP)
    red = (a[0][:, : 14 * 14].float() / 255 - PREP.mean[0]) / PREP.std[0]
    assert x.dtype == torch.float32 and torch.allclose(x[:, : 14 * 14], red, atol=1e-6)
    with pytest.raises(ValueError, match="max_pixels"):
        data.Prep(max_pixels=100)


def test_own_folder_uses_what_it_can(tmp_path):
    """A file_name that climbs out, empty or missing captions, a fake picture: named and counted, and the rest is used."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for k in range(3):
        Image.new("RGB", (56, 56), (90 * k, 0, 0)).save(folder / f"{k}.png")
    Image.new("RGB", (56, 56)).save(tmp_path / "secret.png")
    (folder / "page.jpg").write_text("<html>")
    lines = ['{"file_name": "0.png", "text": "a <|image|> nought"}', '{"file_name": "1.png", "text": " "}',
             '{"file_name": "2.png"}', "not json", "[1]",
             '{"file_name": "../secret.png", "text": "x"}', '{"file_name": "page.jpg", "text": "x"}',
             '{"file_names": ["0.png", "1.png", "2.png"], "text": "it reddens", "question": "what happens?"}']
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    examples, report = data.load_folder(folder, PREP)
    assert [(e.answer, len(e.frames), e.visuals[0][1]) for e in examples] == [("a <|image|> nought", 1, False),
                                                                              ("it reddens", 3, True)]
    named = ("1.png: no caption", "2.png", "line 4", "line 5", "outside", "page.jpg")
    assert "used 2 of 8" in report and all(word in report for word in named)
    tok = data.Tokenizer()
    tokens, _, patches, _ = data.Rows(tok, PREP, None, None, 128, own=examples).vision(0)
    assert int(((tokens == tok.image) | (tokens == tok.clip)).sum()) * 4 == len(patches) and tok.sep in tokens
    (folder / "metadata.jsonl").unlink()
    (folder / "1.txt").write_text("a beside\n")
    examples, report = data.load_folder(folder, PREP)
    assert [e.answer for e in examples] == ["a beside"] and "used 1 of 4" in report
    (folder / "1.txt").write_text("")
    for bad in (folder, tmp_path / "none"):
        with pytest.raises(ValueError, match=bad.name):
            data.load_folder(bad, PREP)
