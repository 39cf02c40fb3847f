"""How fast the kernels are, beside dense attention and the public sparse kernels, with one timer in one run.

    python bench.py                              the released shape at 8K, 32K and 128K tokens
    python bench.py --lengths 8192 --no-peers    only some of it
    python bench.py --tiny                       a rehearsal on the CPU in Triton's interpreter: the times mean nothing

The released shape: 64 query heads in 4 groups, dims 128, blocks of 128 keys, 16 kept. Every row: median of several runs after
warm-up with the spread (slowest - fastest) beside it, TFLOP/s of the products that the definition asks for (backward: 2.5 times
the forward's), and the memory taken beyond inputs and results. The ceilings, a large matrix product and a large copy, are measured in
the same run. Selections: uniform random blocks; two sinks and a sliding window; clusters of 64 queries that mostly agree. A peer
that is not installed, does not fit, or fails is one line that says so. Writes results/kernels.json and results/kernels.png.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import kernels

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
SELECTIONS = ("random", "sink", "clustered")
BACKENDS = (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)) if GPU else (("math", SDPBackend.MATH),)


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
        print(f"{'operator':34}{'T':>8}{'selection':>11}{'ms':>10}{'+-':>8}{'TFLOP/s':>9}{'extra GB':>10}", flush=True)

    def add(self, operator, T, kind, f, work=0.0, result_bytes=0, repeats=7, split=False):
        """Time f and print a row -> ms, or None if it failed. split: keep the time of each GPU kernel in it, too."""
        try:
            ms, spread, memory = timed(f, repeats, 1 if repeats < 5 else 2)
        except Exception as e:  # noqa: BLE001  other people's code may raise anything: say it and go on
            return self.skip(operator, T, kind, f"{type(e).__name__}: {' '.join(str(e).split())}")
        row = {"operator": operator, "T": T, "selection": kind, "ms": ms, "spread_ms": spread}
        row |= {"tflops": work / ms / 1e9, "extra_gb": max(0, memory - result_bytes) / 2**30}
        if split and GPU:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
                f()
                torch.cuda.synchronize()
            row["kernels_ms"] = {e.key[:60]: e.self_device_time_total / 1e3 for e in p.key_averages() if e.self_device_time_total}
        self.rows.append(row)
        rate = f"{row['tflops']:9.0f}" if work else " " * 9
        print(f"{operator:34}{T:8}{kind:>11}{ms:10.3f}{spread:8.3f}{rate}{row['extra_gb']:10.2f}", flush=True)
        return ms

    def skip(self, operator, T, kind, why):
        self.rows.append({"operator": operator, "T": T, "selection": kind, "skipped": why})
        print(f"{operator:34}{T:8}{kind:>11}  not run: {why[:90]}", flush=True)


def ours(table, T, x, block, K, repeats):
    """-> the summed time of selection, forward, backward and KL on the random selection."""
    q, k, v, do, iq, ik = x
    H, Hkv, D, scale, run = q.shape[2], k.shape[2], q.shape[3], q.shape[3] ** -0.5, torch.ops.nanom3
    sparse, _ = flops(T, H, D, block, K)
    scores = 2 * Hkv * ik.shape[2] * T * (T + block) / 2
    total = table.add(
        "select_blocks", T, "", lambda: run.select_blocks(iq, ik, block, K, None), scores, 4 * T * Hkv * K, repeats, True
    )

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
    return None if None in (total, *times) else total + sum(times)


def dense(table, T, x, repeats):
    """-> the forward + backward time of the fastest dense attention."""
    q, k, v, do = (y.transpose(1, 2) for y in x[:4])
    work = flops(T, q.shape[1], q.shape[3], 1, T)[1]
    qkv = [y.repeat_interleave(q.shape[1] // y.shape[1], 1).detach().requires_grad_() for y in (q, k, v)]  # they want equal heads
    forward = lambda: F.scaled_dot_product_attention(*qkv, is_causal=True)

    def both(name):
        a = table.add(f"dense {name} forward", T, "", forward, work, q.nbytes, repeats)
        if a is None:
            return float("inf")
        out = forward()
        b = table.add(f"dense {name} backward", T, "", gradients(out, qkv, do), 2.5 * work, 3 * q.nbytes, repeats)
        return float("inf") if b is None else a + b

    times = []
    for name, backend in BACKENDS:
        with sdpa_kernel(backend):
            times.append(both(name))
    return min(times) if min(times) < float("inf") else None


def gradients(out, inputs, dout):
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def peers(table, T, x, block, K, repeats):
    """Other people's kernels on the same selection."""
    q, k, v, do = x[:4]
    Hkv, G = k.shape[2], q.shape[2] // k.shape[2]
    sparse, _ = flops(T, q.shape[2], q.shape[3], block, K)
    ids = selection("random", T, Hkv, block, K)
    if not GPU:
        return table.skip("peers", T, "", "no GPU")
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
        if table.add("FlexAttention forward", T, "random", forward, sparse, q.nbytes, repeats):
            out = forward()
            table.add(
                "FlexAttention backward",
                T,
                "random",
                gradients(out, qkv, do.transpose(1, 2)),
                2.5 * sparse,
                3 * q.nbytes,
                repeats,
            )
    try:
        from fla.ops.nsa import parallel_nsa
    except ImportError as e:
        return table.skip("fla parallel_nsa", T, "random", f"not installed ({e})")
    qkv = [y.detach().requires_grad_() for y in (q, k, v)]
    gate = torch.ones(q.shape[:3], device=DEVICE, dtype=DTYPE)
    chosen = ids.transpose(1, 2).contiguous()  # [1,T,Hkv,K]
    forward = lambda: parallel_nsa(*qkv, g_slc=gate, block_indices=chosen, block_counts=K, block_size=block)
    if table.add("fla parallel_nsa forward", T, "random", forward, sparse, q.nbytes, repeats):
        out = forward()
        table.add("fla parallel_nsa backward", T, "random", gradients(out, qkv, do), 2.5 * sparse, 3 * q.nbytes, repeats)


def topk(table, T, Hkv, block, K, repeats):
    """torch.topk on as many rows as select_blocks ranks, for comparison with its top-k (part of select_blocks above)."""
    rows = torch.randn(min(65536, T * Hkv), -(-T // block), device=DEVICE)
    keep = min(K, rows.shape[1])
    table.add(f"torch.topk of {len(rows)} rows", T, "", lambda: rows.topk(keep, -1), 0, len(rows) * keep * 12, repeats)


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for ax, direction in zip(axes, ("forward", "backward")):
        for name in sorted({r["operator"] for r in rows if r["operator"].endswith(direction)}):
            best = {r["T"]: r["ms"] for r in rows if r["operator"] == name and r["selection"] in ("", "random") and "ms" in r}
            if best:
                ax.loglog(
                    list(best),
                    list(best.values()),
                    "o-",
                    label=name.removesuffix(" " + direction),
                    lw=2.5 if "sparse" in name else 1.2,
                )
        ax.set(title=direction, xlabel="tokens")
        ax.legend(fontsize=8)
        ax.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("ms")
    fig.tight_layout()
    fig.savefig(path, dpi=130)
    plt.close(fig)


def main():
    p = argparse.ArgumentParser(description="Time the kernels beside dense attention and public sparse kernels.")
    p.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072], help="tokens in the sequence")
    p.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="time FlexAttention and fla's parallel_nsa, too"
    )
    p.add_argument("--out", default="results", help="folder for kernels.json and kernels.png")
    p.add_argument("--tiny", action="store_true", help="a rehearsal at toy sizes, on the CPU if there is no GPU")
    args = p.parse_args()
    if not GPU and not args.tiny:
        p.exit(1, "bench.py needs a CUDA GPU (python bench.py --tiny rehearses on the CPU)\n")
    H, Hkv, D, block, K = (4, 2, 16, 16, 2) if args.tiny else (64, 4, 128, 128, 16)
    lengths = [48, 80] if args.tiny else args.lengths
    torch.manual_seed(0)
    report = {
        "device": torch.cuda.get_device_name() if GPU else "CPU, interpreted",
        "torch": torch.__version__,
        "triton": kernels.triton.__version__,
    }
    report |= {"shape": {"B": 1, "H": H, "Hkv": Hkv, "D": D, "Di": D, "block": block, "K": K, "dtype": str(DTYPE)}, **ceilings()}
    print(f"{report['device']}, torch {report['torch']}, Triton {report['triton']}, {DTYPE}")
    print(f"{H} query heads in {Hkv} groups, dims {D}, blocks of {block}, {K} kept")
    print(f"ceilings: matrix product {report['product_tflops']:.0f} TFLOP/s, copy {report['copy_tbs']:.2f} TB/s")
    table, totals = Table(), {}
    for T in lengths:
        x = [torch.randn(1, T, *s, device=DEVICE, dtype=DTYPE) for s in ((H, D), (Hkv, D), (Hkv, D), (H, D), (Hkv, D), (D,))]
        repeats = 7 if T < 100_000 else 3
        mine = ours(table, T, x, block, K, repeats)
        topk(table, T, Hkv, block, K, repeats)
        theirs = dense(table, T, x, repeats)
        if args.peers:
            peers(table, T, x, block, K, repeats)
        if mine and theirs:
            totals[T] = theirs / mine
    for T, times in totals.items():
        print(
            f"T {T}: index, forward, backward and KL together are {times:.2f} times as fast as the best dense forward + backward"
        )
    slower = [T for T, times in totals.items() if times < 1]
    if slower:
        print(f"dense attention is faster up to {max(slower)} tokens")
    report |= {"rows": table.rows, "dense_over_ours": totals}
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "kernels.json").write_text(json.dumps(report, indent=1))
    plot(table.rows, out / "kernels.png")
    print(f"wrote {out / 'kernels.json'} and {out / 'kernels.png'}")


if __name__ == "__main__":
    main()
