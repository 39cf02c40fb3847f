"""Sample from a trained nanoM3: text, pictures and clips in, text out, token by token.

    python sample.py                                            a showcase of the newest run: a contact sheet PNG and a Python completion
    python sample.py --prompt "def fibonacci(n):"               go on with a text
    python sample.py --image cat.png                            name or describe a picture
    python sample.py --image cat.png --prompt "what is on the left?"      ask about it
    python sample.py --clip frames/ or anim.gif                 describe a clip
    python sample.py --image cat.png --attention_map map.png    where each generated word looks
    python sample.py --prompt "x" --num_samples 8 --temperature 1    eight answers as one batch: the prompt is read once

A prompt is read `--prefill_chunk` tokens at a time, so its length is bounded by the cache alone. On a GPU with bf16 the matrices are
cast to bf16 once, and one decoding step is recorded as a CUDA graph: a token is then one launch instead of several hundred.
"""

import argparse
import codecs
import contextlib
import math
import sys
import textwrap
import time
from pathlib import Path


def parse(argv=None):
    p = argparse.ArgumentParser(description="Text, pictures and clips in, text out.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--ckpt", metavar="FILE-or-DIR", help="a checkpoint or a training out_dir; default: the newest */ckpt.pt here")
    p.add_argument("--prompt", metavar="TEXT", help="text to go on with, or a question about the pictures")
    p.add_argument("--image", action="append", default=[], metavar="FILE", help="a picture; may be given several times")
    p.add_argument("--clip", action="append", default=[], metavar="FILE-or-DIR", help="an animated GIF, WebP or APNG, or a folder of frames")
    p.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    p.add_argument("--top_k", type=int, default=0, help="draw from the k most likely tokens only; 0 means all")
    p.add_argument("--seed", type=int, default=1337, help="of the sampler alone")
    p.add_argument("--max_tokens", type=int, default=200, help="stop after this many tokens")
    p.add_argument("--num_samples", type=int, default=1, help="answers to the same prompt, drawn side by side")
    p.add_argument("--max_context", type=int, help="most tokens of prompt and answer together; default what the model was trained with")
    p.add_argument("--prefill_chunk", type=int, default=8192, help="tokens of the prompt to read at a time: less takes less memory")
    p.add_argument("--index_dtype", choices=["bf16", "fp8"], default="bf16", help="how the cache keeps index keys; fp8 takes half the memory")
    p.add_argument("--attention_map", metavar="PNG", help="draw where each generated word looks in the pictures")
    p.add_argument("--device", choices=["cpu", "cuda", "mps"], help="default: the best there is")
    p.add_argument("--out", default=None, metavar="PNG", help="the showcase's contact sheet; default showcase.png beside the checkpoint")
    return p.parse_args(argv)


if __name__ == "__main__":
    parse()  # --help, and a flag that is none, are answered before torch is imported, which takes seconds

import numpy as np
import torch

import data
import model as m3
import msa


def pick(logits, temperature, top_k, generator, banned=()):
    """One token per row from logits [n,V]: argmax at temperature 0 (or too small to divide by), else a draw from the top_k (0: all).
    `banned` ids are never taken: a placeholder without a picture would have no meaning."""
    logits = logits.float().clone()
    for token in banned:
        logits[:, token] = float("-inf")
    if temperature < 1e-6:
        return logits.argmax(-1)  # [n]
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        floor = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return logits.softmax(-1).multinomial(1, generator=generator).squeeze(1)


def autocast(model):
    """The precision that `load` chose: bf16 products if the matrices are bf16, as in training."""
    weight = model.lm_head.weight
    return torch.autocast(weight.device.type, torch.bfloat16, enabled=weight.dtype == torch.bfloat16, cache_enabled=False)


def record(model, cache):
    """model.step as a CUDA graph: -> a function from the new tokens [n] to the next logits [n,V]. Everything it reads and writes
    stays where it is: one buffer for the tokens, the preallocated cache with its lens, one buffer for the logits."""
    tokens = torch.zeros(cache.batch, 1, dtype=torch.long, device=cache.lens.device)
    before, longest, side = cache.lens.clone(), cache.longest, torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), autocast(model):
        for _ in range(2):  # compiles the kernels; what it writes lies beyond lens
            model.step(tokens, cache)
            cache.truncate(before)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), autocast(model):
        logits = model.step(tokens, cache)
    cache.longest = longest  # recorded, not run

    def step(new):
        tokens.copy_(new[:, None])
        graph.replay()
        cache.longest += 1  # what the host does in Cache.advance
        return logits

    return step


def generate(
    model, tokens, patches=None, grids=None, max_tokens=200, temperature=0.0, top_k=0, seed=1337, num_samples=1, stop=None, capacity=None,
    chunk=8192, index_dtype="bf16", graph=False,
):  # fmt: skip
    """Yield one list of num_samples token ids after the other. A row that has produced `stop` yields None from then on.

    tokens: the prompt, a list of ids; patches [N,P] float and grids [n,3]: its pictures and clips in the order of their placeholders.
    The prompt runs once, `chunk` tokens at a time, for one row; its keys, values and index keys are then shared out to the
    num_samples rows of the cache. graph: record the decoding step (CUDA only; takes about as long as some tens of steps).
    Raises ValueError on an empty prompt, or one that with max_tokens exceeds `capacity` (default: exactly what is needed).
    """
    if not tokens:
        raise ValueError("the prompt is empty")
    if not 0 <= temperature < math.inf or top_k < 0 or max_tokens < 1 or num_samples < 1 or chunk < 1:
        raise ValueError(
            f"temperature {temperature} and top_k {top_k} must be finite and not negative, "
            f"max_tokens {max_tokens}, samples {num_samples} and chunk {chunk} at least 1"
        )
    capacity = capacity or len(tokens) + max_tokens
    if len(tokens) >= capacity:
        raise ValueError(f"the prompt has {len(tokens)} tokens and the context holds {capacity}: nothing can be added")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.inference_mode():
        cache = m3.Cache(model.config, 1, capacity, index_dtype)
        with autocast(model):  # the tokens stay on the CPU, where counting placeholders is free
            logits = model.prefill(torch.tensor([tokens]), cache, patches, grids, chunk)  # [1,V]
        cache.select([0] * num_samples)
        logits, step = logits.expand(num_samples, -1), None
        alive = [True] * num_samples
        for i in range(min(max_tokens, capacity - len(tokens))):
            new = pick(logits, temperature, top_k, generator, (model.config.image_token_id, model.config.video_token_id))  # [n]
            ids = new.tolist()
            alive = [a and t != stop for a, t in zip(alive, ids)]
            yield [t if a else None for a, t in zip(alive, ids)]
            if not any(alive) or len(tokens) + i + 1 >= capacity:
                return
            if graph:
                step = step or record(model, cache)
                logits = step(new)
            else:
                with autocast(model):
                    logits = model.step(new[:, None], cache)


class Stream:
    """Turns token ids into text as they come, holding back the bytes of a character that is not whole yet."""

    def __init__(self, tok):
        self.tok, self.utf8 = tok, codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, ids, final=False):
        return self.utf8.decode(self.tok.decode_bytes(ids), final)


def read_checkpoint(path):
    """A checkpoint file, or the ckpt.pt of an out_dir, as plain data. ValueError with one sentence if it is missing, cut short or something else."""
    path = Path(path)
    path = path / "ckpt.pt" if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"there is no checkpoint {path}: train one with python train.py --native")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)  # plain data only: nothing in the file is executed
        missing = {"model", "config", "tokenizer", "prep", "settings", "step"} - state.keys()
    except Exception as e:
        raise ValueError(f"{path} is not a whole nanoM3 checkpoint ({type(e).__name__})") from e
    if missing:
        raise ValueError(f"{path} is not a nanoM3 checkpoint: it has no {min(missing)!r}")
    return state


@contextlib.contextmanager
def fitting(path, *also):
    """What a checkpoint lacks or has in another form is one sentence: a ValueError. also: more kinds of exception that mean this here."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, RuntimeError, *also) as e:
        raise ValueError(f"{path} does not fit this version of nanoM3 ({type(e).__name__}: {str(e).splitlines()[0][:200]})") from e


def load(path=None, device=None):
    """A checkpoint (None: the newest) -> (model in eval mode, tokenizer, prep, settings with `step` and `path`)."""
    path = newest() if path is None else Path(path)
    state = read_checkpoint(path)
    with fitting(path):
        tok, prep = data.Tokenizer.from_state(state["tokenizer"]), data.Prep(**state["prep"])
        model = m3.M3(m3.M3Config.from_dict(state["config"]))
        model.load_state_dict(state["model"])
        must = ("recipe", "preset", "context", "vision_context", "canvas", "pictures", "tasks")
        s = {k: state["settings"][k] for k in must}
        may = ("images", "mix", "init_from", "vision_rows", "vision_start", "planned_steps")
        s |= {k: state["settings"].get(k) for k in may}
        began = round((s["vision_start"] or 0) * (s["planned_steps"] or 0))  # the step at which pictures enter
        pictures = s["recipe"] != "text_only" and s["vision_rows"] != 0 and state["step"] > began
        s["saw_pictures"] = pictures or bool(s["init_from"])  # what went before an --init_from is not known here
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this torch sees no CUDA device")
    device = device or ("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
    s |= {"step": state["step"], "path": path / "ckpt.pt" if path.is_dir() else path}
    model = model.to(device).eval()
    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        for m in model.modules():  # autocast would do it again for every token; embedding, norms and router stay as trained
            if isinstance(m, (torch.nn.Linear, m3.Experts)):
                for p in m.parameters():
                    p.data = p.data.bfloat16() if p is not model.embed_tokens.weight else p.data
    return model, tok, prep, s


def newest():
    found = list(Path(".").glob("*/ckpt.pt"))
    if not found:
        raise ValueError("no */ckpt.pt here: train one with python train.py --native, or name one with --ckpt")
    return max(found, key=lambda p: p.stat().st_mtime)


def see(clips, prep, device):
    """[(clip uint8 [T,3,h,w], is_clip)] -> (visuals [(grids, is_clip)], patches float [N,P] or None, grids [n,3] or None)."""
    if not clips:
        return [], None, None
    parts = [data.to_patches(c, prep) for c, _ in clips]
    visuals = [(g, is_clip) for (_, g), (_, is_clip) in zip(parts, clips)]
    return visuals, data.normalize(torch.cat([p for p, _ in parts]).to(device), prep), torch.cat([g for _, g in parts])


def answer(model, tok, prep, clips, text, **kw):
    """The model's words about clips [(clip, is_clip)] and a question, as one string."""
    visuals, patches, grids = see(clips, prep, next(model.parameters()).device)
    ids = data.build_prompt(tok, prep, visuals, text)
    kw = {"max_tokens": 40, **kw}
    return tok.decode([t for (t,) in generate(model, ids, patches, grids, stop=tok.eod, **kw) if t is not None])


def showcase(model, tok, prep, settings, out):
    """Held-out scenes, clips, variants and questions with the model's words under each, as one PNG; prints a Python completion."""
    from matplotlib.figure import Figure

    print("A function, continued:\n")
    prompt = "def read_json(path):\n    "
    print(prompt + answer(model, tok, prep, [], prompt, max_tokens=80, temperature=0.7, top_k=40) + "\n")
    if not settings["saw_pictures"]:
        print("This model was trained on text only: no pictures to show.")
        return
    if settings.get("mix") == 1 and settings.get("images"):  # trained on the user's own pictures alone
        own, _ = data.load_folder(settings["images"], prep, tok, settings["vision_context"])
        lots = [[own[i] for i in own.held[:12]]]
    else:
        pictures = data.Pictures(settings["canvas"], settings["pictures"] or None)
        kinds = [kind for kind, task in data.HELDOUT.items() if task in data.parse_mix(settings["tasks"])]
        lots = [lot for kind in kinds if (lot := data.heldout(kind, 12, pictures))]
    items = [e for lot in lots for e in lot[: max(3, 12 // len(lots))]]
    if not items:
        print("No pictures were held out of this run: nothing to show.")
        return
    items.sort(key=lambda e: len(e.frames) > 1)  # stills, six in a row, then clips, three in a row
    stills = sum(len(e.frames) == 1 for e in items)
    top, below = -(-stills // 6), -(-(len(items) - stills) // 3)  # rows of each
    fig = Figure(figsize=(12, 2.6 * top + 1.1 * below + 0.4), dpi=100)
    grid = fig.add_gridspec(top + below, 6, height_ratios=[2.6] * top + [1.1] * below)
    right = 0
    for n, e in enumerate(items):
        row, at = divmod(n, 6) if n < stills else divmod(n - stills, 3)
        ax = fig.add_subplot(grid[row, at] if n < stills else grid[top + row, 2 * at : 2 * at + 2])
        ax.axis("off")
        said = answer(model, tok, prep, e.visuals, e.question)
        hit = said == e.answer
        right += hit
        ax.imshow(np.concatenate(list(e.frames.transpose(0, 2, 3, 1)), axis=1))  # frames side by side, [h, T*w, 3]
        lines = [f"{e.question} {said}".strip()] + ([] if hit else [f"(truth: {e.answer})"])
        label = "\n".join(textwrap.fill(line, 28 if n < stills else 60) for line in lines)
        colour = "darkgreen" if hit else "firebrick"
        ax.annotate(label, (0.5, 0), (0, -3), "axes fraction", "offset points", fontsize=7, color=colour, ha="center", va="top")
    fig.suptitle(f"Drawings, pairs and motions never seen in training. {right} of {len(items)} exactly right. Pictures: OpenMoji, CC BY-SA 4.0", fontsize=9)
    fig.tight_layout(h_pad=2.0)
    fig.savefig(out)
    print(f"{right} of {len(items)} held-out pictures, clips and questions answered exactly: see {out}")


def attention_map(model, tok, prep, ids, patches, grids, clips, new, out):
    """For each generated token, the attention (mean over layers and heads) its prediction pays to each visual token, drawn over the picture."""
    from matplotlib.figure import Figure

    weights = []

    def probe(layer, q, k, chosen):
        p = msa.attention_weights(q[:, -len(new) :], k, None if chosen is None else chosen[:, :, -len(new) :], layer.block_size)[0]
        weights.append(p.mean((0, 1, 2)))  # [new,S]

    layers = [m for m in model.modules() if isinstance(m, msa.MSA)]
    for m in layers:
        m.probe = probe
    device = next(model.parameters()).device
    with torch.inference_mode(), autocast(model):  # position j predicts token j + 1, so the last generated token is not fed in
        model(torch.tensor([ids + new[:-1]], device=device), patches=patches, grids=grids)
    for m in layers:
        m.probe = None
    mean = torch.stack(weights).mean(0).cpu()  # [new,S]
    places = torch.tensor([t in (tok.image, tok.clip) for t in ids]).nonzero().squeeze(1)
    looks = mean[:, places]  # [new, visual tokens]
    maps, at = [], 0  # one map [new,h,w] a temporal patch
    for t, h, w in (grids // torch.tensor([1, prep.merge_size, prep.merge_size])).tolist():
        maps += looks[:, at : at + t * h * w].reshape(len(new), t, h, w).unbind(1)
        at += t * h * w
    frames = [frame for clip, _ in clips for frame in clip[:: prep.temporal_patch_size]]
    fig = Figure(figsize=(2.0 * len(frames) + 1, 2.0 * len(new)), dpi=90)
    axes = fig.subplots(len(new), len(frames), squeeze=False)
    for i, token in enumerate(new):
        top = max(m[i].max().item() for m in maps)
        for a, frame, m in zip(axes[i], frames, maps):
            a.imshow(frame.transpose(1, 2, 0))
            a.imshow(m[i].float().numpy(), extent=(0, frame.shape[2], frame.shape[1], 0), cmap="inferno", alpha=0.6, vmin=0, vmax=top)
            a.set(xticks=[], yticks=[])
        axes[i][0].set_ylabel(f"{tok.decode([token]).strip() or '(end)'}\n{looks[i].sum():.0%} on pixels", fontsize=8)
    fig.tight_layout()
    fig.savefig(out)
    print(f"attention map: {out}")


def main(argv=None):
    args = parse(argv)
    for name, least in (("temperature", 0), ("top_k", 0), ("seed", 0), ("max_tokens", 1), ("num_samples", 1), ("prefill_chunk", 1), ("max_context", 1)):
        value = getattr(args, name)
        if value is not None and not least <= value < (math.inf if name == "temperature" else 2**63):  # NaN fails too
            raise ValueError(f"--{name} must be a number of at least {least}, not {value}")
    if args.num_samples > 1 and (args.temperature < 1e-6 or args.top_k == 1):
        raise ValueError(
            f"--num_samples {args.num_samples} would be {args.num_samples} times the same answer, as only the most likely token is taken: "
            "draw, with --temperature 0.8 for example" + (" and another --top_k" if args.top_k == 1 else "")
        )
    for name, path in (("--attention_map", args.attention_map), ("--out", args.out)):
        if path and (not Path(path).parent.is_dir() or Path(path).suffix.lower() != ".png"):
            raise ValueError(f"{name} {path}: must be a .png in a folder that exists")
    if args.attention_map and not (args.image or args.clip):
        raise ValueError("--attention_map needs an --image or a --clip to look at")
    if args.attention_map and args.index_dtype == "fp8":
        raise ValueError("--attention_map shows the blocks chosen with index keys as computed, not those of --index_dtype fp8: leave one of them out")
    model, tok, prep, settings = load(args.ckpt, args.device)
    print(f"[{settings['path']}, step {settings['step']}, {settings['recipe']}, preset {settings['preset']}]", file=sys.stderr)
    if args.prompt is None and not args.image and not args.clip:
        idle = [f"--{k}" for k, v in vars(parse([])).items() if k not in ("ckpt", "device", "out") and getattr(args, k) != v]
        if idle:
            print(f"[the showcase has settings of its own: {', '.join(idle)} would go with --prompt, --image or --clip]", file=sys.stderr)
        showcase(model, tok, prep, settings, args.out or settings["path"].with_name("showcase.png"))
        return 0
    clips = [data.load_visual(f, prep) for f in args.image] + [(data.load_visual(f, prep)[0], True) for f in args.clip]
    visuals, patches, grids = see(clips, prep, next(model.parameters()).device)
    ids = data.build_prompt(tok, prep, visuals, args.prompt or "")
    if clips and not settings["saw_pictures"]:
        print("[this model was trained on text only and never saw a picture: what it says about one means nothing]", file=sys.stderr)
    capacity = args.max_context or settings["context"]
    if capacity > settings["context"]:
        print(f"[--max_context {capacity}: beyond the {settings['context']} tokens of its training rows the model is untrained]", file=sys.stderr)
    if len(ids) >= capacity:
        raise ValueError(f"the prompt has {len(ids)} tokens, but the context holds {capacity} (--max_context)")
    shown = args.prompt if args.prompt and not clips else ""
    alone, stream, rows = args.num_samples == 1, Stream(tok), [[] for _ in range(args.num_samples)]
    made, times, began = [], [], time.perf_counter()
    if alone:
        print(shown, end="", flush=True)
    for step in generate(
        model, ids, patches, grids, min(args.max_tokens, capacity - len(ids)), args.temperature, args.top_k, args.seed, args.num_samples, tok.eod,
        chunk=args.prefill_chunk, index_dtype=args.index_dtype, graph=model.lm_head.weight.element_size() == 2,
    ):  # fmt: skip
        times.append(time.perf_counter() - began)
        made.append(0)
        for row, t in zip(rows, step):
            if t is not None:
                row.append(t)
                made[-1] += 1
        if alone and made[-1]:
            print(stream(step), end="", flush=True)
    if alone:
        print(stream([], final=True))
    else:
        for i, row in enumerate(rows):
            print(f"--- sample {i + 1}\n{shown}{tok.decode(row)}")
    said = f"{len(ids):,} prompt tokens, first token after {times[0] * 1e3:.0f} ms"
    if sum(made[2:]):  # the second step also compiles and records
        said += f", then {sum(made[2:]) / (times[-1] - times[1]):.1f} tokens/s"
    if made[-1] and len(ids) + len(times) == capacity and len(times) < args.max_tokens:
        said += f"; cut short: prompt and answer fill the context of {capacity:,} tokens (--max_context)"
    print(f"[{said}]", file=sys.stderr)
    new = rows[0]
    if args.attention_map and not new:
        print("the model ended its answer at once: no word to draw an attention map of", file=sys.stderr)
    elif args.attention_map:
        if len(new) > 40:
            print("the attention map shows the first 40 tokens", file=sys.stderr)
        if args.num_samples > 1:
            print("the attention map is that of sample 1", file=sys.stderr)
        attention_map(model, tok, prep, ids, patches, grids, clips, new[:40], args.attention_map)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as e:
        sys.exit(f"sample.py: {e}")
