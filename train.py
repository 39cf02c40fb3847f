"""Train a small native multimodal M3 from nothing: one file, one loop, every recipe.

    python train.py --native                     text and pictures from the first step; device, dtype and size are chosen and explained
    python train.py --preset tiny                the smallest model: a few minutes on two CPU cores
    python train.py --preset base                one GPU of 16 GB or more
    python train.py --preset long                32K tokens a row; add --attention dense to compare the time of a step
    python train.py --preset gpt --text_only     a dense GPT of base's active parameters, to compare with --preset base --text_only
    python train.py --resume --out_dir out       go on exactly where a stopped run was
    python train.py --text_only | --midtrain | --cpt     the talk's other recipes: same text in the same order, pictures later or never

Every step takes `batch_size` rows of text and, while pictures are on, rows of packed pictures and clips with captions, questions and answers.
Rows are pure functions of (seed, number), so the data position IS the step number and resuming needs no more than that.
Sequences are packed without a document mask, as in nanoGPT: a token may look back at the documents that precede its own in the row.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import lzma
import math
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

# One dial. The model's sizes of each preset are model.SIZES; here is what the run uses. Everything is also a flag.
PRESETS = {
    "tiny": {  # two CPU cores, under six minutes: single pictures and scenes of a few things, there is no time for clips and questions
        "context": 256, "batch_size": 6, "vision_context": 80, "vision_rows": 28, "max_steps": 400, "lr": 3e-3, "eval_interval": 200, "corpus_bytes": 12_000_000,
        "pictures": 32, "canvas": 56, "tasks": "single=0.3,scene=0.7", "eval_items": 200, "eval_rows": 64,
    },
    "study": {  # study.py's runs, several side by side on one GPU: half of its pictures are clips, for motion is learned last
        "context": 1024, "batch_size": 16, "vision_context": 256, "vision_rows": 64, "max_steps": 600, "lr": 3e-3, "eval_interval": 600,
        "corpus_bytes": 40_000_000, "pictures": 96, "canvas": 112, "tasks": "single=0.15,scene=0.2,clip_of_one=0.5,question=0.15", "eval_items": 300, "eval_rows": 128,
    },
    "base": {  # one GPU, at most eight minutes on an H200
        "context": 2048, "batch_size": 32, "vision_context": 256, "vision_rows": 512, "max_steps": 800, "lr": 3e-3, "eval_interval": 400,
        "corpus_bytes": 0, "pictures": 0, "canvas": 112, "tasks": "", "eval_items": 500, "eval_rows": 256,
    },
}  # fmt: skip
PRESETS["long"] = PRESETS["base"] | {"context": 32768, "batch_size": 2, "vision_rows": 64, "eval_items": 200, "eval_rows": 16}  # 32K tokens a row; one large GPU
PRESETS["gpt"] = PRESETS["base"] | {"attention": "dense", "index_warmup_steps": 0}  # for comparison, with --text_only: a dense GPT of base's active parameters, on base's text

# Peak dense bf16 rates (FLOP/s) from the vendors' data sheets, for MFU. A card that is not here shows "?".
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "A10G": 70e12, "L4": 121e12, "T4": 65e12}

MAX_BAD_STEPS = 5  # this many non-finite gradients in a row stop the run


def one_says(said):
    """Under torchrun all processes fail alike: all but the first wait until torchrun ends them. Its long report comes last and tells what is said here."""
    if os.environ.get("RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)  # whoever is still here has failed alone
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": {"message": f"train.py: {said}", "extraInfo": {"timestamp": int(time.time())}}}))


def parse(argv=None):
    """The command line. Flags left out are None here and come from the preset (or from the checkpoint that is resumed)."""
    p = argparse.ArgumentParser(description="Train a small native multimodal MiniMax M3.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    on_off = argparse.BooleanOptionalAction
    g = p.add_mutually_exclusive_group()
    g.add_argument("--native", dest="recipe", action="store_const", const="native", help="pictures from step 0 (the default)")
    g.add_argument("--midtrain", dest="recipe", action="store_const", const="midtrain", help="pictures enter before the learning rate decays")
    g.add_argument("--cpt", dest="recipe", action="store_const", const="cpt", help="pictures enter after the decay, the rate is warmed up again")
    g.add_argument("--text_only", dest="recipe", action="store_const", const="text_only", help="no pictures at all")
    p.add_argument("--vision_start", type=float, metavar="FRACTION", help="where pictures enter; default 0.5 for --midtrain, 0.7 for --cpt")
    p.add_argument("--preset", choices=list(PRESETS), help="size of model and run: tiny (a CPU), base (a GPU), gpt (base as a plain dense GPT), "
                   "long (32K tokens a row), study (for study.py); default: base on a GPU, tiny elsewhere")
    p.add_argument("--max_steps", type=int, metavar="N", help="optimizer steps; the learning rate schedule spans them")
    p.add_argument("--max_minutes", type=float, metavar="M", help="stop after M minutes with a checkpoint; never shapes the schedule")
    p.add_argument("--seed", type=int, help="weights and data order; default 1337")
    p.add_argument("--out_dir", default="out", help="where ckpt.pt, log.jsonl and curve.png go")
    p.add_argument("--overwrite", action="store_true", help="start anew in an out_dir that already holds a run")
    p.add_argument("--resume", action="store_true", help="go on from out_dir/ckpt.pt, exactly")
    p.add_argument("--init_from", metavar="CKPT", help="start from the weights of another run (new optimizer, step 0)")
    p.add_argument("--eval_interval", type=int, metavar="N", help="checkpoint and evaluate every N steps")
    p.add_argument("--keep", type=int, metavar="N", help="keep the last N evaluated checkpoints beside ckpt.pt; default 0")
    p.add_argument("--batch_size", type=int, help="text rows a step")
    p.add_argument("--vision_rows", type=int, help="picture rows a step (averaged over the whole run, whatever the recipe)")
    p.add_argument("--micro_batch_tokens", type=int, help="tokens in one forward pass: lower it when memory runs out; the result stays the same. Default on a GPU: by its memory")
    p.add_argument("--context", type=int, help="tokens in a row of text")
    p.add_argument("--vision_context", type=int, help="tokens in a row of pictures")
    p.add_argument("--lr", type=float, help="peak learning rate")
    p.add_argument("--weight_decay", type=float, help="weight decay of the matrices; default 0.1")
    p.add_argument("--optimizer", choices=["adamw", "muon"], help="muon: Muon for the layers' matrices, AdamW for the rest (default); adamw: AdamW for all, at a third of the rate or less")
    p.add_argument("--attention", choices=["msa", "dense", "shared", "token", "local", "random"], help="what sparse layers do; default msa")
    p.add_argument("--index_block_size", type=int, help="keys in a block; default of the preset (model.SIZES)")
    p.add_argument("--index_topk_blocks", type=int, help="blocks that a query keeps for each KV head; default of the preset")
    p.add_argument("--index_warmup_steps", type=int, help="steps with a dense main branch while the index learns; default a tenth of max_steps")
    p.add_argument("--index_kl_coef", type=float, help="weight (lambda) of the index KL, summed over layers; default 1.0")
    p.add_argument("--detach", action=on_off, default=None, help="keep the index KL out of the rest of the model; default on")
    p.add_argument("--frames_per_segment", type=int, help="temporal patches that attend to each other in the ViT; 1 is a 2D ViT; default 4")
    p.add_argument("--max_pixels", type=int, help="largest picture, in pixels; default the canvas of the preset")
    p.add_argument("--tasks", metavar="NAME=WEIGHT,...", help="which picture tasks to train on (data.MIX), for example single=0.7,scene=0.3")
    p.add_argument("--pictures", type=int, metavar="N", help="use only N OpenMoji pictures (0: all)")
    p.add_argument("--canvas", type=int, help="side of the composed scenes in pixels, a multiple of 28")
    p.add_argument("--text", metavar="PATH", help="a file or folder of UTF-8 text instead of this machine's Python source")
    p.add_argument("--images", metavar="DIR", help="your own pictures with captions (see data.py, and python data.py --check DIR)")
    p.add_argument("--mix", type=float, metavar="FRACTION", help="share of what is read that is --text (default 1) and of what is seen that is --images (default 0.5)")
    p.add_argument("--corpus_bytes", type=int, help="use only this much text (0: all)")
    p.add_argument("--needles", action=on_off, default=None, help="evaluations also ask for `name = value` lines put far back in validation text; default on from a "
                   "--context of 4,096. Plain source may not teach it: python study.py needle makes text that does, for --text")
    p.add_argument("--eval_items", type=int, help="held-out items of each picture task")
    p.add_argument("--eval_rows", type=int, help="validation rows of text, at most")
    p.add_argument("--device", choices=["cpu", "cuda", "mps"], help="default: the best there is")
    p.add_argument("--dtype", choices=["bf16", "fp32"], help="default: bf16 where the card has it, else fp32")
    p.add_argument("--checkpoint_layers", action=on_off, default=None, help="compute every layer again in the backward pass: less memory, slower; default off")
    p.add_argument("--memory_gb", type=float, metavar="N", help="take at most N GiB of the GPU's memory, as on a smaller card")
    p.add_argument("--compile", action=on_off, default=None, help="torch.compile each layer; default on CUDA only")
    p.add_argument("--workers", type=int, help="processes that prepare data; default from the cores")
    refuse = p.error
    p.error = lambda said: (one_says(said), refuse(said))  # of several processes only the first
    return p.parse_args(argv)


if __name__ == "__main__":
    parse()  # --help, and a flag that is none, are answered before torch is imported, which takes seconds

import torch
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

import data
import model as m3
import msa
from sample import fitting, read_checkpoint

# Flags that a resumed run may change: they do not touch what is computed (max_steps does stretch the schedule, and says so).
FREE_ON_RESUME = {
    "resume", "overwrite", "out_dir", "max_minutes", "max_steps", "eval_interval", "keep", "device", "compile", "workers",
    "micro_batch_tokens", "eval_items", "eval_rows", "checkpoint_layers", "memory_gb", "needles",
}  # fmt: skip
DEFAULTS = {"recipe": "native", "seed": 1337, "weight_decay": 0.1, "optimizer": "muon", "attention": "msa", "index_kl_coef": 1.0, "detach": True, "frames_per_segment": 4, "keep": 0}

# The least that a number may be.
LEAST = dict.fromkeys(("max_steps", "batch_size", "context", "vision_context", "eval_interval", "micro_batch_tokens", "eval_rows", "canvas"), 1)
LEAST |= dict.fromkeys(("frames_per_segment", "max_pixels", "index_block_size", "index_topk_blocks"), 1)
LEAST |= dict.fromkeys(("vision_rows", "eval_items", "keep", "pictures", "corpus_bytes", "workers", "seed", "index_warmup_steps"), 0)
LEAST |= dict.fromkeys(("weight_decay", "index_kl_coef", "lr", "max_minutes"), 0.0)


def flag(k, v):
    """How a setting is given on the command line."""
    if k == "recipe":
        return f"--{v}"
    return f"--{'' if v else 'no-'}{k}" if isinstance(v, bool) else f"--{k} {v}"


def settle(args, saved=None, saved_step=0):
    """Fill in every flag that was not given: from the checkpoint when resuming, else from the preset. Returns a plain dict.
    ValueError names a flag whose value cannot be used, or that a resumed run may not change, KeyError a setting that the checkpoint lacks."""
    given = {k: v for k, v in vars(args).items() if v is not None}
    if saved is not None:
        if lacking := {"preset", "vision_start", "index_warmup_steps", "max_pixels", *DEFAULTS, *PRESETS["tiny"]} - saved.keys():
            raise KeyError(min(lacking))
        for k, v in given.items():
            if v != saved.get(k) and k not in FREE_ON_RESUME:
                has = flag(k, saved[k]) if k in saved else f"without --{k}"
                raise ValueError(f"--resume goes on with the run as it was ({has}), not with {flag(k, v)}: leave the flag out")
        s = {"planned_steps": saved["max_steps"], **saved, "max_minutes": None, "memory_gb": None, **given}  # these limits hold for one start
        if s["max_steps"] != saved["max_steps"] and s["max_steps"] <= saved_step:
            raise ValueError(f"--max_steps {s['max_steps']}: the run is at step {saved_step} already")
    else:
        preset = given.get("preset") or ("base" if given.get("device") == "cuda" else "tiny")
        s = {**DEFAULTS, **PRESETS[preset], "preset": preset, **given}
        s.setdefault("vision_start", {"midtrain": 0.5, "cpt": 0.7}.get(s["recipe"], 0.0))
        s.setdefault("index_warmup_steps", s["max_steps"] // 10)
        s.setdefault("max_pixels", s["canvas"] ** 2)
        s["planned_steps"] = s["max_steps"]  # a run that is made longer must not move the step where its pictures entered
    s.setdefault("needles", s["context"] >= 4096)
    for k, least in LEAST.items():
        most = math.inf if isinstance(least, float) else 2**63
        if s.get(k) is not None and not least <= s[k] < most:  # NaN fails too
            raise ValueError(f"--{k} must be {f'less than {most}' if s[k] >= most else f'at least {least}'}, not {s[k]}")
    if s.get("index_topk_blocks", 0) > s["context"]:
        raise ValueError(f"--index_topk_blocks {s['index_topk_blocks']}: a row has only {s['context']} tokens (--context)")
    if s["needles"] and s["context"] < 128:
        raise ValueError(f"--needles needs rows of 128 tokens or more: --context is {s['context']}")
    if not 0 <= s["vision_start"] < 1 or round(s["vision_start"] * s["planned_steps"]) >= s["max_steps"]:
        raise ValueError(f"--vision_start {s['vision_start']} must be in [0, 1) and leave at least one of {s['max_steps']} steps with pictures")
    if s["recipe"] in ("native", "text_only") and s["vision_start"] > 0:
        raise ValueError(f"--vision_start belongs to --midtrain or --cpt, not to --{s['recipe']}")
    if s["preset"] == "gpt":
        for k in ("attention", "index_block_size", "index_topk_blocks", "index_warmup_steps", "index_kl_coef", "detach"):
            if k in given and s[k] != PRESETS["gpt"].get(k):
                raise ValueError(f"--preset gpt is dense throughout: it has no sparse layer for {flag(k, s[k])}")
    if "mix" in s and not ("images" in s or "text" in s):
        raise ValueError("--mix is the share of your own data: it needs --images or --text beside it")
    if "mix" in s and not 0 < s["mix"] <= 1:
        raise ValueError(f"--mix must be above 0 and at most 1, not {s['mix']:g}")
    seen = s["recipe"] != "text_only" and s["vision_rows"]
    if "images" in s and not seen:
        raise ValueError("--images: this run sees no pictures at all (--text_only, or --vision_rows 0)")
    if seen and ("images" not in s or s.get("mix", 0.5) < 1):  # OpenMoji's pictures are wanted
        if 0 < s["pictures"] < 16:
            raise ValueError(f"--pictures must be 0 (all of them) or at least 16, not {s['pictures']}")
        if s["canvas"] % 28:  # 2 x 2 patches of 14 pixels are a token
            raise ValueError(f"--canvas must be a multiple of 28, not {s['canvas']}")
        if s["max_pixels"] < s["canvas"] ** 2:
            raise ValueError(f"--max_pixels {s['max_pixels']} is less than a --canvas of {s['canvas']} has: {s['canvas'] ** 2}")
    if saved is not None and s["max_steps"] != saved["max_steps"]:
        print(f"max_steps {saved['max_steps']} -> {s['max_steps']}: the rest of the schedule is stretched to it")
    return s


def learning_rate(step, s):
    """Warm-up (5%), stable, linear decay over the last 30% (WSD). --cpt is two such schedules, one after the other, around vision_start."""
    start, end = 0, s["max_steps"]
    if s["recipe"] == "cpt":
        cut = round(s["vision_start"] * s["planned_steps"])
        start, end = (0, cut) if step < cut else (cut, end)
    n, x = end - start, step - start
    warm = min(1.0, (x + 1) / max(1, n // 20))
    decay = min(1.0, (n - x) / max(1.0, 0.3 * n))
    return s["lr"] * warm * decay


def vision_plan(step, s):
    """(first row number, rows) of pictures at this step: the same number of rows over the run in every recipe that has pictures."""
    if s["recipe"] == "text_only":
        return 0, 0
    start = round(s["vision_start"] * s["planned_steps"])
    total = s["vision_rows"] * s["planned_steps"]
    upto = lambda t: total * max(0, t - start) // (s["planned_steps"] - start)
    return upto(step), upto(step + 1) - upto(step)


# ---------------------------------------------------------------------------------------------------------------------------
# Data: what one optimizer step reads, as a list of micro-batches


def micro_batches(step, text, vision, s, rank=0, world=1):
    """A step's list of micro-batches, first of text, then of pictures. text and vision: data.Rows, vision None where none are seen.

    Of `world` processes the one numbered `rank` gets every world-th row: together they read what one process would read."""
    first, count = vision_plan(step, s)
    texts = [text.text(step * s["batch_size"] + i) for i in range(rank, s["batch_size"], world)]
    seen = [vision.vision(first + i) for i in range(rank, count, world)]
    out = []
    for rows, length in ((texts, s["context"]), (seen, s["vision_context"])):
        size = max(1, s.get("micro_batch_tokens", 1 << 30) // length)
        out += [stack(rows[i : i + size]) for i in range(0, len(rows), size)]
    return out


def stack(rows):
    """Rows of (tokens [T], targets [T], patches [N,P], grids [n,3]) -> one micro-batch; text rows have no patches and grids."""
    batch = {"tokens": torch.stack([r[0] for r in rows]), "targets": torch.stack([r[1] for r in rows])}
    if len(rows[0]) > 2:
        batch |= {"patches": torch.cat([r[2] for r in rows]), "grids": torch.cat([r[3] for r in rows])}
    return batch


def quiet(_):
    """Data workers leave signals to the main process: Ctrl-C, and often SIGTERM, reach the whole group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(60))  # a minute for the checkpoint


def forward(model, batch, prep, device, **kw):
    """One micro-batch through the model; pictures are normalised here, on the device, by data.normalize as everywhere else."""
    patches = grids = None
    if "patches" in batch:
        patches, grids = data.normalize(batch["patches"].to(device, non_blocking=True), prep), batch["grids"]  # grids stay on the CPU: they steer the ViT
    return model(batch["tokens"], patches=patches, grids=grids, targets=batch.get("targets"), **kw)  # tokens and targets too are first looked at there


# ---------------------------------------------------------------------------------------------------------------------------
# Many processes (torchrun)
#
# Not DistributedDataParallel: micro-batches are of text only or have pictures too, so which parameters get a gradient differs from one to the next and
# from process to process, and DDP wants to know that beforehand. One sum of all gradients after a step's last micro-batch needs to know nothing.


def together(numbers):
    """Numbers of every process -> their sums, on the host. Nothing to do when this process is alone."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return numbers
    x = torch.tensor(numbers, dtype=torch.float64)
    try:
        torch.distributed.all_reduce(x)
    except RuntimeError as e:
        raise ConnectionError("another process of this run is gone: what it said stands above") from e
    return x.tolist()


def sum_gradients(params):
    """Sum the gradients over all processes, as one long vector. A parameter without a gradient here may have one elsewhere (the
    ViT, where this process had no pictures); without one anywhere it stays without, as in a single process."""
    found = together([float(p.grad is not None) for p in params])
    params = [p for p, n in zip(params, found) if n]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params])
    torch.distributed.all_reduce(flat)
    for p, g in zip(params, flat.split([p.numel() for p in params])):
        p.grad = g.view_as(p)


def step_flops(model, micro, per_token):
    """FLOPs of training on these micro-batches: 3 x forward, as the backward pass is twice the forward one. Nothing that is computed again counts,
    nor does the index KL, and a dense warm-up counts as if it were sparse. MFU is this / seconds / the card's peak rate. Forward:

        token           per_token(row length), model.flops_per_token: 2 x active weights + (4 H D x keys looked at + 2 Hkv Di x keys indexed) a layer
                        minus the head, 2 x hidden x vocabulary, where the token has no target
        patch           2 x weights of ViT and first half of the projector + 4 x ViT hidden x patches of its segment a ViT layer
        visual token    2 x weights of the second half of the projector
    """
    c, p, n = model.config.vision, model.multi_modal_projector, 0
    weights = lambda *modules: sum(x.numel() for m in modules for x in m.parameters() if x.ndim == 2)
    head, second = 2 * weights(model.lm_head), weights(p.merge_linear_1, p.merge_linear_2)
    first = weights(model.vision_tower, p.linear_1, p.linear_2)
    for b in micro:
        n += b["tokens"].numel() * (per_token(b["tokens"].shape[1]) - head) + head * (b["targets"] >= 0).sum().item()
        if "patches" in b:
            sizes = b["grids"].prod(-1)  # patches of each segment
            n += 2 * (first + second / c.spatial_merge_size**2) * sizes.sum().item() + 4 * c.hidden_size * c.num_hidden_layers * (sizes**2).sum().item()
    return 3 * n


# ---------------------------------------------------------------------------------------------------------------------------
# Evaluation


def caption_batches(examples, tok, prep, size):
    """Held-out examples as rows of one length with targets on the answers only, `size` rows at a time, shortest first."""
    encoded = sorted((data.encode_example(tok, prep, e) for e in examples), key=lambda e: len(e[0]) + len(e[1]))
    for i in range(0, len(encoded), size):
        part = encoded[i : i + size]
        length = len(part[-1][0]) + len(part[-1][1])
        yield stack([data.pack([e], tok, length) for e in part])


def validation_windows(corpus, context, most):
    """Up to `most` windows that follow each other in the validation text: tokens [n,T], targets [n,T]."""
    n = min(most, (len(corpus.val) - 1) // context)
    if n < 1:
        raise ValueError(f"the validation text has {len(corpus.val)} tokens, too few for one row of {context}: give more text or a smaller --context")
    flat = torch.from_numpy(corpus.val[: n * context + 1].astype("int64"))
    return flat[:-1].view(n, context), flat[1:].view(n, context)


def needles_of(corpus, tok, context, n=20):
    """{distance: data.needle_rows}, n rows in validation text for each of three distances: 1,024, 8,192 and 30,720 tokens where the context is 32,768."""
    return {d: data.needle_rows(tok, corpus.val, context, d, n) for d in (min(context * part // 32, context - 64) for part in (1, 8, 30))}


def exact(logits, targets):
    """How many rows are right at every target: logits [n,T,V], targets [n,T], -100 where nothing is asked."""
    return ((logits.argmax(-1) == targets) | (targets < 0)).all(-1).sum().item()


def evaluate(model, s, windows, tok, prep, device, autocast, examples, needles=None):
    """Text bits per byte, and for each held-out picture task the share of exactly right answers; the mean loss of their answer tokens.
    needles (needles_of): for each distance the share of values that are copied exactly from so many tokens back.

    An answer counts as right when the argmax at each of its positions, end of document included, is the right token. That is what greedy
    decoding yields: as long as every token so far is right, its input is this input.
    """
    out = {}
    model.eval()
    # Eager: the held-out batches have a new shape each, and compiling for it would take longer than running it.
    with torch.no_grad(), torch.random.fork_rng(), autocast(), torch.compiler.set_stance("force_eager"):
        nll = 0.0
        size = max(1, s.get("micro_batch_tokens", 8192) // s["context"])
        for tokens, targets in zip(*(w.split(size) for w in windows)):
            nll += model(tokens.to(device), targets=targets.to(device)).lm_loss.double().item() * targets.numel()
        out["val_bytes"] = len(tok.decode_bytes(windows[1].flatten().tolist()))
        out["bits_per_byte"] = nll / out["val_bytes"] / math.log(2)
        total = count = 0.0
        for kind, items in examples.items():
            right = 0
            for batch in caption_batches(items, tok, prep, 100):
                targets = batch.pop("targets").to(device)
                logits = forward(model, batch, prep, device).logits  # [n,L,V]
                asked = targets >= 0
                right += exact(logits, targets)
                total += torch.nn.functional.cross_entropy(logits[asked].float(), targets[asked], reduction="sum").item()
                count += asked.sum().item()
            out[kind] = right / len(items)
        if examples:
            out["caption_loss"] = total / count
        for distance, rows in (needles or {}).items():
            pairs = zip(*(x.split(max(1, 8192 // s["context"])) for x in rows))
            out[f"needle_{distance}"] = sum(exact(model(x.to(device)).logits, y.to(device)) for x, y in pairs) / len(rows[0])
    model.train()
    return out


def recall(model, batch, device, autocast):
    """Mean block recall and score recall over the sparse layers, on one row (see msa.selection_recall)."""
    layers, found = [m for m in model.modules() if isinstance(m, msa.MSA) and m.kind != "dense"], []
    if not layers:
        return 1.0, 1.0  # dense attention keeps everything
    for m in layers:
        m.probe = lambda layer, q, k, ids: found.append(msa.selection_recall(q, k, ids, layer.block_size, queries=32))
    model.eval()
    with torch.no_grad(), autocast(), torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
        model(batch["tokens"][:1].to(device))
    model.train()
    for m in layers:
        m.probe = None
    return [sum(x) / len(x) for x in zip(*found)]


# ---------------------------------------------------------------------------------------------------------------------------
# Checkpoints and logs


def save(path, state):
    """Write to a temporary file, then move it into place: a reader sees the old file or the new one, never half of one."""
    tmp = path.with_suffix(".tmp")
    need = sum(x.nbytes for x in tree_leaves(state) if torch.is_tensor(x))
    free = shutil.disk_usage(path.parent).free
    left = "the previous checkpoint is untouched" if path.exists() else "there is no earlier checkpoint"
    if free < 1.02 * need:
        raise OSError(f"no room for {path}: it takes {need / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free; {left}")
    try:
        with open(tmp, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
    except (OSError, RuntimeError) as e:
        tmp.unlink(missing_ok=True)
        raise OSError(f"could not write {path} ({e}); {left}") from e
    os.replace(tmp, path)


def claim(out, on_exit):
    """Make the folder of a run and lock it until the run ends: two must not write to one. A run that comes to nothing leaves no new folder behind.
    ValueError if another run has it, or it cannot be a folder."""
    new = not out.exists()

    def leave():
        if new and [f.name for f in out.glob("*")] == [".lock"]:
            (out / ".lock").unlink()
            out.rmdir()

    try:
        out.mkdir(parents=True, exist_ok=True)
        on_exit.callback(leave)
        lock = on_exit.enter_context(open(out / ".lock", "w"))  # noqa: SIM115
        with contextlib.suppress(ImportError):  # no such locks on Windows
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another run is writing to {out}: choose another --out_dir") from None
    except OSError as e:
        raise ValueError(f"--out_dir {out} cannot be a folder to write in: {e.strerror}") from None


def take_folder(args, rank, world, on_exit):
    """The folder of this run, claimed until on_exit. ValueError if --resume finds nothing to go on with there, or another start finds a run."""
    out = Path(args.out_dir)
    ckpt, log = out / "ckpt.pt", out / "log.jsonl"
    if args.resume and args.overwrite:
        raise ValueError("--resume and --overwrite exclude each other")
    if rank == 0 and (out.exists() or not args.resume):
        claim(out, on_exit)  # before anything in there is looked at
    if ckpt.exists():
        if not (args.resume or args.overwrite):
            raise ValueError(f"{out} already holds a run: give --resume to go on, --overwrite to start anew, or another --out_dir")
    elif log.exists() and not args.overwrite:
        raise ValueError(f"{out} holds the log of a run that was stopped before its first checkpoint: there is nothing to resume, give --overwrite to start anew")
    elif args.resume:
        raise ValueError(f"--resume: there is no {ckpt}" + (" (every machine must see the same --out_dir)" if world > 1 else ""))
    if args.resume and args.init_from:
        raise ValueError("--resume goes on with a run's own weights: leave --init_from out")
    return out


class Book:
    """How far a run is, and what it writes into its folder: log.jsonl and checkpoints, the first of several processes only.
    step: how many are done, of which ckpt.pt holds the first saved_at; bad: skipped in a row just now, as their gradients were not finite;
    whole: False in the middle of an update; constant: what every checkpoint holds beside weights, optimizers and step."""

    def __init__(self, out, rank, step, model, optimizers, constant, args):
        self.out, self.rank, self.model, self.optimizers, self.constant = out, rank, model, optimizers, constant
        self.ckpt, self.log = out / "ckpt.pt", out / "log.jsonl"
        self.step, self.saved_at, self.bad, self.whole = step, step, 0, True
        if rank:
            return
        if args.overwrite:  # set aside, not destroyed: a run that dies before its first checkpoint must not be resumed as the old one
            for old in [*out.glob("ckpt.pt"), *out.glob("ckpt_*.pt"), *out.glob("log.jsonl")]:
                old.replace(old.with_name(f"old_{old.name}"))
        rows = [r for r in read_log(self.log) if r["step"] <= step]  # the steps of those past the checkpoint are done again
        tmp = self.log.with_suffix(".tmp")
        tmp.write_text("".join(json.dumps(r) + "\n" for r in rows))
        tmp.replace(self.log)

    def note(self, row):
        """One more row of the log."""
        if self.rank == 0:
            with open(self.log, "a") as f:
                f.write(json.dumps(row) + "\n")

    def saved(self):
        """What a run that ends now leaves behind, in words."""
        return f"{self.ckpt} holds step {self.saved_at}" if self.ckpt.exists() else f"{self.ckpt} was not written yet"

    def checkpoint(self):
        """Write ckpt.pt, and with --keep another name for it. OSError if there is no room; the previous checkpoint is untouched."""
        if self.rank == 0:
            learned = {"model": dict(self.model.state_dict()), "optimizers": [o.state_dict() for o in self.optimizers]}
            save(self.ckpt, learned | {"step": self.step} | self.constant)
        self.saved_at = self.step
        keep = self.constant["settings"]["keep"]
        if keep and self.rank == 0:
            kept = self.out / f"ckpt_{self.step:06d}.pt"
            kept.unlink(missing_ok=True)
            try:
                os.link(self.ckpt, kept)
            except OSError:  # a file system without hard links
                shutil.copyfile(self.ckpt, kept.with_suffix(".tmp"))
                kept.with_suffix(".tmp").replace(kept)
            for old in sorted(self.out.glob("ckpt_*.pt"))[:-keep]:
                old.unlink()

    def rescue(self, _kind, error, _traceback):
        """Whatever breaks the loop off (a data worker, the memory, the disk), the steps since the last checkpoint are not lost."""
        if not isinstance(error, Exception):
            return
        traceback.clear_frames(error.__traceback__)  # an error of a data worker keeps them all alive, and the exit would wait for them
        if self.bad or not self.whole or self.step == self.saved_at or self.rank:
            return
        try:
            self.checkpoint()
        except Exception as e:  # noqa: BLE001  whatever it is, the first error is the one to be told
            print(f"step {self.step} could not be saved ({type(e).__name__}); {self.saved()}")
        else:
            print(f"saved step {self.step} before stopping; go on with: python train.py --resume --out_dir {self.out}")


def read_log(path):
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # a line cut short by a kill
            rows.append(json.loads(line))
    return rows


def draw_curve(path, log, title):
    from matplotlib.figure import Figure

    steps, evals = [r for r in log if "eval" not in r], [r for r in log if "eval" in r]
    smooth = max(1, len(steps) // 100)
    fig = Figure(figsize=(10, 3.6), dpi=110)
    a, b = fig.subplots(1, 2)
    for key, label in (("text_loss", "text"), ("caption_loss", "answers")):
        seen = [r for r in steps if r.get(key) is not None]
        pieces = [seen[i : i + smooth] for i in range(0, len(seen), smooth)]
        a.plot([rows[0]["step"] for rows in pieces], [sum(r[key] for r in rows) / len(rows) for rows in pieces], label=label)
    a.set(xlabel="step", ylabel="training loss (nats a token)", title=title)
    a.legend()
    for key in sorted({k for r in evals for k in r["eval"]} - {"val_bytes", "caption_loss", "bits_per_byte", "xz_bits_per_byte"}):
        b.plot([r["step"] for r in evals], [100 * r["eval"].get(key, math.nan) for r in evals], marker="o", label=key)
    b.set(xlabel="step", ylabel="exact answers, held out (%)", ylim=(0, 103))
    if b.lines:
        b.legend()
    fig.tight_layout()
    fig.savefig(path)


# ---------------------------------------------------------------------------------------------------------------------------
# Settings, model, data


def choose(args, local=0, begun=None):
    """Put device and dtype into args, say why these, and return the device's name. local: the number of this process on its machine; it takes the GPU
    of that number. begun: the dtype of the run that is resumed."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device, why = args.device or next(d for d in there if there[d]), "asked for" if args.device else "the best there is"
    if not there[device]:
        raise ValueError(f"--device {device}: this torch sees no {device.upper()} device")
    name, dtype, because = device, args.dtype or begun, "asked for" if args.dtype else "as this run began"
    if device == "cuda":
        if local >= (n := torch.cuda.device_count()):
            raise ValueError(f"process {local} finds no GPU: this machine has {n}, start one process a GPU (--nproc_per_node {n})")
        torch.cuda.set_device(local)
        name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(local).total_memory / 2**30
        if dtype is None:
            dtype, because = ("bf16", "the card has it") if torch.cuda.get_device_capability() >= (8, 0) else ("fp32", "bf16 needs compute capability 8.0 or higher")
        if args.memory_gb is not None:
            if not 1 <= args.memory_gb <= memory:
                raise ValueError(f"--memory_gb must be between 1 and what the card has, {memory:.1f}, not {args.memory_gb:g}")
            torch.cuda.set_per_process_memory_fraction(args.memory_gb / memory)  # what PyTorch's allocator may take; the driver's own part comes on top
        if args.micro_batch_tokens is None:  # base takes about 0.45 MB a token in bf16; few large pieces, because launching thousands of kernels takes time
            args.micro_batch_tokens = min(131072, 1 << int(math.log2(2048 * min(memory, args.memory_gb or memory))))
    elif args.memory_gb is not None:
        raise ValueError(f"--memory_gb limits the memory of a GPU, and this run is on {device}")
    elif dtype is None:
        dtype, because = "fp32", f"the safe choice on {device}"
    print(f"device: {name} ({why}); dtype: {dtype} ({because})")
    args.device, args.dtype = device, dtype
    return name


def build(s, tok, prep):
    """The model of a preset, with the flags that shape it."""
    vision = {k: getattr(prep, k) for k in ("patch_size", "temporal_patch_size", "frames_per_segment")} | {"spatial_merge_size": prep.merge_size}
    index = {k: s[k] for k in ("index_block_size", "index_topk_blocks", "index_kl_coef") if s.get(k) is not None}
    tokens = {"vocab_size": tok.vocab_size, "image_token_id": tok.image, "video_token_id": tok.clip, "max_position_embeddings": s["context"]}
    return m3.M3(m3.M3Config.of_size(s["preset"], attention=s["attention"], index_detach=s["detach"], vision=vision, **index, **tokens))


def load_weights(model, init, s):
    """For --init_from: a dense checkpoint has no index branch, so those parameters alone may be missing and keep their fresh values."""
    have = model.state_dict()
    weights = {k: v for k, v in init["model"].items() if k in have or "index_" not in k}  # and the other way round: it is left behind
    wrong = [k for k in weights if k not in have or weights[k].shape != have[k].shape] + [k for k in have if k not in weights and "index_" not in k]
    if wrong:
        raise ValueError(f"--init_from {s['init_from']}: its weights, of preset {init['settings'].get('preset')}, do not fit preset {s['preset']}, first at {wrong[0]}")
    model.load_state_dict(weights, strict=False)


class Muon:
    """Muon (K. Jordan 2024) for parameters [..., m, n], each a matrix or a stack of matrices (a layer's experts).

    The momentum of a matrix, made orthogonal, is its step: all directions learn at one rate, also those whose gradients are small. Five
    Newton-Schulz iterations do that, for all matrices of one shape in one batch of products: torch.optim.Muon goes matrix by matrix, knows no
    stacks, and with 131 matrices is 3,000 launches a step. The step is scaled to the size of AdamW's (0.2 sqrt(max(m, n)), Moonshot 2025), so
    that one learning rate serves both.
    """

    def __init__(self, params, weight_decay, momentum=0.95):
        self.param_groups, self.weight_decay, self.momentum = [{"lr": 0.0}], weight_decay, momentum
        self.params, self.buffers = list(params), [torch.zeros_like(p) for p in params]

    def state_dict(self):
        return self.buffers

    def load_state_dict(self, buffers):
        for mine, saved in zip(self.buffers, buffers, strict=True):
            mine.copy_(saved)

    def step(self):
        lr, shapes = self.param_groups[0]["lr"], {}
        for p, buffer in zip(self.params, self.buffers):
            if p.grad is not None:  # a step without pictures leaves the ViT alone
                shapes.setdefault(p.shape[-2:], []).append((p, buffer))
        with torch.no_grad():
            for (m, n), group in shapes.items():
                params, buffers = [list(x) for x in zip(*group)]
                grads = [p.grad for p in params]
                torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
                torch._foreach_lerp_(grads, buffers, self.momentum)  # Nesterov
                x = torch.cat([g.reshape(-1, m, n) for g in grads])  # [matrices,m,n]
                steps = orthogonal(x.bfloat16() if x.is_cuda else x).to(x.dtype).split([p[..., 0, 0].numel() for p in params])
                torch._foreach_mul_(params, 1 - lr * self.weight_decay)
                torch._foreach_add_(params, [u.view_as(p) for u, p in zip(steps, params)], alpha=-lr * 0.2 * max(m, n) ** 0.5)


def orthogonal(x):
    """x [N,m,n] -> roughly the nearest orthogonal matrices: singular values go to about 1, singular vectors stay (Newton-Schulz, K. Jordan's coefficients)."""
    if tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


def make_optimizers(model, s):
    """AdamW, alone or beside Muon for the matrices inside the layers; embedding and head (a row is a word, not a direction), norms and biases stay with AdamW."""
    matrices = [p for n, p in model.named_parameters() if p.ndim >= 2 and s["optimizer"] == "muon" and n not in ("embed_tokens.weight", "lm_head.weight")]
    taken = set(matrices)
    rest = [p for p in model.parameters() if p not in taken]
    groups = [{"params": [p for p in rest if p.ndim >= 2], "weight_decay": s["weight_decay"]}, {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=s["lr"], betas=(0.9, 0.95), fused=s["device"] in ("cuda", "cpu"))
    return [adamw, Muon(matrices, s["weight_decay"])] if matrices else [adamw]


def load_model(s, state, init, ckpt):
    """What turns text and pictures into input, and everything that learns: (tokenizer, data.Prep, model, optimizers, the step they are at). state: the
    checkpoint that is resumed, of the path ckpt; init: the one whose weights alone are taken, else fresh ones. ValueError if either does not fit."""
    torch.manual_seed(s["seed"])
    torch.set_float32_matmul_precision("high")
    with fitting(s["init_from"] if init else ckpt):
        tok = data.Tokenizer.from_state((state or init)["tokenizer"]) if state or init else data.Tokenizer()
    prep = data.Prep(frames_per_segment=s["frames_per_segment"], max_pixels=s["max_pixels"])
    model = build(s, tok, prep)
    if init is not None:
        with fitting(s["init_from"]):
            load_weights(model, init, s)
    model.to(s["device"])
    model.checkpoint_layers = bool(s.get("checkpoint_layers"))
    optimizers, step = make_optimizers(model, s), 0
    if state is not None:
        with fitting(ckpt, ValueError):
            model.load_state_dict(state["model"])
            for o, saved in zip(optimizers, state["optimizers"], strict=True):
                o.load_state_dict(saved)
            step, _ = state["step"], state["corpus"]  # load_data compares the text
    return tok, prep, model, optimizers, step


def load_data(s, state, tok, prep, mix, local, world):
    """Everything that is read and seen, each told in a line: (corpus, own pictures or None, rows of text, rows of pictures or None, held), the rows
    as data.Rows, held the windows, examples and needles that evaluate is given. mix: the picture tasks and their weights."""
    if local:
        together([0])  # the first process of each machine tokenises and draws; the others find it done
    own_text, own_pictures, most = s.get("mix", 1.0), s.get("mix", 0.5), s["corpus_bytes"] or None
    seen = s["recipe"] != "text_only" and s["vision_rows"]
    beside = pictures = own = vision = None
    examples = {}
    if seen and s.get("images"):  # before the text, which takes longer to read: a folder may be mistyped
        own, report = data.load_folder(s["images"], prep, tok, s["vision_context"], keep=True)
        print(f"{report}\n  {own_pictures:.0%} of what is seen is from here")
    corpus = data.Corpus(tok, s.get("text"), most)
    print(corpus.report)
    if s.get("text") and own_text < 1:  # validation is on --text alone
        beside = data.Corpus(tok, None, most)
        print(f"beside it, {1 - own_text:.0%} of the rows: {beside.report}")
    text = data.Rows(tok, prep, corpus, None, s["context"], s["seed"], beside=beside, text_share=own_text)
    if seen:
        if own is None or own_pictures < 1:
            pictures = data.Pictures(s["canvas"], s["pictures"] or None)
            print(pictures.report)
            kinds = [kind for kind, task in data.HELDOUT.items() if task in mix]
            examples = {kind: items for kind in kinds if (items := data.heldout(kind, s["eval_items"], pictures))}
        if own and own.held:
            examples["own"] = [own[i] for i in own.held[: s["eval_items"]]]
        # In rows of their own, shorter ones: without a document mask attention is spread thin, in a long row, over pictures that are not asked about.
        vision = data.Rows(tok, prep, None, pictures, s["vision_context"], s["seed"], own, mix, own_pictures)
    needles = needles_of(corpus, tok, s["context"]) if s["needles"] else None
    held = {"windows": validation_windows(corpus, s["context"], s["eval_rows"]), "examples": examples, "needles": needles}
    if not local:
        together([0])
    content = [int(c[:10], 16) for c in (corpus.content, own.content if own else "0")]
    if together(content) != [world * x for x in content]:
        raise ValueError("the processes of this run found different text or pictures on their machines: give all of them the same --text and --images")
    if state is not None and state["corpus"] != corpus.content:
        print(f"note: the text here (hash {corpus.content}) is not the text this run began with ({state['corpus']}): it goes on with what is here")
    if state is not None and own is not None and state.get("own") != own.content:
        print(f"note: the pictures in {s['images']} are not those this run began with: it goes on with what is here")
    return corpus, own, text, vision, held


def describe(s, model):
    """Say what is trained, and how."""
    blocks, size = model.config.index_topk_blocks, model.config.index_block_size
    kept = "" if s["attention"] == "dense" else f" (keeps {blocks} x {size} of {s['context']})"
    print(
        f"model: preset {s['preset']}, {model.parameters_total() / 1e6:.1f}M parameters, {model.parameters_active() / 1e6:.1f}M active a token, "
        f"attention {s['attention']}{kept}\n"
        f"recipe: {s['recipe']}, {s['max_steps']} steps of {s['batch_size'] * s['context']:,} text and {s['vision_rows'] * s['vision_context']:,} picture-row tokens, "
        f"peak lr {s['lr']:g}, index warm-up {s['index_warmup_steps']} steps, lambda {s['index_kl_coef']:g}"
    )
    if kept and blocks * size >= s["context"]:
        print("note: every query keeps its whole row, so attention is dense in effect: for sparse attention lower --index_topk_blocks or give a longer --context")


# ---------------------------------------------------------------------------------------------------------------------------
# The loop


class Stopwatch:
    """How long it all takes. Every twentieth step is timed part by part; only then does the host wait for the GPU.

    spent: {part of a step: seconds in the `timed` last such steps}, all of one kind; flops: of the step at hand, on all processes; peak: FLOP/s of all
    their cards, None if unknown; began: time.monotonic() when the run began."""

    def __init__(self, model, device, name, world, began):
        self.device, self.name, self.world, self.began = device, name, world, began
        self.per_token = functools.cache(model.flops_per_token)
        self.peak = next((world * v for k, v in PEAK.items() if k in name), None)
        self.on, self.kind, self.timed, self.spent, self.flops, self.mark = False, None, 0, {}, 0, 0.0

    def minutes(self):
        return (time.monotonic() - self.began) / 60

    def mfu(self, seconds):
        return self.flops / seconds / self.peak if self.peak else None

    def ready(self, step):
        """The next step, after `step`, begins now."""
        self.on = step % 20 == 10
        self.lap()

    def lap(self, part=None):
        """The seconds since the last lap belong to `part`, None: to nothing."""
        if self.on:
            if self.device == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            if part:
                self.spent[part] = self.spent.get(part, 0.0) + now - self.mark
            self.mark = now

    def begin(self, kind, flops):
        """The data of the step at hand are there. kind: only steps of one kind have one time, so a change of kind begins anew."""
        if kind != self.kind:
            self.kind, self.timed, self.spent = kind, 0, {}
        self.timed, self.flops = self.timed + self.on, flops
        self.lap("data")

    def speed(self):
        """What the timed steps took, told in a line and as keys for the log; {} if there were none."""
        if not self.spent:
            return {}
        seconds = sum(self.spent.values()) / self.timed
        parts, tflops, mfu = {k: round(1000 * v / self.timed, 2) for k, v in self.spent.items()}, self.flops / seconds / 1e12, self.mfu(seconds)
        tqdm.write(f"a step, mean of {self.timed}: {1000 * seconds:.1f} ms = {', '.join(f'{k} {v:.1f}' for k, v in parts.items())}; {tflops:.1f} TFLOP/s"
                   + (f", MFU {mfu:.1%}" if self.peak else ""))  # fmt: skip
        return {"step_ms": parts, "tflops": tflops, "mfu": mfu}


def gradients(model, micro, warmup, s, prep, autocast, watch):
    """Forward and backward pass of a step's micro-batches: the gradients of its loss, over all processes, are then in the
    parameters, clipped. The loss is the mean over all targets of the step, the index KL that over its tokens: a micro-batch's own
    means count by its share of either. Returns the losses and norms for the log and the number of tokens, of all processes.
    ValueError with advice if the memory is too small."""
    counted = [(b, "caption" if "patches" in b else "text", (b["targets"] >= 0).sum().item()) for b in micro]
    mine = [sum(n for _, k, n in counted if k == kind) for kind in ("text", "caption")]
    flops = step_flops(model, micro, watch.per_token)
    text_n, caption_n, tokens, flops = together([*mine, sum(b["tokens"].numel() for b in micro), flops])
    watch.begin((warmup, caption_n > 0), flops)
    sums = {"text": 0.0, "caption": 0.0, "kl": 0.0}
    try:
        for b, k, n in counted:
            share, kl_share = n / max(1, text_n + caption_n), b["tokens"].numel() / tokens
            with autocast():
                o = forward(model, b, prep, s["device"], warmup=warmup)
                loss = o.lm_loss * share + s["index_kl_coef"] * o.index_kl * kl_share
            watch.lap("text" if k == "text" else "vision")
            loss.backward()
            watch.lap("backward")
            sums[k] += o.lm_loss.detach() * n
            sums["kl"] += o.index_kl.detach() * kl_share
        if watch.world > 1:
            sum_gradients(list(model.parameters()))
            watch.lap("sum over processes")
    except torch.OutOfMemoryError as e:
        advice = "lower --context" if model.checkpoint_layers else "add --checkpoint_layers"
        if max(len(b["tokens"]) for b in micro) > 1:
            advice = f"lower --micro_batch_tokens (now {max(b['tokens'].numel() for b in micro)})"
        raise ValueError(f"out of memory on {watch.name}: {advice}") from e
    # Two losses, two clips: a large gradient of the index branch's own loss must not shrink the language model's step.
    parts = [[p for k, p in model.named_parameters() if ("index_" in k) == index] for index in (False, True)]
    norm, index_norm = (torch.nn.utils.clip_grad_norm_(part, 1.0).item() for part in parts)
    text, caption, kl = together([float(x) for x in sums.values()])
    lm_loss = (text + caption) / max(1, text_n + caption_n)
    row = {"loss": lm_loss + s["index_kl_coef"] * kl, "lm_loss": lm_loss, "index_kl": kl}
    row |= {"text_loss": text / text_n if text_n else None, "caption_loss": caption / caption_n if caption_n else None}
    return row | {"grad_norm": norm, "index_grad_norm": index_norm}, tokens


def train_step(model, optimizers, micro, s, prep, autocast, watch, book):
    """One optimizer step, the heart of it all: learning rate, gradients, update. Gradients that are not finite are left out, and
    stop a run that has too many in a row (ValueError). Returns the step's row of the log, still without recall and speed, and its
    tokens on all processes."""
    step = book.step
    torch.manual_seed((s["seed"] + 1_000_003 * step + book.rank) % 2**63)  # what is random in a step is a function of the step: nothing else to save
    warmup = step < s["index_warmup_steps"] and s["attention"] in ("msa", "shared", "token")
    lr = learning_rate(step, s)
    for o in optimizers:
        for g in o.param_groups:
            g["lr"] = lr
    row, tokens = gradients(model, micro, warmup, s, prep, autocast, watch)
    norm, index_norm = row["grad_norm"], row["index_grad_norm"]
    if math.isfinite(norm) and math.isfinite(index_norm):
        book.whole = False  # until `step` counts this update
        for o in optimizers:
            o.step()
        model.balance(1e-3)
        book.bad = 0
    else:
        book.bad += 1
        model.balance(0.0)  # forget the loads of this step
        tqdm.write(f"step {step}: gradient norm is {norm}, of the index branch {index_norm}: step skipped ({book.bad} in a row)")
        if book.bad == MAX_BAD_STEPS:
            raise ValueError(f"{book.bad} non-finite gradients in a row at step {step}: stopped; {book.saved()}. Try a lower --lr")
    model.zero_grad(set_to_none=True)
    book.step, book.whole = step + 1, True
    watch.lap("optimizer")
    return {"step": step + 1, **row, "lr": lr, "warmup": warmup}, tokens


def measure(model, s, tok, prep, autocast, held, watch, book):
    """An evaluation, for the log, the curve and the reader; after the last step also of xz on the same text. The first process alone does it."""
    if book.rank:
        return
    result = evaluate(model, s, tok=tok, prep=prep, device=s["device"], autocast=autocast, **held)
    for k, v in result.items():
        if not math.isfinite(v):  # before it is noted: a resume would take it for an evaluation
            raise ValueError(f"step {book.step}: the evaluation's {k} is {v}, so the weights in {book.ckpt} are of no use. Start anew with a lower --lr (it was {s['lr']:g})")
    if book.step == s["max_steps"]:
        raw = tok.decode_bytes(held["windows"][1].flatten().tolist())
        result["xz_bits_per_byte"] = 8 * len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)) / len(raw)
    book.note({"step": book.step, "eval": result, "minutes": watch.minutes()} | watch.speed())
    draw_curve(book.out / "curve.png", read_log(book.log), f"{s['recipe']}, preset {s['preset']}")
    tqdm.write(f"step {book.step}: " + ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v:.3f}" for k, v in result.items()))


def stop_on_signal():
    """From now on Ctrl-C and SIGTERM only ask: their names are put into the list that is returned, empty until then."""
    stop = []

    def ask_to_stop(n, _):
        if not stop:  # not print: a handler may interrupt one
            os.write(2, b"\nstopping after this step, with a checkpoint; Ctrl-C again aborts at once\n")
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        stop.append(signal.Signals(n).name)

    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, ask_to_stop)
    return stop


def run(args, on_exit):
    """Everything, from the settings to the last checkpoint. on_exit holds what must be done however it ends. Returns the exit code, 0."""
    # torchrun says in the environment which of how many processes this is, over all machines and (local) on this one. One process is the usual case.
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    rank, world, local, beside_me = (int(os.environ.get(k, d)) if "RANK" in os.environ else d for k, d in alone.items())
    if rank:  # only the first one speaks, writes and evaluates; errors go to stderr from everywhere
        on_exit.enter_context(contextlib.redirect_stdout(on_exit.enter_context(open(os.devnull, "w"))))  # noqa: SIM115

    # Settings
    out = take_folder(args, rank, world, on_exit)
    ckpt = out / "ckpt.pt"
    state = read_checkpoint(ckpt) if args.resume else None
    with fitting(ckpt):
        begun = state and state["settings"]["dtype"]
    name = choose(args, local, begun)
    with fitting(ckpt):
        s = settle(args, state and state["settings"], state and state["step"])
    device = s["device"]
    evaluated = state and any("eval" in r and r["step"] == state["step"] for r in read_log(out / "log.jsonl"))
    if evaluated and state["step"] == s["max_steps"]:
        print(f"{ckpt} was finished already, at step {state['step']}; to go further: python train.py --resume --max_steps {2 * state['step']} --out_dir {out}")
        return 0
    init = read_checkpoint(s["init_from"]) if s.get("init_from") and not state else None
    if world > 1:
        if device == "mps" or s["batch_size"] < world:
            raise ValueError(f"{world} processes need CPUs or GPUs, and at least a row of text each: --batch_size is {s['batch_size']}, the device {device}")
        # gloo for what the host must know, NCCL for what is on the GPUs; the others wait while the first one evaluates
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(hours=2))
        on_exit.push(lambda kind, *_: kind is None and torch.distributed.destroy_process_group())
        print(f"processes: {world}, {beside_me} on this machine; each takes one row in {world} of every step")
    began = time.monotonic()
    mix = data.parse_mix(s["tasks"])

    # Model and optimizers: before the data is prepared, so that a checkpoint that does not fit is refused at once
    tok, prep, model, optimizers, step = load_model(s, state, init, ckpt)
    watch = Stopwatch(model, device, name, world, began)
    autocast = lambda: torch.autocast(device, dtype=torch.bfloat16, enabled=s["dtype"] == "bf16")

    # Data
    corpus, own, text, vision, held = load_data(s, state, tok, prep, mix, local, world)
    if s.get("compile", device == "cuda"):
        model.compile_layers()
    describe(s, model)
    if own is not None and rank == 0:
        print(data.own_sheet(out / "own_pictures.png", own))
    constant = {"settings": s, "config": model.config.to_dict(), "tokenizer": tok.state(), "prep": dataclasses.asdict(prep), "corpus": corpus.content, "own": own and own.content}
    book = Book(out, rank, step, model, optimizers, constant, args)

    # Loop
    if step and not evaluated and (step == s["max_steps"] or step % s["eval_interval"] == 0):
        measure(model, s, tok, prep, autocast, held, watch, book)  # the checkpoint was written, then its evaluation was cut short
    stop = stop_on_signal()
    workers = s.get("workers", min(12, max(0, (os.cpu_count() or 1) // beside_me - 2)))
    loader = torch.utils.data.DataLoader(  # of step numbers; its workers make each step's micro-batches
        range(s["max_steps"]), sampler=range(step, s["max_steps"]), batch_size=None, num_workers=workers, prefetch_factor=4 if workers else None,
        collate_fn=functools.partial(micro_batches, text=text, vision=vision, s=s, rank=rank, world=world), pin_memory=device == "cuda", generator=torch.Generator(),
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None, worker_init_fn=quiet,
    )  # fmt: skip
    on_exit.push(book.rescue)
    bar = on_exit.enter_context(tqdm(loader, initial=step, total=s["max_steps"], dynamic_ncols=True, mininterval=1.0, disable=rank > 0))
    rec, told, clock = None, False, time.monotonic()
    for micro in bar:
        row, tokens = train_step(model, optimizers, micro, s, prep, autocast, watch, book)
        step, last = book.step, book.step == s["max_steps"]
        if rec is None or step % 25 == 1 or last:
            rec = recall(model, micro[0], device, autocast)
        seconds, clock = time.monotonic() - clock, time.monotonic()
        row |= {"tokens_per_s": tokens / seconds, "block_recall": rec[0], "score_recall": rec[1]}
        book.note(row)
        shown = {k: f"{row[k]:.3f}" for k in ("text_loss", "caption_loss", "index_kl") if row[k] is not None}
        shown |= {"recall": f"{rec[0]:.2f}", "norm": f"{row['grad_norm']:.2f}", "lr": f"{row['lr']:.1e}", "tok_s": f"{row['tokens_per_s']:,.0f}"}
        mfu = watch.mfu(seconds)
        bar.set_postfix(shown | {"mfu": f"{mfu:.0%}" if mfu else "?"}, refresh=False)
        late = s.get("max_minutes") is not None and watch.minutes() > s["max_minutes"]
        late, told = together([late, bool(stop)])  # all stop where one was told to
        if told or late or last or step % s["eval_interval"] == 0:
            book.checkpoint()  # before the evaluation: a crash in there loses nothing
            if not told:
                measure(model, s, tok, prep, autocast, held, watch, book)
            if told or late:
                break
            clock = time.monotonic()
        watch.ready(step)
    bar.close()
    go_on = f"go on with: python train.py --resume --out_dir {out}"
    if told:
        print(f"{stop[0] if stop else 'another process was told'}: stopped at step {step} with {ckpt}; {go_on}")
    elif step < s["max_steps"]:
        print(f"--max_minutes {s['max_minutes']:g} reached at step {step} of {s['max_steps']}; {go_on}; or try: python sample.py --ckpt {out}")
    else:
        memory = f", peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device == "cuda" else ""
        print(f"done in {watch.minutes():.1f} minutes{memory}: {ckpt}; now try: python sample.py --ckpt {out}")
    return 0


def main(argv=None):
    with contextlib.ExitStack() as on_exit:
        return run(parse(argv), on_exit)


def sentence(error):
    """What to say of an error that ends the run; any but these is a mistake of ours, and raised again."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's; those of a forward or backward pass have been caught
        return "out of memory beside the step itself: lower --micro_batch_tokens"
    if not isinstance(error, (ValueError, OSError)):
        raise error
    said = str(error).strip() or repr(error)
    # An error of a data worker brings its whole traceback as text: the last line says it.
    return said.splitlines()[-1] if "Traceback (most recent call last)" in said else said


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as e:  # noqa: BLE001  sentence() raises again what it has none for
        said = sentence(e)
        one_says(said)
        sys.exit(f"train.py: {said}")
