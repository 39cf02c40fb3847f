"""What the MiniMax M3 talk says, as experiments that anyone can rerun: fair controls, several seeds, and whatever comes out.

    python study.py all                               every run that is not finished yet, then tables and figures in results/study
    python study.py recipes                           one experiment: recipes, attention, selection, frames or index
    python study.py all --parallel 4 --minutes 8      four runs side by side; none is started after 8 minutes: call it again to go on
    python study.py selection --only msa --seeds 0    one row, one seed
    python study.py all --redraw                      tables and figures anew from the finished runs, nothing else
    python study.py needle --ckpt out_long            how far back a model of yours finds a definition, by distance
    python study.py recipes --tiny                    a rehearsal on the CPU, in seconds: its numbers mean nothing; all else but needle needs a GPU

A run is `train.py` with the `study` preset and the flags in RUNS below, then a few measurements on its checkpoint. What remains of it
is one small JSON in results/study, named by experiment, setting and seed, with the command that makes the run again. A run whose JSON
exists is not run again: delete the file to repeat it. The set is 66 runs:

    recipes    8 settings x 3 seeds. Text only; pictures from the start, from the middle (two starts x two learning rates), after the
               decay; and the last one's learning rate schedule without any picture. All read the same text, and the same pictures: so
               an earlier start is a thinner mix (59% of what is read from 30% on is pictures, 71% from 60% on, 77% in CPT)
    attention  no run of its own: how much the words of native and CPT models look at the picture, and where
    selection  6 ways to select x 3 seeds, text only, in a context of 2,048 of which 256 tokens are kept. The text is this machine's Python
               source with lines `name = value` woven in that come again further down (weave, below); it measures copying
    frames     3 settings x 3 seeds; 4 frames a segment is recipes' native. No clip is longer than 8 frames, so 8 is "unlimited"
    index      15 settings, one seed: detach and warm-up, lambda, block size and blocks kept. Its baseline is selection's msa

Runs that stand side by side slow each other down, so their seconds mean little; nothing else depends on it. Only the ViT of `frames` is
timed, alone, before the first run starts. Pictures in figures: OpenMoji, CC BY-SA 4.0.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
OUT = (Path("out_study"), Path("out_study_tiny"))  # of real runs and of the rehearsal

SIZES, KEPT = (32, 64, 128), (4, 8, 16)  # tokens a block, blocks kept: index tries all pairs; 32 and 8 is the study preset
EXPERIMENTS = {  # the rows of each table: label -> (run, what is added to the flags of the preset); tables may share a run
    "recipes": {
        "text only": ("recipes-text_only", "--text_only"),
        "native": ("recipes-native", "--native"),
        "mid-training from 30%": ("recipes-midtrain-early", "--midtrain --vision_start 0.3"),
        "mid-training from 60%": ("recipes-midtrain-late", "--midtrain --vision_start 0.6"),
        "from 30%, half the rate": ("recipes-midtrain-early-half_lr", "--midtrain --vision_start 0.3 --lr 1.5e-3"),
        "from 60%, half the rate": ("recipes-midtrain-late-half_lr", "--midtrain --vision_start 0.6 --lr 1.5e-3"),
        "CPT from 70%": ("recipes-cpt", "--cpt"),
        "CPT schedule, no pictures": ("recipes-cpt-no_pictures", "--cpt --vision_rows 0"),
    },
    "attention": {"native": ("recipes-native", "--native"), "CPT": ("recipes-cpt", "--cpt")},
    "selection": {
        "dense": ("selection-dense", "LONG --attention dense"),
        "msa": ("selection-msa", "LONG"),
        "shared": ("selection-shared", "LONG --attention shared"),
        "local": ("selection-local", "LONG --attention local"),
        "random": ("selection-random", "LONG --attention random"),
        "token": ("selection-token", "LONG --attention token"),  # last: it has no kernel, and takes several times as long
    },
    "frames": {
        "1 (2D)": ("frames-1", "--native --frames_per_segment 1"),
        "2": ("frames-2", "--native --frames_per_segment 2"),
        "4": ("recipes-native", "--native"),
        "8 (unlimited)": ("frames-8", "--native --frames_per_segment 8"),
    },
    "index": {
        "baseline": ("selection-msa", "LONG"),
        "no warm-up": ("index-no_warmup", "LONG --index_warmup_steps 0"),
        "no detach": ("index-no_detach", "LONG --no-detach"),
        "neither": ("index-no_detach-no_warmup", "LONG --no-detach --index_warmup_steps 0"),
        "lambda 0.1": ("index-lambda0.1", "LONG --index_kl_coef 0.1"),
        "lambda 10": ("index-lambda10", "LONG --index_kl_coef 10"),
        "lambda 0.1, no detach": ("index-lambda0.1-no_detach", "LONG --index_kl_coef 0.1 --no-detach"),
        "lambda 10, no detach": ("index-lambda10-no_detach", "LONG --index_kl_coef 10 --no-detach"),
    },
}
for b, k in itertools.product(SIZES, KEPT):
    if (b, k) != (32, 8):
        EXPERIMENTS["index"][f"{b}x{k}"] = (f"index-{b}x{k}", f"LONG --index_block_size {b} --index_topk_blocks {k}")
ROWS = {name: {label: run for label, (run, _) in rows.items()} for name, rows in EXPERIMENTS.items()}
RUNS = dict(row for rows in EXPERIMENTS.values() for row in rows.values())
SEEDS = {"recipes": (0, 1, 2), "attention": (0, 1, 2), "selection": (0, 1, 2), "frames": (0, 1, 2), "index": (0,)}
CLAIMS = {
    "recipes": "The talk: pictures from the start hardly hurt text; added after the decay (CPT) they harm it; in the middle it depends on the settings.",
    "attention": "The talk: words hardly look at pictures that came late (CPT); with native training both are one.",
    "selection": "The talk: a few blocks, chosen by each KV head for itself, lose nothing against dense attention.",
    "frames": "The talk: four frames in a segment are the sweet spot between a 2D and a fully 3D ViT.",
    "index": "The talk: the index branch learns by imitation, detached from the rest, after a warm-up.",
}
# What the rehearsal changes. The flags in RUNS come after these, so they win.
TINY = shlex.split("""--preset tiny --max_steps 4 --eval_interval 4 --context 128 --batch_size 2 --vision_context 200 --vision_rows 2
    --tasks single=1,scene=1,clip_of_one=1,question=1 --pictures 24 --eval_items 4 --eval_rows 2 --corpus_bytes 100000
    --index_warmup_steps 1 --device cpu""")


def parse(argv=None):
    p = argparse.ArgumentParser(description="The talk as experiments: runs, tables and figures.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("name", metavar="NAME", help=f"one of {', '.join(ROWS)}, or all; needle: see --ckpt")
    p.add_argument("--ckpt", metavar="DIR", help="with needle: a trained model, asked for definitions far back; without it needle makes the text to train on")
    p.add_argument("--seeds", type=int, nargs="+", metavar="N", help="default 0 1 2, and 0 alone for index")
    p.add_argument("--only", metavar="TEXT", default="", help="only the runs with this in their name")
    p.add_argument("--parallel", type=int, default=1, metavar="N", help="runs side by side on one machine")
    p.add_argument("--minutes", type=float, metavar="M", help="start no run after M minutes")
    p.add_argument("--redraw", action="store_true", help="only draw tables and figures again")
    p.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU with results of its own in OUT/results")
    p.add_argument("--out", metavar="DIR", help="where runs and woven text are kept; default out_study, with --tiny out_study_tiny")
    return p.parse_args(argv)


if __name__ == "__main__":
    parse()  # --help, and a flag that is none, are answered before torch is imported, which takes seconds

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

import data
import model as m3
import msa
import sample
import train
import vit3d


def flags_of(run, out, tiny):
    """All of train.py's flags for a run, but for seed and out_dir."""
    long = "--text_only --context 128" if tiny else "--text_only --context 2048 --batch_size 8 --max_steps 1600"
    flags = shlex.split(RUNS[run].replace("LONG", f"{long} --text {shlex.quote(str(out / 'needles'))}"))
    text = ["--text", os.path.relpath(HERE / "train.py")] if tiny and "--text" not in flags else []
    return [*(TINY if tiny else ["--preset", "study"]), *text, *flags]


def command_of(run, seed, tiny):
    """The run by hand, after study.py has made the woven text; always in the default folder, wherever it was run."""
    out = OUT[tiny]
    return shlex.join(["python", "train.py", *flags_of(run, out, tiny), "--seed", str(seed), "--out_dir", str(out / f"{run}-{seed}")])


# ---------------------------------------------------------------------------------------------------------------------------
# The long text: Python source in which something must be remembered

def weave(text, rng):
    """Python source -> the same with a line `name = value` about every 250 characters, and the same line three times more between 60
    and 6,000 characters further on: what a model can only know by looking back.

    So dense because copying must be learned within a short run; the same line, because then it is the plainest kind of copying."""
    out, due, at, soon = [], [], 0, rng.randrange(250)
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        ready, due = [d for d in due if d[0] <= at], [d for d in due if d[0] > at]
        if at >= soon:
            ready.append((at, "{} = {}".format(*data.secret(rng))))
            due += [(at + 60 * 100 ** rng.random(), ready[-1][1]) for _ in range(3)]
            soon = at + 125 + rng.randrange(250)
        out += [indent + what for _, what in ready] + [line]
        at += len(line) + 1
    return "\n".join(out)


def write_needles(out, tiny):
    """out/needles: Python source woven, file by file, until there are 40 MB; in the rehearsal train.py alone. Made once."""
    folder = out / "needles"
    if folder.exists():
        return
    made = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    made.mkdir(parents=True)
    total = 0
    for content, text in data.find_text(HERE / "train.py" if tiny else None)[0]:
        raw = weave(text, random.Random(content)).encode()
        (made / f"{content[:16]}.py").write_bytes(raw)
        total += len(raw)
        if total > 4 * 10**7:
            break
    made.replace(folder)


# ---------------------------------------------------------------------------------------------------------------------------
# What is measured on a checkpoint, beyond what train.py reports


def average(x):
    return sum(x) / len(x)


def rounded(matrix, digits):
    return [[round(x, digits) for x in row] for row in matrix.tolist()]


@functools.cache
def corpus(path, most):
    """Read once a process: finding the text takes longer than measuring on it."""
    return data.Corpus(data.Tokenizer(), path, most)


def look(model, tok, prep, settings, items):
    """Where words look. -> {"mass": {kind: [layers][heads]}, "uniform": {kind: x}, "maps": [...]}

    mass: the share of attention that lands on visual tokens, from the positions that predict the answer, mean over held-out examples;
    uniform: what it would be if all visible tokens got the same. maps: for the first held-out scenes and each of their two things, the
    attention on each visual token, mean over layers, heads and the tokens of its name [h][w].
    """
    pictures, out = data.Pictures(settings["canvas"], settings["pictures"] or None), {"mass": {}, "uniform": {}, "maps": []}
    layers = [m for m in model.modules() if isinstance(m, msa.MSA)]
    device = next(model.parameters()).device

    def probe(layer, q, k, ids):  # n and found belong to the example below
        p = msa.attention_weights(q[:, -n:], k, None if ids is None else ids[:, :, -n:], layer.block_size)[0]
        found.append(p.flatten(1, 2)[0].float())  # [H,n,S]

    for m in layers:
        m.probe = probe
    for kind in ("scene", "clip"):
        mass, even = [], []
        for i, e in enumerate(data.heldout(kind, items, pictures)):
            prompt, answer, patches, grids = data.encode_example(tok, prep, e)
            n, found = len(answer), []
            model(torch.tensor([prompt + answer[:-1]]), patches=data.normalize(patches.to(device), prep), grids=grids)
            places = torch.tensor([j for j, t in enumerate(prompt) if t in (tok.image, tok.clip)], device=device)
            p = torch.stack(found)[..., places]  # [layers,H,n,visual tokens]
            mass.append(p.sum(-1).mean(-1))  # [layers,H]
            even.append(average([len(places) / (len(prompt) + j) for j in range(n)]))
            if kind == "scene" and i < 3:
                first = len(re.split(r" left of | above ", e.answer)[0])  # characters of the first thing's name
                ends = [len(tok.decode(answer[: j + 1])) for j in range(n - 1)]
                h, w = (grids[0, 1:] // prep.merge_size).tolist()
                names = [[j for j in range(n - 1) if ends[j] <= first], [j for j in range(n - 1) if ends[j] > first + 1]]
                at = p.mean((0, 1))  # [n, visual tokens]
                out["maps"].append([rounded(at[js].mean(0).view(h, w), 5) for js in names])
        out["mass"][kind] = rounded(torch.stack(mass).mean(0), 4)
        out["uniform"][kind] = average(even)
    for m in layers:
        m.probe = None
    return out


def far(model, tok, text, context, rows, needles):
    """How well a model looks back. -> {"late_loss", "captured", "block_recall", "overlap", "needle": {distance: exact}, "needle_nats", "picks"}

    late_loss: nats a token in the second half of the window. captured and block_recall: msa.selection_recall, mean over sparse layers and
    rows (1 for dense). overlap: |A and B| / |A or B| of the blocks that two KV heads keep beside the local one, mean over pairs, queries
    that had to choose and layers; None if none had. needle: a value far back copied exactly; needle_nats: the loss of
    its tokens. picks: the blocks that each KV head of the middle layer keeps, for the last query of each block [Hkv][queries][K] (msa only).
    """
    device = next(model.parameters()).device
    torch.manual_seed(0)  # of random blocks
    recalls, overlaps, picks = [], [], {}

    def probe(layer, q, k, ids):
        recalls.append(msa.selection_recall(q, k, ids, layer.block_size))
        T, first = ids.shape[2], layer.topk * layer.block_size
        if first < T and layer.topk > 1:
            at = torch.linspace(first, T - 1, min(64, T - first), device=ids.device).long()
            kept = torch.zeros(*ids.shape[:2], len(at), -(-T // layer.block_size), dtype=torch.bool, device=ids.device)
            kept.scatter_(-1, ids[:, :, at].long(), True)  # [B,Hkv,n,blocks]; these queries have no -1
            kept &= torch.arange(kept.shape[-1], device=ids.device) != (at // layer.block_size)[:, None]
            for a, b in itertools.combinations(kept.unbind(1), 2):  # [B,n,blocks] of two KV heads
                overlaps.append(((a & b).sum(-1) / (a | b).sum(-1)).mean().item())
        if layer.kind == "msa" and layer.layer not in picks:
            picks[layer.layer] = ids[0, :, layer.block_size - 1 :: layer.block_size].tolist()

    sparse = [m for m in model.modules() if isinstance(m, msa.MSA) and m.kind != "dense"]
    tokens, targets = train.validation_windows(text, context, rows)
    late = []
    for m in sparse:
        m.probe = probe
    for x, y in zip(tokens.split(4), targets.split(4)):
        logits = model(x).logits[:, context // 2 :].float()
        late.append(F.cross_entropy(logits.flatten(0, 1), y[:, context // 2 :].flatten().to(device), reduction="none"))
    for m in sparse:
        m.probe = None
    out = {"late_loss": torch.cat(late).mean().item(), "overlap": average(overlaps) if overlaps else None, "needle": {}, "needle_nats": {}}
    out["block_recall"], out["captured"] = (average(x) for x in zip(*recalls)) if recalls else (1.0, 1.0)
    for distance, exact, nats in retrieval(model, tok, text, context, needles):
        out["needle"][distance], out["needle_nats"][distance] = exact, nats
    if picks:
        layer = sorted(picks)[len(picks) // 2]
        out |= {"picks_layer": layer, "picks": picks[layer]}
    return out


def retrieval(model, tok, text, context, needles):
    """[(tokens to look back, share of `needles` values copied exactly, their loss in nats a token)], from a 32nd of the context to all of it."""
    device, out = next(model.parameters()).device, []
    for part in (32, 8, 4, 2, 1):
        distance, right, nats = (context - 64) // part, 0, []
        x, y = data.needle_rows(tok, text.val, context, distance, needles)
        for a, b in zip(x.split(max(1, 8192 // context)), y.split(max(1, 8192 // context))):
            logits, b = model(a).logits, b.to(device)
            right += train.exact(logits, b)
            nats += F.cross_entropy(logits[b >= 0].float(), b[b >= 0], reduction="none").tolist()
        out.append((distance, right / needles, average(nats)))
    return out


def needle(ckpt, out, tiny):
    """`study.py needle`: makes the woven text; with --ckpt, how well that model finds a definition far back, by distance -> needles.json beside it."""
    preset, trained = ("long", "out_long") if torch.cuda.is_available() and not tiny else ("tiny", "out_tiny")
    write_needles(out, tiny)
    if ckpt is None:
        print(f"text to copy from, woven into Python source: {out / 'needles'}. Train on it, then look:")
        print(f"  python train.py --preset {preset} --text_only --text {out / 'needles'} --out_dir {trained}\n  python study.py needle --ckpt {trained}")
        return 0
    state = sample.read_checkpoint(ckpt)
    s = state["settings"]
    if s["context"] < 128:
        raise ValueError(f"{ckpt} has a context of {s['context']} tokens: too short to hide something in")
    model, tok, _, settings = sample.load(ckpt, s["device"] if torch.cuda.is_available() else "cpu")
    with torch.no_grad(), sample.autocast(model):
        found = retrieval(model, tok, corpus(str(out / "needles"), None), s["context"], 4 if tiny else 100)
    print(f"{settings['path']}: step {state['step']}, attention {s['attention']}, context {s['context']:,}")
    for distance, exact, nats in found:
        print(f"  {distance:6,} tokens back: {exact:6.1%} copied exactly, {nats:.2f} nats a token")
    needles = [dict(zip(("distance", "exact", "nats"), x)) for x in found]
    report = hardware(tiny) | {"attention": s["attention"], "context": s["context"], "step": state["step"], "needles": needles}
    write_json(settings["path"].with_name("needles.json"), report)
    return 0


def measure(run, folder, tiny):
    """-> what is kept of a finished run, beside who ran it. ValueError if it did not reach its last step."""
    log = train.read_log(folder / "log.jsonl")
    steps = [r for r in log if "eval" not in r]
    state = sample.read_checkpoint(folder / "ckpt.pt")
    s = state["settings"]
    finals = [r for r in log if "eval" in r and r["step"] == s["max_steps"]]
    if not finals:
        raise ValueError(f"{run}: stopped at step {state['step']} of {s['max_steps']}")
    model, tok, prep, settings = sample.load(folder, s["device"])
    out = {"steps": s["max_steps"], "text": state["corpus"], "final": finals[-1]["eval"], "last": steps[-1]}
    norms = [r["grad_norm"] for r in steps[s["index_warmup_steps"] :] or steps]
    out |= {"grad_norm_mean": average(norms), "grad_norm_max": max(norms)}
    kinds = [k for k in data.HELDOUT if k in out["final"]]
    if kinds:
        pictures = data.Pictures(s["canvas"], s["pictures"] or None)
        asked = {k: data.heldout(k, s["eval_items"], pictures) for k in kinds}
        out["chance"] = {k: average([e.chance for e in items]) for k, items in asked.items() if items}
    with torch.no_grad(), sample.autocast(model):
        if run in ROWS["attention"].values():
            out["attention"] = look(model, tok, prep, settings, 2 if tiny else 32)
        if run.startswith(("selection", "index")):
            out["far"] = far(model, tok, corpus(s["text"], s["corpus_bytes"]), s["context"], *((2, 4) if tiny else (16, 100)))
    return out


def time_vit(tiny):
    """ms and MiB for a clip through the ViT alone, random weights, no gradient, by frames a segment; the median of 7, memory beyond the weights.

    Two kinds of clip: as in training, and a long one of larger pictures, where full 3D attention begins to weigh.
    """
    gpu = torch.cuda.is_available() and not tiny
    device, wait = ("cuda", torch.cuda.synchronize) if gpu else ("cpu", lambda: None)
    preset, out = "tiny" if tiny else "study", {}
    for what, clips, frames, side in (("short", 2, 8, 56), ("long", 1, 16, 56)) if tiny else (("short", 64, 8, 112), ("long", 1, 64, 448)):
        rows = {}
        for each in (1, 2, 4, 8, frames):
            c = m3.M3Config.of_size(preset, vision={"temporal_patch_size": 1, "frames_per_segment": each}).vision
            torch.manual_seed(0)
            vit = vit3d.ViT(c).to(device).eval()
            cut = [vit3d.patchify(torch.randn(frames, 3, side, side), c.patch_size, 1, c.spatial_merge_size, each) for _ in range(clips)]
            patches, grids = torch.cat([p for p, _ in cut]).to(device), torch.cat([g for _, g in cut])
            times, memory = [], None
            with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16, enabled=gpu):
                vit(patches, grids)
                wait()
                if gpu:
                    before = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                for _ in range(1 if tiny else 7):
                    began = time.perf_counter()
                    vit(patches, grids)
                    wait()
                    times.append((time.perf_counter() - began) * 1e3)
                if gpu:
                    memory = (torch.cuda.max_memory_allocated() - before) / 2**20 / clips
            rows[each] = {"ms": median(times) / clips, "mib": memory}
        out[what] = {"frames": frames, "pixels": side, "clips": clips, "by_frames_per_segment": rows}
    return out


# ---------------------------------------------------------------------------------------------------------------------------
# Running


def hardware(tiny):
    name = torch.cuda.get_device_name() if torch.cuda.is_available() and not tiny else f"{os.cpu_count()} CPU cores"
    return {"hardware": name, "torch": torch.__version__}


RUNNING = set()  # processes that must not outlive this one


def train_run(run, seed, out, tiny, parallel):
    """Train in a process of its own; the rehearsal, one at a time, in this one: importing torch takes longer than its four steps.

    ValueError with the last line that train.py printed if it fails. Everything it printed is in train.log of its folder."""
    folder = out / f"{run}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    workers = 0 if tiny else max(2, min(6, (os.cpu_count() or 1) // parallel - 1))
    argv = [*flags_of(run, out, tiny), "--seed", str(seed), "--out_dir", str(folder), "--overwrite", "--workers", str(workers)]
    with open(folder / "train.log", "w") as log:
        if tiny and parallel == 1:
            handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
            try:
                with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                    train.main(argv)
            finally:
                for n, handler in handlers.items():
                    signal.signal(n, handler)
            return folder
        process = subprocess.Popen([sys.executable, str(HERE / "train.py"), *argv], stdout=log, stderr=subprocess.STDOUT)
        RUNNING.add(process)
        code = process.wait()
        RUNNING.discard(process)
    if code:
        said = (folder / "train.log").read_text().strip().splitlines()
        raise ValueError(f"{run}, seed {seed}: {said[-1] if said else f'exit code {code}'} (see {folder / 'train.log'})")
    return folder


def read_results(results, tiny):
    """{(run, seed): what is kept of it}, and "timing". ValueError when a file was made by another command than today's: a table must not mix them."""
    found = {}
    for file in sorted(results.glob("*.json")):
        try:
            r = json.loads(file.read_text())
            key = "timing" if file.stem == "frames-timing" and "run" not in r else (r["run"], r["seed"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{file} is not a result of study.py: delete it, or keep it elsewhere") from None
        if key != "timing" and (r["run"] not in RUNS or r["command"] != command_of(*key, tiny)):
            raise ValueError(f"{file} was made by another command ({r['command']}): delete it, or keep it elsewhere")
        found[key] = r
    return found


def plan(names, seeds, only):
    """(run, seed) in the order in which an unfinished set says most: seed 0 of everything, then seed 1."""
    wanted = []
    for seed in sorted(set(seeds or range(3))):
        for name in names:
            if seed in (seeds or SEEDS[name]):
                wanted += [(run, seed) for run in ROWS[name].values() if only in run]
    return list(dict.fromkeys(wanted))


def write_json(path, what):
    path.with_suffix(".tmp").write_text(json.dumps(what, separators=(",", ":")) + "\n")
    path.with_suffix(".tmp").replace(path)


def prepare(jobs, out, tiny):
    """What several runs would all begin with is made once, before them: woven text, tokens, drawings."""
    if any(RUNS[run].startswith("LONG") for run, _ in jobs):
        write_needles(out, tiny)
    for run, _ in jobs:
        s = train.settle(train.parse(flags_of(run, out, tiny)))
        corpus(s.get("text"), s["corpus_bytes"])
        if s["recipe"] != "text_only":
            data.Pictures(s["canvas"], s["pictures"])


def run_all(jobs, out, results, args, began):
    """Run jobs [(run, seed)] in order, args.parallel at a time -> [finished, failed, not started]."""
    lock, counts, here = threading.Lock(), [0, 0, 0], hardware(args.tiny)

    def one(job):
        run, seed = job
        if args.minutes is not None and time.monotonic() - began > 60 * args.minutes:
            counts[2] += 1
            return
        start = time.monotonic()
        try:
            folder = train_run(run, seed, out, args.tiny, args.parallel)
            seconds = round(time.monotonic() - start, 1)
            with lock:  # one at a time: measuring is short, and the models stay out of each other's memory
                result = {"run": run, "seed": seed, "command": command_of(run, seed, args.tiny), **here, "side_by_side": args.parallel, "seconds": seconds}
                result |= measure(run, folder, args.tiny)
                write_json(results / f"{run}-{seed}.json", result)
                counts[0] += 1
                print(f"{run}, seed {seed}: {result['final']['bits_per_byte']:.3f} bits a byte, {seconds:.0f} s ({counts[0]} of {len(jobs)})", flush=True)
            if run not in ROWS["attention"].values():  # those are kept to be looked at with sample.py
                shutil.rmtree(folder)
        except (ValueError, OSError, RuntimeError) as e:  # the others go on
            counts[1] += 1
            print(f"failed: {run}, seed {seed}: {str(e).strip() or type(e).__name__}", flush=True)

    if args.parallel == 1:
        for job in jobs:
            one(job)
    else:
        pool = ThreadPoolExecutor(args.parallel)  # no `with`: that would wait for the runs which a signal is to end
        try:
            list(pool.map(one, jobs))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return counts


# ---------------------------------------------------------------------------------------------------------------------------
# Tables


def percent(part, key):
    return lambda r: None if r.get(part, {}).get(key) is None else 100 * r[part][key]


def mass(kind, pick):
    """mean or max over layers and heads."""
    return lambda r: 100 * pick([x for layer in r["attention"]["mass"][kind] for x in layer])


BITS = ("bits a byte", 3, lambda r: r["final"]["bits_per_byte"])
CAPTURED = ("attention captured (%)", 1, percent("far", "captured"))
SEEN = {  # what is asked about held-out pictures: title -> its name in an evaluation
    "known picture (%)": "picture",
    "scene (%)": "scene",
    "clip (%)": "clip",
    "question (%)": "question",
    "motion of an unseen picture (%)": "unseen_clip",
}
SIGHT = [(title, 1, percent("final", kind)) for title, kind in SEEN.items()]
COLUMNS = {  # title, digits, what to take of a result
    "recipes": [BITS, *SIGHT],
    "attention": [
        ("scenes: attention on pixels (%)", 1, mass("scene", average)),
        ("the head with most (%)", 1, mass("scene", max)),
        ("if spread evenly (%)", 1, lambda r: 100 * r["attention"]["uniform"]["scene"]),
        ("clips: attention on pixels (%)", 1, mass("clip", average)),
        ("the head with most (%)", 1, mass("clip", max)),
        ("if spread evenly (%)", 1, lambda r: 100 * r["attention"]["uniform"]["clip"]),
    ],
    "selection": [
        BITS,
        ("nats a token, second half", 3, lambda r: r["far"]["late_loss"]),
        CAPTURED,
        ("overlap of KV heads (%)", 1, percent("far", "overlap")),
    ],  # and the needle at each distance
    "frames": SIGHT,  # and the times of the ViT
    "index": [
        BITS,
        ("blocks recalled (%)", 1, percent("far", "block_recall")),
        CAPTURED,
        ("index KL", 3, lambda r: r["last"]["index_kl"]),
        ("gradient norm, mean", 2, lambda r: r["grad_norm_mean"]),
        ("largest", 2, lambda r: r["grad_norm_max"]),
    ],
}


def numbers(results, get):
    """What get finds in results, without None."""
    return [v for v in map(get, results) if v is not None]


def spread(results, digits, get):
    """-> "mean (lowest to highest)" of what get finds."""
    values = numbers(results, get)
    if not values:
        return "-"
    text = f"{average(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def of_row(found, run):
    """The results of a run, by seed."""
    return [found[k] for k in sorted(k for k in found if k[0] == run)]


def clips(found):
    """The two kinds of clip that time_vit timed; none if it did not run."""
    return [t for t in found.get("timing", {}).values() if isinstance(t, dict)]


def distances(found):
    return sorted({int(d) for k, r in found.items() if k != "timing" and k[0].startswith("selection") for d in r["far"]["needle"]})


def about(name, found):
    """One line: what the numbers are, on what, of what text."""
    here = [r for run in ROWS[name].values() for r in of_row(found, run)]
    every = lambda key: ", ".join(sorted({str(r[key]) for r in here}))
    seeds = sorted({r["seed"] for r in here})
    many = f"mean (lowest to highest) over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"one seed ({seeds[0]})"
    same = "" if len({r["text"] for r in here}) == 1 else " (NOT the same text for all: do not compare)"
    return f"{every('hardware')}, torch {every('torch')}; {every('steps')} steps; {many}; text {every('text')}{same}"


def table(name, found):
    """The Markdown of an experiment, from whatever runs are there."""
    columns = list(COLUMNS[name])
    if name == "selection":
        columns += [(f"needle, {d:,} tokens back (%)", 0, lambda r, d=d: 100 * r["far"]["needle"][str(d)]) for d in distances(found)]
        columns.append(("its tokens, nats each, over all distances", 2, lambda r: average(r["far"]["needle_nats"].values())))
    lines = [f"# {name}", "", CLAIMS[name], ""]
    timed = clips(found) if name == "frames" else []
    heads = [title for title, _, _ in columns]
    for t in timed:
        heads.append(f"ViT, a clip of {t['frames']} x {t['pixels']} px (ms)")
        if t["by_frames_per_segment"]["1"]["mib"]:
            heads.append("its memory (MiB)")
    lines += ["| " + " | ".join(["", *heads, "seeds", "run"]) + " |", "|" + "---|" * (len(heads) + 3)]
    missing, chance = [], {}
    for label, run in ROWS[name].items():
        if not (rows := of_row(found, run)):
            missing.append(label)
            continue
        cells = [label, *(spread(rows, digits, get) for _, digits, get in columns)]
        for t in timed:
            x = t["by_frames_per_segment"][str(t["frames"]) if "unlimited" in label else label.split()[0]]
            cells += [f"{x['ms']:.2f}"] + ([f"{x['mib']:.1f}"] if x["mib"] else [])
        lines.append("| " + " | ".join([*cells, str(len(rows)), f"`{run}`"]) + " |")
        chance |= rows[0].get("chance", {})
    if chance and name in ("recipes", "frames"):
        cells = [f"{100 * chance[SEEN[title]]:.2g}" if SEEN.get(title) in chance else "" for title, _, _ in columns]
        lines.append("| " + " | ".join(["*guessing*", *cells, *[""] * (len(heads) - len(cells) + 2)]) + " |")
    lines += ["", about(name, found) + ".", "", f"A row again: delete its JSON files, then `python study.py {name} --only RUN`."]
    if missing:
        lines += ["", f"Not run: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------------------------
# Figures, 8.5 inches wide: 850 pixels in a README


def dots(ax, rows, get, color, marker="o", label=None, shift=0.0):
    """A row a label from top to bottom: every seed a small dot, their mean a marker, a line from lowest to highest."""
    for i, results in enumerate(rows):
        if values := numbers(results, get):
            y = i + shift
            ax.plot([min(values), max(values)], [y, y], color=color, lw=1.5, alpha=0.6)
            ax.plot(values, [y] * len(values), ".", color=color, ms=4, alpha=0.6)
            ax.plot([average(values)], [y], marker, color=color, ms=6, label=label)
            label = None


def name_rows(ax, labels):
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.grid(axis="x", alpha=0.3)


def draw_recipes(found, labels, rows):
    fig = Figure(figsize=(8.5, 0.42 * len(labels) + 1.9), layout="constrained")
    a, b = fig.subplots(1, 2, sharey=True)
    dots(a, rows, BITS[2], "tab:blue")
    a.set_xlabel("text, bits a byte (less is better)")
    for k, ((title, _, get), marker) in enumerate(zip(SIGHT, "osD^v")):
        dots(b, rows, get, f"C{k}", marker, title.removesuffix(" (%)"), 0.14 * (k - 2))
    b.set(xlabel="held out, exact answers (%)", xlim=(-3, 103))
    name_rows(a, labels)
    b.grid(axis="x", alpha=0.3)
    fig.legend(*b.get_legend_handles_labels(), fontsize=7, loc="outside upper center", ncols=5)
    return fig


def draw_frames(found, labels, rows):
    fig = Figure(figsize=(8.5, 3.4), layout="constrained")
    a, b = fig.subplots(1, 2)
    for (title, _, get), marker in zip(SIGHT, "osD^v"):
        points = [(i, values) for i, results in enumerate(rows) if (values := numbers(results, get))]
        if points:
            x, seeds = zip(*points)
            mean = [average(v) for v in seeds]
            reach = [m - min(v) for m, v in zip(mean, seeds)], [max(v) - m for m, v in zip(mean, seeds)]
            a.errorbar(x, mean, reach, marker=marker, ms=5, capsize=3, label=title.removesuffix(" (%)"))
    a.set_xticks(range(len(labels)), labels)
    a.set(xlabel="frames a segment", ylabel="held out, exact answers (%)", ylim=(-3, 103))
    a.grid(alpha=0.3)
    a.legend(fontsize=7)
    for t in clips(found):
        each = {int(k): x["ms"] for k, x in t["by_frames_per_segment"].items()}
        label = f"{t['frames']} frames of {t['pixels']} px: {each[1]:.2f} ms at 1"
        b.plot(each.keys(), [x / each[1] for x in each.values()], marker="o", label=label)
        b.set(xscale="log", xlabel="frames a segment", ylabel="ViT, time of a clip (1 frame a segment = 1)")
        b.set_xticks(list(each), list(each))
        b.minorticks_off()
    b.grid(alpha=0.3)
    if b.lines:
        b.set_ylim(0, 1.1 * max(y for line in b.lines for y in line.get_ydata()))
        b.legend(fontsize=7, loc="upper left")
    return fig


def draw_selection(found, labels, rows):
    fig = Figure(figsize=(8.5, 5.6))
    top, bottom = fig.add_gridspec(2, 1, height_ratios=(1, 0.95), hspace=0.35, left=0.09, right=0.985, top=0.97, bottom=0.1)
    a, b = top.subgridspec(1, 2, wspace=0.25).subplots()
    dots(a, rows, lambda r: r["far"]["late_loss"], "tab:blue")
    a.set_xlabel("loss in the second half of the window (nats a token)")
    name_rows(a, labels)
    far_away = distances(found)
    for label, results in zip(labels, rows):
        if results:
            b.plot(far_away, [average([100 * r["far"]["needle"][str(d)] for r in results]) for d in far_away], marker="o", ms=4, label=label)
    b.set(xscale="log", xlabel="tokens between definition and question", ylabel="value copied exactly (%)", ylim=(-3, 103))
    b.set_xticks(far_away, [str(d) for d in far_away])
    b.minorticks_off()
    b.grid(alpha=0.3)
    b.legend(fontsize=7, ncols=2)
    for r in [r["far"] for r in of_row(found, "selection-msa")][:1]:
        axes = bottom.subgridspec(1, len(r["picks"]), wspace=0.1).subplots(squeeze=False)[0]
        axes[0].set_ylabel(f"block of the query\n(msa, layer {r['picks_layer']}, dark: kept)", fontsize=8)
        for h, (ax, queries) in enumerate(zip(axes, r["picks"])):
            shade = 0.15 * np.tri(len(queries))  # [blocks of queries, blocks of keys]
            for i, kept in enumerate(queries):
                shade[i, [j for j in kept if j >= 0]] = 1
            ax.imshow(shade, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            ax.set_title(f"KV head {h}", fontsize=8)
            ax.set_xlabel("block of keys", fontsize=8)
            ax.tick_params(labelsize=7)
        for ax in axes[1:]:
            ax.set_yticks([])
    return fig


def draw_index(found, labels, rows):
    fig = Figure(figsize=(8.5, 6.4), layout="constrained")
    axes = fig.subplots(2, 2, height_ratios=(1, 1.15))
    by_label = dict(zip(labels, rows))
    chosen = [label for label in labels if not re.fullmatch(r"\d+x\d+", label)]
    for ax, heat, (title, digits, get), of, color in zip(*axes, (BITS, CAPTURED), ("text, ", ""), ("tab:blue", "tab:green")):
        dots(ax, [by_label[label] for label in chosen], get, color)
        name_rows(ax, chosen)
        ax.set_xlabel(of + title)
        cells = np.full((len(SIZES), len(KEPT)), np.nan)
        for i, j in np.ndindex(cells.shape):
            label = f"{SIZES[i]}x{KEPT[j]}"
            for r in by_label.get(label, by_label["baseline"])[:1]:
                cells[i, j] = get(r)
                said = f"{cells[i, j]:.{digits}f}\n{SIZES[i] * KEPT[j]:,} kept"
                box = {"color": "black", "alpha": 0.45, "pad": 1.5}
                heat.text(j, i, said, ha="center", va="center", fontsize=8, color="white", bbox=box)
        heat.imshow(cells, cmap="viridis")
        heat.set(title=title, xlabel="blocks kept", ylabel="tokens a block")
        heat.set_xticks(range(len(KEPT)), KEPT)
        heat.set_yticks(range(len(SIZES)), SIZES)
    axes[0][1].set_yticklabels([])
    return fig


def draw_attention(found, labels, rows):
    some = [(label, results[0]) for label, results in zip(labels, rows) if results]
    maps = [r["attention"]["maps"] for _, r in some]
    tall = 1.95 * len(maps[0])
    fig = Figure(figsize=(8.5, 2.9 + tall))  # heat maps 1.6 inches high, a scene 1.95
    wide = {"left": 0.06, "right": 0.98}
    cells = fig.add_gridspec(1, 2, top=1 - 0.25 / (2.9 + tall), bottom=1 - 1.85 / (2.9 + tall), wspace=0.15, **wide)
    masses = [[r["attention"]["mass"]["scene"] for r in results] for results in rows]  # of each row [seeds][layers][heads]
    means = [100 * np.mean(m, 0) if m else None for m in masses]
    most = max(m.max() for m in means if m is not None)
    for cell, label, m in zip(cells, labels, means):
        if m is not None:
            ax = fig.add_subplot(cell)
            drawn = ax.imshow(m, cmap="inferno", vmin=0, vmax=most, aspect="auto")
            ax.set_title(f"{label}: attention of caption words on pixels (%)", fontsize=8)
            ax.set_xlabel("head", fontsize=8, labelpad=1)
            ax.set_ylabel("layer", fontsize=8)
            ax.set_xticks(range(m.shape[1]))
            ax.set_yticks(range(m.shape[0]))
            ax.tick_params(labelsize=7)
    fig.colorbar(drawn, ax=fig.axes, fraction=0.03, pad=0.02).ax.tick_params(labelsize=7)
    s = train.settle(train.parse(shlex.split(some[0][1]["command"])[2:]))
    scenes = data.heldout("scene", len(maps[0]), data.Pictures(s["canvas"], s["pictures"] or None))
    size = {"top": 1 - 2.45 / (2.9 + tall), "bottom": 0.45 / (2.9 + tall), "hspace": 0.15, "wspace": 0.05}
    axes = fig.add_gridspec(len(scenes), 2 * len(some), **size, **wide).subplots(squeeze=False)
    for i, e in enumerate(scenes):
        names = re.split(r" (?:left of|above) ", e.answer)
        top_of_all = max(x for m in maps for one in m[i] for row in one for x in row)
        for k, (label, _) in enumerate(some):
            for j, words in enumerate(names):
                ax = axes[i, 2 * k + j]
                light = np.array(maps[k][i][j]) / top_of_all  # [h,w]
                light = light.repeat(s["canvas"] // light.shape[0], 0).repeat(s["canvas"] // light.shape[1], 1)
                ax.imshow(e.frames[0].transpose(1, 2, 0) / 255 * (0.1 + 0.9 * light[:, :, None]))
                ax.set(xticks=[], yticks=[])
                ax.set_title(f"{label}: {textwrap.shorten(words, 26)}", fontsize=7, pad=2)
    return fig


def draw(name, found, results):
    """Write results/NAME.md and NAME.png from what is there -> what to print."""
    labels = list(ROWS[name])
    rows = [of_row(found, run) for run in ROWS[name].values()]
    if not any(rows):
        return f"{name}: no run is finished"
    (results / f"{name}.md").write_text(table(name, found))
    note = about(name, found)
    if name == "attention":
        note += ".\nScenes never seen in training, lit where the words look (first seed; one scale a row). Pictures: OpenMoji, CC BY-SA 4.0"
    with matplotlib.rc_context({"font.size": 8.5}):
        fig = globals()[f"draw_{name}"](found, labels, rows)
        if fig.get_layout_engine():  # the others place everything themselves
            fig.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))  # left, bottom, width, height: room for the note
        fig.text(0.01, 0.006, note, fontsize=6.5, va="bottom")
        fig.savefig(results / f"{name}.png", dpi=150)
    return f"{name}: {sum(map(len, rows))} runs in {results / name}.md and .png"


def main(argv=None):
    args, began = parse(argv), time.monotonic()
    out = Path(args.out or OUT[args.tiny])
    if args.ckpt and args.name != "needle":
        raise ValueError(f"--ckpt belongs to needle, not to {args.name}")
    if args.name == "needle":
        return needle(args.ckpt, out, args.tiny)
    if args.name not in (*ROWS, "all"):
        raise ValueError(f"there is no experiment {args.name!r}: only {', '.join(ROWS)}, all and needle")
    if args.parallel < 1:
        raise ValueError(f"--parallel must be at least 1, not {args.parallel}")
    if args.minutes is not None and not args.minutes >= 0:
        raise ValueError(f"--minutes must not be negative, not {args.minutes}")
    names = list(ROWS) if args.name == "all" else [args.name]
    results = out / "results" if args.tiny else HERE / "results" / "study"
    jobs = plan(names, args.seeds, args.only)
    if not jobs:
        raise ValueError(f"--only {args.only}: no run of {args.name} has this in its name")
    results.mkdir(parents=True, exist_ok=True)
    found, failed, left = read_results(results, args.tiny), 0, 0
    if not args.redraw:
        jobs = [job for job in jobs if job not in found]
        timed = "frames" in names and "timing" not in found
        if (jobs or timed) and not args.tiny and not torch.cuda.is_available():
            raise ValueError("these runs are meant for a GPU, and torch sees no CUDA device: --tiny rehearses them on the CPU, --redraw only draws what is there")
        prepare(jobs, out, args.tiny)
        if timed:
            write_json(results / "frames-timing.json", {**hardware(args.tiny), **time_vit(args.tiny)})
        _, failed, left = run_all(jobs, out, results, args, began)
        found = read_results(results, args.tiny)
    for name in names:
        print(draw(name, found, results))
    if left:
        print(f"{left} runs not started after {args.minutes:g} minutes: the same command goes on with them")
    if failed:
        raise ValueError(f"{failed} of {len(jobs)} runs failed: see above")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except (ValueError, OSError) as e:
        sys.exit(f"study.py: {(str(e).strip() or repr(e)).splitlines()[-1]}")
    except KeyboardInterrupt:
        for process in list(RUNNING):
            process.terminate()
        sys.exit("study.py: stopped; the runs that are finished are kept")
