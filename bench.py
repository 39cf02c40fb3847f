"""How fast the kernels are, beside dense attention and the public sparse kernels, with one timer in one run.

    python bench.py                              the released shape at 8K, 32K and 128K tokens
    python bench.py --lengths 8192 --no-peers    only some of it
    python bench.py --long                       reading a prompt and decoding at 8K to 1M tokens, against dense attention
    python bench.py --model out_long             a trained model: its loss after, and a token's time at, up to a million tokens of context
    python bench.py --tiles                      other tiles for this card: which cut of the work kernels._tiles should choose
    python bench.py --tiny [--long | --tiles]    a rehearsal at toy sizes; on the CPU, in Triton's interpreter, no time is shown: it would mean nothing

The released shape: 64 query heads in 4 groups, dims 128, blocks of 128 keys, 16 kept. Every row: median of several runs after
warm-up with the spread (slowest - fastest) beside it, TFLOP/s of the products that the definition asks for (backward: 2.5 times
the forward's), and the memory taken beyond inputs and results. The ceilings, a large matrix product and a large copy, are measured in
the same run. Selections: uniform random blocks; two sinks and a sliding window; clusters of 64 queries that mostly agree. A peer
that is not installed, does not fit, or fails is one line that says so. Writes results/kernels.json and results/kernels.png.

--long times forward passes alone, writes results/longcontext.json and .png, and results/hardware.png with two micro-benchmarks. Dense
is the best of cuDNN, flash and, in decoding, our own split-K kernel, at the same length in the same run; from 512K on dense prefill
is run once, without a warm-up, by cuDNN only (38 s at 1M). Decoding repeats one layer on one cache: what fits into L2 (50 MB) is read
from there, for dense as for MSA.
"""

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

import kernels
import msa

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
SELECTIONS = ("random", "sink", "clustered")
BACKENDS = (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)) if GPU else (("math", SDPBackend.MATH),)


def figures(text):
    """What was measured, as text; in Triton's interpreter nothing is worth showing but that it ran."""
    return text if GPU else "  ran"


def timed(f, repeats=7, warmup=2):
    """-> (median, slowest - fastest) in ms and the peak memory beyond what was there before, results included, in bytes."""
    if not GPU:
        start = time.perf_counter()
        f()
        return (time.perf_counter() - start) * 1e3, 0.0, 0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(warmup):
        f()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        f()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    times.sort()
    return times[len(times) // 2], times[-1] - times[0], torch.cuda.max_memory_allocated() - before


def kernel_us(f, n=10):
    """Microseconds of each GPU kernel of f, the mean of n calls."""
    if not GPU:
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        for _ in range(n):
            f()
        torch.cuda.synchronize()
    return {e.key[:60]: e.self_device_time_total / n for e in p.key_averages() if e.self_device_time_total}


def ceilings():
    n = 8192 if GPU else 256
    a, b = (torch.randn(n, n, device=DEVICE, dtype=DTYPE) for _ in range(2))
    product = 2 * n**3 / timed(lambda: a @ b, 20)[0] / 1e9
    src = torch.empty(2**32 if GPU else 2**20, dtype=torch.uint8, device=DEVICE)
    dst = torch.empty_like(src)
    copy = 2 * src.numel() / timed(lambda: dst.copy_(src), 20)[0] / 1e9
    return {"product_tflops": product, "copy_tbs": copy}


def selection(kind, T, Hkv, block, K, seed=0):
    """ids [1,Hkv,T,K] as a trained index branch might choose them: never zeros, the local block always among them."""
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    nb = -(-T // block)
    out = torch.full((1, Hkv, T, K), -1, dtype=torch.int32, device=DEVICE)
    keep = min(K, nb)
    blocks = torch.arange(nb, device=DEVICE)
    for t0 in range(0, T, 4096):
        t = torch.arange(t0, min(T, t0 + 4096), device=DEVICE)
        local = (t // block)[:, None]  # [n,1]
        score = torch.rand(Hkv, len(t), nb, device=DEVICE, generator=g)
        if kind == "sink":
            score = torch.where(blocks < 2, 3.0, blocks / nb).expand_as(score)  # the first two, then the newest
        elif kind == "clustered":
            shared = torch.rand(Hkv, -(-len(t) // 64), nb, device=DEVICE, generator=g).repeat_interleave(64, 1)[:, : len(t)]
            score = shared + 0.1 * score
        score = torch.where(blocks == local, 9.0, score).masked_fill(blocks > local, -1.0)
        best, ids = score.topk(keep, -1)
        out[0, :, t, :keep] = torch.where(best < 0, -1, ids).int()
    return out


def flops(T, H, D, block, K):
    """(sparse, dense) products of one forward, 2 * (QK and PV), counted token by token."""
    t = torch.arange(1, T + 1, dtype=torch.float64)
    seen = torch.minimum(t, (K - 1) * block + (t - 1) % block + 1)
    return 4 * H * D * seen.sum().item(), 4 * H * D * t.sum().item()


class Table:
    """Prints rows as they come, and keeps them."""

    def __init__(self):
        self.rows = []
        print(f"{'operator':38}{'T':>8}{'selection':>11}" + (f"{'ms':>10}{'+-':>8}{'TFLOP/s':>9}{'extra GB':>10}" if GPU else ""), flush=True)

    def add(self, operator, T, kind, f, work=0.0, result_bytes=0, repeats=7, split=False):
        """Time f and print a row -> ms, or None if it failed. split: keep the time of each GPU kernel in it, too."""
        try:
            ms, spread, memory = timed(f, repeats, 2 if repeats >= 5 else int(repeats > 1))
        except Exception as e:  # noqa: BLE001  other people's code may raise anything: say it and go on
            return self.skip(operator, T, kind, f"{type(e).__name__}: {' '.join(str(e).split())}")
        row = {"operator": operator, "T": T, "selection": kind, "ms": ms, "spread_ms": spread}
        row |= {"tflops": work / ms / 1e9, "extra_gb": max(0, memory - result_bytes) / 2**30}
        if split and GPU:
            row["kernels_ms"] = {name: us / 1e3 for name, us in kernel_us(f, 1).items()}
        self.rows.append(row)
        rate = f"{row['tflops']:9.0f}" if work else " " * 9
        print(f"{operator:38}{T:8}{kind:>11}" + figures(f"{ms:10.3f}{spread:8.3f}{rate}{row['extra_gb']:10.2f}"), flush=True)
        return ms

    def both(self, name, T, kind, forward, inputs, dout, work, repeats):
        """A row for forward and one for backward -> their summed time, or None if one of them failed."""
        ms = self.add(f"{name} forward", T, kind, forward, work, dout.nbytes, repeats)
        if ms is None:
            return None
        out = forward()
        backward = lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
        more = self.add(f"{name} backward", T, kind, backward, 2.5 * work, 3 * dout.nbytes, repeats)
        return None if more is None else ms + more

    def skip(self, operator, T, kind, why):
        self.rows.append({"operator": operator, "T": T, "selection": kind, "skipped": why})
        print(f"{operator:38}{T:8}{kind:>11}  not run: {why[:90]}", flush=True)


def ours(table, T, x, block, K, repeats):
    """-> the summed time of selection, forward, backward and KL on the random selection."""
    q, k, v, do, iq, ik = x
    H, Hkv, D, scale, run = q.shape[2], k.shape[2], q.shape[3], q.shape[3] ** -0.5, torch.ops.nanom3
    sparse, _ = flops(T, H, D, block, K)
    scores = 2 * Hkv * ik.shape[2] * T * (T + block) / 2
    select = lambda: run.select_blocks(iq, ik, block, K, None)
    total = table.add("select_blocks", T, "", select, scores, 4 * T * Hkv * K, repeats, True)

    def attention(kind):
        ids = selection(kind, T, Hkv, block, K)
        out, lse = kernels.sparse_attention(q, k, v, ids, block)
        forward = lambda: run.sparse_attention(q, k, v, ids, block, None, scale)
        backward = lambda: run.sparse_attention_backward(do, q, k, v, out, lse, ids, block, None, scale)
        kl = lambda: run.index_kl(q, k, lse, iq, ik, ids, block, None, scale)
        return (
            table.add("sparse_attention forward", T, kind, forward, sparse, q.nbytes + lse.nbytes, repeats, True),
            table.add("sparse_attention backward", T, kind, backward, 2.5 * sparse, q.nbytes + 2 * k.nbytes, repeats, True),
            table.add("index_kl and its gradients", T, kind, kl, sparse / 2, iq.nbytes + ik.nbytes, repeats, True),
        )

    times = {kind: attention(kind) for kind in SELECTIONS}["random"]
    rows = torch.randn(min(65536, T * Hkv), -(-T // block), device=DEVICE)  # as many as select_blocks ranks, to compare
    keep = min(K, rows.shape[1])
    table.add(f"torch.topk of {len(rows)} rows", T, "", lambda: rows.topk(keep, -1), 0, len(rows) * keep * 12, repeats)
    return None if None in (total, *times) else total + sum(times)


def dense(table, T, x, repeats):
    """-> the forward + backward time of the fastest dense attention."""
    q, k, v, do = (y.transpose(1, 2) for y in x[:4])
    work = flops(T, q.shape[1], q.shape[3], 1, T)[1]
    qkv = [y.repeat_interleave(q.shape[1] // y.shape[1], 1).detach().requires_grad_() for y in (q, k, v)]  # they want equal heads
    forward = lambda: F.scaled_dot_product_attention(*qkv, is_causal=True)
    times = []
    for name, backend in BACKENDS:
        with sdpa_kernel(backend):
            times.append(table.both(f"dense {name}", T, "", forward, qkv, do, work, repeats))
    return min((ms for ms in times if ms is not None), default=None)


def peers(table, T, x, block, K, repeats):
    """Other people's kernels on the same selection."""
    if not GPU:
        return table.skip("peers", T, "", "no GPU")
    q, k, v, do = x[:4]
    Hkv, G = k.shape[2], q.shape[2] // k.shape[2]
    sparse, _ = flops(T, q.shape[2], q.shape[3], block, K)
    ids = selection("random", T, Hkv, block, K)
    if T > 8192:
        table.skip("FlexAttention", T, "random", "its mask of T x T / block bools and its block lists do not fit")
    else:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        kept = torch.zeros(Hkv, T, -(-T // block) + 1, dtype=torch.bool, device=DEVICE)
        kept.scatter_(2, torch.where(ids[0] < 0, kept.shape[2] - 1, ids[0]).long(), True)
        mask = create_block_mask(lambda b, h, i, j: kept[h // G, i, j // block] & (j <= i), None, q.shape[2], T, T, device=DEVICE)
        flex = torch.compile(flex_attention)
        qkv = [y.transpose(1, 2).detach().requires_grad_() for y in (q, k, v)]
        forward = lambda: flex(*qkv, block_mask=mask, enable_gqa=True)
        table.both("FlexAttention", T, "random", forward, qkv, do.transpose(1, 2), sparse, repeats)
    try:
        from fla.ops.nsa import parallel_nsa
    except ImportError as e:
        return table.skip("fla parallel_nsa", T, "random", f"not installed ({e})")
    qkv = [y.detach().requires_grad_() for y in (q, k, v)]
    gate = torch.ones(q.shape[:3], device=DEVICE, dtype=DTYPE)
    chosen = ids.transpose(1, 2).contiguous()  # [1,T,Hkv,K]
    forward = lambda: parallel_nsa(*qkv, g_slc=gate, block_indices=chosen, block_counts=K, block_size=block)
    table.both("fla parallel_nsa", T, "random", forward, qkv, do, sparse, repeats)


def cut(kind, tile):
    """A tile in words: rows x entries a program, see kernels._tiles."""
    return f"{kind} {tile[0]} x {tile[1]}, {tile[2]} warps, {tile[3]} stages"


def tiles(table, T, x, block, K, repeats):
    """Every training kernel with other tiles (see kernels._tiles), each checked against those in use; prints the fastest. In a rehearsal only those in use."""
    q, k, v, do, iq, ik = x
    scale, run, ids, usual = q.shape[3] ** -0.5, torch.ops.nanom3, selection("random", T, k.shape[2], block, K), kernels._tiles
    out, lse = kernels.sparse_attention(q, k, v, ids, block)
    kinds = {
        "attend": lambda: run.sparse_attention(q, k, v, ids, block, None, scale)[:1],
        "backward": lambda: run.sparse_attention_backward(do, q, k, v, out, lse, ids, block, None, scale),
        "kl": lambda: run.index_kl(q, k, lse, iq, ik, ids, block, None, scale)[2:],
    }
    for kind, f in kinds.items():
        M, QC, warps, stages = now = usual(kind, q.dtype, q.shape[3], block)
        others = [(M, n, w, st) for n in (QC // 2, QC, 2 * QC) for w in (4, 8) for st in (1, 2, 3)]
        others += [(m, QC, warps, stages) for m in (M // 2, 2 * M)]
        want, best = [y.float() for y in f()], {}
        for tile in dict.fromkeys([now, *others]) if GPU else [now]:
            kernels._tiles = lambda which, *rest, kind=kind, tile=tile: tile if which == kind else usual(which, *rest)
            ms = table.add(cut(kind, tile), T, "random", f, 0, 0, repeats)
            if ms and all(((a - b).norm() / b.norm()).item() < 1e-2 for a, b in zip(f(), want)):
                best[tile] = ms
        kernels._tiles = usual
        named = {"as it is": now}
        if GPU and best:
            named["fastest"] = min(best, key=best.get)
        for name, tile in named.items():
            print(f"T {T}, {name}: {cut(kind, tile)}:" + (figures(f" {best[tile]:.2f} ms") if tile in best else " does not run"))


def panels(n, width, height, **kw):
    """-> (figure, its n panels side by side)"""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height))
    return fig, fig.subplots(1, n, **kw)


def save(fig, path, legend=8, grid="major"):
    for ax in fig.axes:
        ax.legend(fontsize=legend)
        ax.grid(alpha=0.3, which=grid)
    fig.tight_layout()
    fig.savefig(path, dpi=130)


def plot(rows, path):
    fig, axes = panels(2, 11, 4.2, sharey=True)
    for ax, direction in zip(axes, ("forward", "backward")):
        for name in sorted({r["operator"] for r in rows if r["operator"].endswith(direction)}):
            best = {r["T"]: r["ms"] for r in rows if r["operator"] == name and r["selection"] in ("", "random") and "ms" in r}
            if best:
                label, width = name.removesuffix(f" {direction}"), 2.5 if "sparse" in name else 1.2
                ax.loglog(best.keys(), best.values(), "o-", label=label, lw=width)
        ax.set(title=direction, xlabel="tokens")
    axes[0].set_ylabel("ms")
    save(fig, path, grid="both")


# ---------------------------------------------------------------------------------------------------------------------------
# Long contexts: python bench.py --long

PHASES = {  # which kernels belong to which phase of a prefill
    "index": ("score_kernel",),
    "selection": ("topk_kernel",),
    "inversion": ("rank_kernel", "place_kernel"),  # and everything not named here: sums and fills
    "sparse": ("attend_kernel",),
    "combine": ("combine_kernel",),
}


def phases(rows):
    """The kernels' times of some rows, added up by phase -> {phase: ms}."""
    out = dict.fromkeys(PHASES, 0.0)
    for row in rows:
        for name, ms in row.get("kernels_ms", {}).items():
            phase = next((p for p, names in PHASES.items() if any(n in name for n in names)), "inversion")
            out[phase] += ms
    return out


def same_blocks(a, b):
    """The share of the blocks in a [B,Hkv,T,K] that b has, too, over the last 4,096 queries."""
    a, b = a[:, :, -4096:], b[:, :, -4096:]
    return ((a.unsqueeze(-1) == b.unsqueeze(-2)).any(-1) & (a >= 0)).sum().item() / (a >= 0).sum().item()


def prefill(table, T, H, Hkv, D, block, K, last):
    """One layer reads T tokens -> {what: ms}, phases, and the share of blocks that FP8 index keys keep."""
    repeats, scores = 3 if T < 2**19 else 2, 2 * Hkv * D * T * (T + block) / 2
    q, k, v, iq, ik = (torch.randn(1, T, *s, device=DEVICE, dtype=DTYPE) for s in ((H, D), (Hkv, D), (Hkv, D), (Hkv, D), (D,)))
    keys8, (sparse, dense) = msa.quantize(ik), flops(T, H, D, block, K)
    ids = kernels.select_blocks(iq, ik, block, K)
    n = len(table.rows)
    select = table.add("select_blocks", T, "", lambda: kernels.select_blocks(iq, ik, block, K), scores, ids.nbytes, repeats, True)
    attend = lambda: kernels.sparse_attention(q, k, v, ids, block)
    rest = table.add("sparse_attention forward", T, "own index", attend, sparse, q.nbytes + 4 * T * H, repeats, True)
    parts = phases(table.rows[n:])
    got = {"MSA": select + rest} if select and rest else {}
    try:
        kept = same_blocks(ids, kernels.select_blocks(iq, keys8, block, K))
        quick = table.add("select_blocks, FP8 index", T, "", lambda: kernels.select_blocks(iq, keys8, block, K), scores, ids.nbytes, repeats, True)
        got |= {"MSA, FP8 index": quick + rest} if quick and rest else {}
    except ValueError as e:
        kept = table.skip("select_blocks, FP8 index", T, "", str(e))
    if last:  # the same prompt in chunks, each on a cache that ends with it
        C = min(T, 2**16) if GPU else 32

        def chunks():
            for e in range(C, T + 1, C):
                chosen = kernels.select_blocks(iq[:, e - C : e], ik[:, :e], block, K)
                kernels.sparse_attention(q[:, e - C : e], k[:, :e], v[:, :e], chosen, block)

        table.add(f"both, in chunks of {C}", T, "", chunks, scores + sparse, 0, 1)
    k, v = (y.transpose(1, 2).repeat_interleave(H // Hkv, 1) for y in (k, v))  # they want equal heads
    q = q.transpose(1, 2)
    full = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for name, backend in BACKENDS[: 1 if T >= 2**19 else None]:
        with sdpa_kernel(backend):
            ms = table.add(f"dense {name} forward", T, "", full, dense, q.nbytes, 1 if T >= 2**19 else 3)
            got |= {f"dense {name}": ms} if ms else {}
    return got, parts, kept


def loop_us(f, most=20):
    """Microseconds of one of many calls in a row: the median of five lots."""
    f()
    if not GPU:
        return timed(f)[0] * 1e3
    once = timed(f, 1, 1)[0]
    n = max(2, min(most, int(10 / once)))
    return timed(lambda: [f() for _ in range(n)], 5, 1)[0] * 1e3 / n


def recorded(f):
    """f as a CUDA graph -> its replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph.replay


def decode(rows, B, S, H, Hkv, D, block, K):
    """One layer, one new token for each of B rows of S keys: adds a row for every way to `rows`, and prints it."""
    q, k, v, iq, ik = (torch.randn(B, *s, device=DEVICE, dtype=DTYPE) for s in ((1, H, D), (S, Hkv, D), (S, Hkv, D), (1, Hkv, D), (S, D)))
    lens = torch.full((B,), S, dtype=torch.int32, device=DEVICE)
    keys8 = (torch.empty(B, S, D, dtype=msa.FP8, device=DEVICE), torch.empty(B, S, device=DEVICE))
    for b in range(B):  # row by row: in fp32 all of them would be twice the size
        keys8[0][b], keys8[1][b] = msa.quantize(ik[b])
    select = lambda keys: kernels.select_blocks(iq, keys, block, K, lens)
    attend = lambda ids: kernels.sparse_attention(q, k, v, ids, block, lens)
    ids = select(ik)
    whole, read = 4 * B * S * Hkv * D, min(S, K * block) * 4 * B * Hkv * D  # bytes in bf16
    heads = [y.transpose(1, 2) for y in (q, k, v)]

    def sdpa(backend):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*heads, enable_gqa=True)

    ways = {
        "index and selection": (lambda: select(ik), ik.nbytes),
        "index and selection, FP8 index": (lambda: select(keys8), ik.nbytes / 2 + 4 * B * S),
        "sparse attention": (lambda: attend(ids), read),
        "MSA": (lambda: attend(select(ik)), ik.nbytes + read),
        "MSA, FP8 index": (lambda: attend(select(keys8)), ik.nbytes / 2 + 4 * B * S + read),
        "dense, our split-K": (lambda: kernels.dense_decode(q, k, v, lens), whole),
        **{f"dense {name}": (functools.partial(sdpa, backend), whole) for name, backend in BACKENDS},
    }
    for name, (f, size) in ways.items():
        row = {"way": name, "B": B, "S": S, "Hkv": Hkv, "bytes": size}
        try:
            row["launched_us"] = loop_us(f)
            row["graph_us"] = loop_us(recorded(f)) if GPU else row["launched_us"]
            if B == 1 and not name.startswith("dense c"):
                row["kernels_us"] = kernel_us(f)
        except Exception as e:  # noqa: BLE001  as in Table.add
            row["skipped"] = f"{type(e).__name__}: {' '.join(str(e).split())[:90]}"
        rows.append(row)
        said = row.get("skipped") or figures(f"{row['launched_us']:12.1f}{row['graph_us']:12.1f}{size / row['graph_us'] / 1e6:10.2f}")
        print(f"{name:34}{B:4}{S:10}{Hkv:5}{said}", flush=True)


def best(rows, B, S, way, Hkv):
    """Microseconds in a graph of the way that has this name, or of the quickest "dense" one; None if it was not run."""
    mine = [r for r in rows if (r["B"], r["S"], r["Hkv"]) == (B, S, Hkv) and "graph_us" in r]
    return min((r["graph_us"] for r in mine if r["way"] == way or (way == "dense" and r["way"].startswith(way))), default=None)


@triton.jit
def gather_kernel(x, ids, out, N, HEADS: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr):
    """Read R of the N tokens that ids [HEADS,N] lists for a head, out of x [S,HEADS,WIDTH]; write one sum, so that nothing is left out."""
    h = tl.program_id(1)
    n = tl.load(ids + h * N + tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    y = tl.load(x + (n * HEADS + h)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])  # [R,WIDTH]
    tl.store(out + h * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(y.to(tl.float32), 1), 0))


def read_tbs(S, heads, width, unit):
    """TB/s of reading half of S tokens of `heads` x `width` numbers, `unit` neighbours at a time in random order, other ones a head."""
    N, R = S // 2, min(S // 2, 16384 // width)
    x, out = torch.randn(S, heads, width, device=DEVICE, dtype=DTYPE), torch.empty(heads * (N // R), device=DEVICE)
    starts = torch.stack([torch.randperm(S // unit, device=DEVICE)[: N // unit] for _ in range(heads)]) * unit
    ids = (starts[:, :, None] + torch.arange(unit, device=DEVICE)).flatten(1).int().contiguous()  # [heads,N]
    us = loop_us(lambda: gather_kernel[(N // R, heads)](x, ids, out, N, heads, width, R))
    return ids.numel() * width * x.element_size() / us / 1e6


def topk_us(S, rows, block, K):
    """Microseconds of choosing K * block of S tokens, and K of S / block blocks, for some rows."""
    tokens, lens = torch.randn(rows, S, device=DEVICE), torch.full((rows,), S, dtype=torch.int32, device=DEVICE)
    blocks = tokens[:, ::block].contiguous()  # [rows,S/block]
    return {
        "S": S,
        "rows": rows,
        "tokens": loop_us(lambda: tokens.topk(min(S, K * block), -1)),
        "blocks": loop_us(lambda: blocks.topk(min(blocks.shape[1], K), -1)),
        "blocks, ours": loop_us(lambda: kernels.decode_topk(blocks[:, None, None], lens, block, K)),
    }


def hardware(S, block, K, Hkv, D):
    """Two claims about why blocks, and why a choice for every head, are cheap -> (read rates, top-k times)."""
    rates, times = {}, []
    for heads, width in ((1, Hkv * D), (Hkv, D)):
        for unit in (1, block):
            what = f"{heads} x {width}, {'token by token' if unit == 1 else f'blocks of {unit}'}"
            rates[what] = read_tbs(S, heads, width, unit)
            print(f"reading half of {S} tokens, {what}:{figures(f' {rates[what]:.3f} TB/s')}", flush=True)
    for n in (S // 128, S // 32, S // 8, S // 2, S) if GPU else (S,):
        times.append(t := topk_us(n, 64 if GPU else 2, block, K))
        said = f" tokens {t['tokens']:.0f} us, their blocks {t['blocks']:.0f}, by ours {t['blocks, ours']:.0f}"
        print(f"top-k for {t['rows']} rows of {n}:{figures(said)}")
    return rates, times


def plot_long(report, path):
    fig, axes = panels(3, 15, 4.4)
    for name in sorted({n for p in report["prefill"] for n in p["ms"]}):
        line = [(p["T"], p["ms"][name]) for p in report["prefill"] if name in p["ms"]]
        axes[0].loglog(*zip(*line), "o-" if "MSA" in name else "s--", label=name)
    axes[0].set(title="reading a prompt, one layer", xlabel="tokens", ylabel="ms")
    bottom = [0.0] * len(report["prefill"])
    for phase in PHASES:
        share = [100 * p["phases_ms"][phase] / (sum(p["phases_ms"].values()) or 1) for p in report["prefill"]]
        axes[1].bar([f"{p['T']:,}" for p in report["prefill"]], share, bottom=bottom, label=phase)
        bottom = [a + b for a, b in zip(bottom, share)]
    axes[1].set(title="where MSA's time goes (bf16)", xlabel="tokens", ylabel="%")
    axes[1].tick_params(axis="x", labelsize=7)
    rows = report["decode"]
    for i, B in enumerate(sorted({r["B"] for r in rows})):
        for way, style in (("dense", "s--"), ("MSA", "o-"), ("MSA, FP8 index", "^:")):
            line = [(S, us) for S in sorted({r["S"] for r in rows}) if (us := best(rows, B, S, way, report["shape"]["Hkv"]))]
            if line:
                axes[2].loglog(*zip(*line), style, color=f"C{i}", label=f"{way}, {B} rows")
    axes[2].set(title="one new token a row, one layer, in a CUDA graph", xlabel="tokens in the cache", ylabel="microseconds")
    save(fig, path / "longcontext.png", legend=7, grid="both")
    fig, axes = panels(2, 11, 4)
    axes[0].barh(list(report["read_tbs"]), list(report["read_tbs"].values()))
    axes[0].axvline(report["copy_tbs"], color="gray", ls="--", label="a large copy")
    axes[0].set(title="reading half of the keys", xlabel="TB/s")
    for what in ("tokens", "blocks", "blocks, ours"):
        axes[1].loglog([r["S"] for r in report["topk_us"]], [r[what] for r in report["topk_us"]], "o-", label=f"top-k over {what}")
    axes[1].set(title=f"choosing 2,048 tokens, or 16 blocks of 128; {report['topk_us'][0]['rows']} rows", xlabel="tokens", ylabel="microseconds")
    save(fig, path / "hardware.png")


def long(report, lengths, batches, H, Hkv, D, block, K, out):
    """Everything of --long: fills the report, prints the ratios, writes it and its plots to the folder `out`."""
    table, report["prefill"], report["decode"] = Table(), [], []
    for T in lengths:
        ms, parts, kept = prefill(table, T, H, Hkv, D, block, K, T == lengths[-1])
        report["prefill"].append({"T": T, "ms": ms, "phases_ms": parts, "fp8_keeps": kept})
    rows = report["decode"]
    print(f"{'one new token a row':34}{'B':>4}{'S':>10}{'Hkv':>5}" + (f"{'launched us':>12}{'graph us':>12}{'TB/s':>10}" if GPU else ""))
    sizes = [(S, B) for S in lengths for B in batches]
    for S, B in sizes:
        decode(rows, B, S, H, Hkv, D, block, K)
    decode(rows, 1, lengths[-1], H, 2 * Hkv, D, block, K)  # MiniMax M2 has twice the KV heads: the other baseline
    report["read_tbs"], report["topk_us"] = hardware(2**20 if GPU else 128, block, K, Hkv, D)
    report["ratios"] = ratios = []
    for p in report["prefill"]:
        dense = min((ms for name, ms in p["ms"].items() if name.startswith("dense")), default=None)
        for way in ("MSA", "MSA, FP8 index"):
            if dense and way in p["ms"]:
                ratios.append({"what": "prefill", "way": way, "T": p["T"], "dense_over_msa": dense / p["ms"][way]})
    for S, B in sizes:
        dense = best(rows, B, S, "dense", Hkv)
        for way in ("MSA", "MSA, FP8 index"):
            if dense and (us := best(rows, B, S, way, Hkv)):
                ratios.append({"what": "decode", "way": way, "B": B, "S": S, "dense_over_msa": dense / us})
                if B == 1 and S == lengths[-1] and (wide := best(rows, 1, S, "dense", 2 * Hkv)):
                    ratios[-1]["dense_of_twice_the_kv_heads_over_msa"] = wide / us
    if GPU:
        for r in ratios:
            numbers = [f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v:,}" for k, v in list(r.items())[2:]]
            print(", ".join([r["what"], r["way"], *numbers]))
        ahead = [r["T"] for r in ratios if r["what"] == "prefill" and r["way"] == "MSA" and r["dense_over_msa"] > 1]
        print(f"prefill: MSA is faster from {min(ahead):,} tokens on, of those timed" if ahead else "prefill: dense is faster at every length timed")
    for p in report["prefill"]:
        if p["fp8_keeps"] is not None:
            print(f"T {p['T']:,}: FP8 index keys keep {p['fp8_keeps']:.2%} of the blocks that bf16 chooses (random keys: near-ties abound)")
    report["rows"] = table.rows
    out.mkdir(parents=True, exist_ok=True)
    (out / "longcontext.json").write_text(json.dumps(report, indent=1))
    plot_long(report, out)
    print(f"wrote {out / 'longcontext.json'}, longcontext.png and hardware.png")


@torch.inference_mode()
def whole(ckpt, lengths, out, windows=2, most=512, steps=20):
    """A whole model with ever more context, as it was trained and with its sparse layers made dense: the loss of the same validation
    text (`most` tokens in each of `windows` places) after the L tokens that stand before it, and the time of a decoding step there,
    on a GPU in a CUDA graph. Training text stands before the validation text, so that there is enough. Writes wholemodel.json
    and .png to the folder `out`."""
    import data
    import sample
    from model import Cache

    model, tok, _, settings = sample.load(ckpt)
    text = data.Corpus(tok)
    tokens = torch.cat([torch.from_numpy(part.astype("int64")) for part in (text.train, text.val)])
    ends = [len(tokens) - len(text.val) * n // windows - 1 for n in range(windows)]  # of each window
    if min(ends) - most < max(lengths):
        raise ValueError(f"there are {min(ends) - most:,} tokens of text before the last that are asked for, too few for a context of {max(lengths):,}")
    layers = [m for m in model.modules() if isinstance(m, msa.MSA)]
    usual, rows = [(m.kind, m.indexed) for m in layers], []
    for L in lengths:
        for way in ("as trained", "dense"):
            for m, (kind, indexed) in zip(layers, usual):
                m.kind, m.indexed = (kind, indexed) if way == "as trained" else ("dense", False)
            losses = []
            if GPU:
                torch.cuda.reset_peak_memory_stats()
            for end in ends:
                cache, some = Cache(model.config, 1, L + most + 2 * steps), tokens[end - most - L : end + 1]
                with sample.autocast(model):
                    model.prefill(some[None, :L], cache)
                    logits = model(some[None, L:-1], cache=cache).logits[0].float()  # [most,V]
                losses.append(F.cross_entropy(logits, some[L + 1 :].to(logits.device)).item())
            new = logits[-1:].argmax(-1)  # [1]
            memory = torch.cuda.max_memory_allocated() if GPU else 0
            step = sample.record(model, cache) if GPU else lambda new, cache=cache: model.step(new[:, None], cache)
            us, spread, _ = timed(functools.partial(step, new), steps)
            rows.append({"context": L, "way": way, "loss": sum(losses) / windows, "losses": losses, "us": 1e3 * us, "spread_us": 1e3 * spread, "peak_gb": memory / 2**30})
            print(f"{L:>10,} tokens, {way:10} loss {rows[-1]['loss']:.4f}" + (f", {1e3 * us:,.0f} us a token, peak {memory / 2**30:.1f} GiB" if GPU else ""), flush=True)
            del cache, logits, step
    out.mkdir(parents=True, exist_ok=True)
    where = torch.cuda.get_device_name() if GPU else "CPU"
    report = {"device": where, "torch": torch.__version__, "model": {k: settings[k] for k in ("preset", "recipe", "step", "context")}, "text": text.report, "rows": rows}
    (out / "wholemodel.json").write_text(json.dumps(report, indent=1))
    fig, axes = panels(2, 10, 3.6)
    for ax, key, label in ((axes[0], "loss", "loss (nats a token)"), (axes[1], "us", "microseconds for a new token")):
        for way in ("as trained", "dense"):
            ax.plot(lengths, [r[key] for r in rows if r["way"] == way], "o-", label=way)
        ax.axvline(settings["context"], color="grey", lw=0.8, ls=":", label="trained on")
        ax.set(xscale="log", xlabel="tokens of context", ylabel=label)
    axes[1].set_yscale("log")
    fig.suptitle(f"preset {settings['preset']}, {where}", fontsize=9)
    save(fig, out / "wholemodel.png")
    print(f"wrote {out / 'wholemodel.json'} and {out / 'wholemodel.png'}")


def main(argv=None):
    p = argparse.ArgumentParser(description="Time the kernels beside dense attention and public sparse kernels.")
    p.add_argument("--long", action="store_true", help="prefill and decode up to a million tokens")
    p.add_argument("--model", metavar="CKPT", help="a trained model's loss and speed with up to 1M tokens of context")
    p.add_argument("--tiles", action="store_true", help="time other tiles of the training kernels; writes nothing")
    p.add_argument("--lengths", type=int, nargs="+", help="tokens in the sequence; default 8K, 32K and 128K; with --long to 512K and 1M; with --model 4K to 1M")
    p.add_argument("--batches", type=int, nargs="+", help="rows to decode, with --long; default 1, 8 and 32")
    p.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="time FlexAttention and fla's parallel_nsa, too"
    )
    p.add_argument("--out", help="folder for the results; default results, of a rehearsal out_bench_tiny")
    p.add_argument("--tiny", action="store_true", help="a rehearsal at toy sizes; without a GPU it says what runs and shows no times")
    args = p.parse_args(argv)
    if not GPU and not args.tiny:
        p.exit(1, "bench.py needs a CUDA GPU (python bench.py --tiny rehearses on the CPU)\n")
    H, Hkv, D, block, K = (4, 2, 32, 16, 2) if args.tiny else (64, 4, 128, 128, 16)
    lengths = args.lengths or ([48, 80] if args.tiny else [2**13, 2**15, 2**17, *[2**19, 2**20][: 2 * args.long]])
    batches = args.batches or ([1, 2] if args.tiny else [1, 8, 32])
    if min(*lengths, *batches) < 1:
        p.error(f"--lengths and --batches must be at least 1, not {min(*lengths, *batches)}")
    out = Path(args.out or ("out_bench_tiny" if args.tiny else "results"))
    if args.model:
        return whole(args.model, args.lengths or ([64, 128] if args.tiny else [2**n for n in range(12, 21, 2)]), out)
    torch.manual_seed(0)
    report = {
        "device": torch.cuda.get_device_name() if GPU else "CPU, interpreted",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shape": {"B": 1, "H": H, "Hkv": Hkv, "D": D, "Di": D, "block": block, "K": K, "dtype": str(DTYPE)},
        **ceilings(),
    }
    print(f"{report['device']}, torch {report['torch']}, Triton {report['triton']}, {DTYPE}")
    print(f"{H} query heads in {Hkv} groups, dims {D}, blocks of {block}, {K} kept")
    if GPU:
        print(f"ceilings: matrix product {report['product_tflops']:.0f} TFLOP/s, copy {report['copy_tbs']:.2f} TB/s")
    else:
        print("a rehearsal in Triton's interpreter: what runs is said, how long it took is not")
    if args.long:
        return long(report, lengths, batches, H, Hkv, D, block, K, out)
    table, totals = Table(), {}
    for T in lengths:
        x = [torch.randn(1, T, *s, device=DEVICE, dtype=DTYPE) for s in ((H, D), (Hkv, D), (Hkv, D), (H, D), (Hkv, D), (D,))]
        repeats = 7 if T < 100_000 else 3
        if args.tiles:
            tiles(table, T, x, block, K, repeats)
            continue  # nothing else is timed, nothing is written
        mine = ours(table, T, x, block, K, repeats)
        theirs = dense(table, T, x, repeats)
        if args.peers:
            peers(table, T, x, block, K, repeats)
        if mine and theirs:
            totals[T] = theirs / mine
    if args.tiles:
        return
    if GPU:
        for T, times in totals.items():
            together = "index, forward, backward and KL together"
            print(f"T {T}: {together} are {times:.2f} times as fast as the best dense forward + backward")
        if slower := [T for T, times in totals.items() if times < 1]:
            print(f"dense attention is faster up to {max(slower)} tokens")
    report |= {"rows": table.rows, "dense_over_ours": totals}
    out.mkdir(parents=True, exist_ok=True)
    (out / "kernels.json").write_text(json.dumps(report, indent=1))
    plot(table.rows, out / "kernels.png")
    print(f"wrote {out / 'kernels.json'} and {out / 'kernels.png'}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as e:
        sys.exit(f"bench.py: {e}")
