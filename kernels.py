"""MiniMax Sparse Attention (MSA) in Triton: the functions of msa.py, for training and inference on any GPU that runs Triton.

    python kernels.py                   a demonstration in seconds; without a GPU it runs in Triton's interpreter, on the CPU

Three operators, told in the order in which a layer calls them (B batch, T queries, S keys, H query heads, Hkv KV heads = groups,
G = H // Hkv heads in a group, D and Di head dims):

    select_blocks      iq [B,T,Hkv,Di], ik [B,S,Di]                        -> ids [B,Hkv,T,K]            chapter 1
    sparse_attention   q [B,T,H,D], k and v [B,S,Hkv,D], ids               -> out [B,T,H,D], lse [B,H,T] chapters 2-4
    index_kl           q, k, lse, iq, ik, ids (None: everything visible)   -> the index branch's loss    chapter 5

and for the few queries of a decoding step, which only memory holds up, the first two in another form, with dense attention beside:

    dense_decode       q, k, v                                             -> out, lse over all keys     chapter 6

What they mean, to the letter, is written in msa.py; here is how they are made fast. The numbers that steer every choice are
those of one H200 at the released shape (B 1, H 64, Hkv 4, D = Di = 128, blocks of 128 keys, K = 16 blocks a query, bf16): 787
TFLOP/s of matrix products and 4.26 TB/s of device memory, measured in the same run as every "measured" below (torch 2.11,
Triton 3.6; results/kernels.json, what was tried results/checks_h200.json), and about 8 TB/s out of the 50 MB of L2 cache. "128K" means T = S = 131,072. No kernel here
ever writes a T x S tensor.

                             8K             32K             128K                floor at 128K
    select_blocks            0.24 ms        1.3 ms          18 ms               11.2 ms
    sparse attention         2.1            9.1             37                  16 (24 if Q comes from memory for every entry)
      its backward           4.7            20              78                  28
    index KL + gradients     1.6            6.1             23                  7
    cuDNN dense, fwd + bwd   1.8 + 5.2      29 + 82         511 + 1315

(Medians on uniform random selections.) At 8K, then, dense attention is still faster (MSA: 0.80x); at 32K MSA is 3.1 times, at
128K 11.7 times as fast as dense, index branch and all.

Words used throughout: a QUERY is one (row, group, position); an ENTRY is one (query, slot) pair, i.e. one block that one query
keeps.
"""

import functools
import os

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel is defined

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E): the hardware only has exp2
LN2 = tl.constexpr(0.6931471805599453)
LOW = tl.constexpr(-1.0e30)  # instead of -inf where a difference of two of them would be NaN
BIG = tl.constexpr(3.4028234663852886e38)  # the largest float32
INT_MIN = tl.constexpr(-(2**31))
INT_MAX = tl.constexpr(2**31 - 1)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

WAYS = tl.constexpr(32)  # places in the lists that the backward kernels work on in turns
BUDGET = 2**31  # bytes of temporary results at a time: two such buffers and some lists stay under 4 GB, whatever T is
MAX_SEGMENT = 4096  # block scores that one program ranks in registers
SMALL_CARD = 150_000  # bytes of shared memory below which tiles shrink
FEW = 8  # queries a row up to which the kernels of chapter 6 run
FP8 = torch.float8_e4m3fn
SHARED_MEMORY = None  # bytes of shared memory a program may take; None: ask the device (a test sets 100 KB, as of consumer cards)

# ---------------------------------------------------------------------------------------------------------------------------
# What runs here, and with which tiles


@torch.compiler.assume_constant_result
def _shared_memory():
    if SHARED_MEMORY is not None:
        return SHARED_MEMORY
    if not torch.cuda.is_available():
        return 2**20  # the interpreter has no limit
    return _shared_memory_of(torch.cuda.current_device())


@functools.cache  # asking the driver takes longer than a launch
def _shared_memory_of(device):
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def supported(dtype=None, D=None, Di=None, block_size=None, topk=None, H=None, Hkv=None, fp8=False):
    """None if the kernels can run such a shape, else a short reason; every argument is optional.

    D and Di are head dims, topk the K of ids, H and Hkv the numbers of query and KV heads; fp8: are the index keys stored so?
    """
    if fp8 and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        return "this card has no FP8 products"
    if fp8 and Di is not None and Di < 32:
        return f"index dim {Di} with FP8 is below 32, the least that an FP8 product sums over"
    for name, dim in (("head dim", D), ("index dim", Di)):
        if dim is not None and dim not in (16, 32, 64, 128):
            return f"{name} {dim} is not 16, 32, 64 or 128"
    if dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter multiplies bfloat16 bits as if they were integers"
    if dtype is not None and dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{dtype} is not bfloat16, float16 or float32"
    if block_size is not None and not 16 <= block_size <= 128:
        return f"block_size {block_size} is not in 16..128"
    if topk is not None and not 1 <= topk <= 64:
        return f"topk {topk} is not in 1..64"
    if H is not None and Hkv is not None and (H % Hkv or H // Hkv > 16):
        return f"{H} query heads on {Hkv} KV heads is not 1 to 16 heads a group"
    if dtype == torch.float32 and D is not None and block_size is not None and D * block_size * 16 > _shared_memory():
        return f"float32 blocks of {block_size} x {D} do not fit into this card's shared memory"
    return None


def _tiles(kind, dtype, D, block_size):
    """How a kernel cuts its work: M rows of queries at a time, entries a program, warps, pipeline stages.

    Measured on one H200. Cards with about 100 KB of shared memory (Ada, consumer Ampere and Blackwell) hold the K and V of a
    block (64 KB at the released shape) and little else: fewer rows, one stage. Their tiles were compiled for compute capability
    8.9, never timed.
    """
    if dtype == torch.float32:  # exact products run on the ordinary units, not on the tensor cores: small tiles
        return {"attend": (16, 64, 8, 1), "backward": (16, 256, 8, 1), "kl": (16, 128, 8, 1), "dense": (16, 0, 8, 1)}[kind]
    if _shared_memory() < SMALL_CARD:
        return {"attend": (64, 64, 4, 1), "backward": (32, 256, 8, 1), "kl": (32, 128, 8, 1), "dense": (32, 0, 4, 1)}[kind]
    if D * block_size <= 64 * 64:
        return {"attend": (64, 128, 4, 3), "backward": (64, 256, 4, 2), "kl": (64, 128, 4, 2), "dense": (64, 0, 4, 2)}[kind]
    return {"attend": (64, 64, 4, 1), "backward": (64, 512, 8, 2), "kl": (128, 512, 8, 3), "dense": (64, 0, 8, 2)}[kind]


def _check(named, lens, block_size, shapes):
    """One ValueError that names the argument. named {name: tensor}, queries first; shapes {name: the shape it must have}."""
    first, lead = next(iter(named.items()))
    twin = {"k": "q", "v": "q", "ik": "iq"}  # whose dtype it must have
    for name, x in named.items():
        if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(f"{name} is on the CPU: set TRITON_INTERPRET=1 before triton is imported, or use CUDA")
        if x.device != lead.device:
            raise ValueError(f"{name} is on {x.device} but {first} on {lead.device}")
        if name in shapes and tuple(x.shape) != tuple(shapes[name]):
            raise ValueError(f"{name} must have shape {list(shapes[name])}, not {list(x.shape)}")
        want = {"ids": torch.int32, "lse": torch.float32}.get(name) or named[twin.get(name, name)].dtype
        want = FP8 if name == "ik" and x.dtype == FP8 else want
        if x.dtype != want:
            raise ValueError(f"{name} must be {want}, not {x.dtype}")
    if not 16 <= block_size <= 128:
        raise ValueError(f"block_size must be in 16..128, not {block_size}")
    T, S = lead.shape[1], named["k" if "k" in named else "ik"].shape[1]
    if lens is None and T > S:
        raise ValueError(f"{first} has {T} positions but the keys only {S}: queries are the last T of S")
    if lens is not None and (tuple(lens.shape) != (lead.shape[0],) or lens.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"lens must be an integer tensor of shape [{lead.shape[0]}], not {lens.dtype} {list(lens.shape)}")


def _refuse(why):
    if why is not None:
        raise ValueError(why)


def _on_its_device(operator):
    """Triton launches on the current device, whatever device the tensors are on: make theirs the current one."""

    @functools.wraps(operator)
    def guarded(first, *rest):
        with torch.cuda.device_of(first):
            return operator(first, *rest)

    return guarded


def _lengths(lens, B, S, device):
    if lens is None:
        return torch.full((B,), S, dtype=torch.int32, device=device)
    return lens.to(device, torch.int32).clamp(max=S).contiguous()


def _pow2(n, least=1):
    return max(least, triton.next_power_of_2(n))


# ---------------------------------------------------------------------------------------------------------------------------
# Chapter 1: which blocks a query keeps
#
# Naive: all T x S token scores of every group, 4 x 17e9 of them at 128K: 137 GB written in bf16, read again to take block maxima,
# sorted.
# Idea: (a) softmax keeps order, so rank raw products; (b) a tile of queries walks along the keys and only the maximum of each 128
# products is ever written, 1/128 of the bytes; (c) a sort is not needed to find the K best: a THRESHOLD is, and it can be found
# by bisection.
# Floor: 2 * T * S / 2 * Di * Hkv = 8.8 TFLOP at 128K, 11.2 ms at the measured product rate; the maxima, 1 GB written and read,
# 0.5 ms.
# Predicted: 80% of the product's rate, 14.0 ms. Measured: 16.5 ms (533 TFLOP/s, 68%): two programs of 8 warps on a multiprocessor
# hide most, not all, of the maxima behind the products. A loop of its own for the keys that every query of the tile sees saves
# the masks, more than half of the instructions, and hardly any time: the wait for each product is what counts.
# Top-k: floor 0.3 ms (1.1 GB read once). Predicted 1.6 ms: what limits it are the 3,420 warp instructions that the machine code
# runs for a row of 1,024 (2,110 for one of 512), at the rate at which this GPU issues them. Measured: 1.8 ms for 524,288 rows of up
# to 1,024, a ninth of the scores' time; torch.topk takes 2.3 ms for 65,536 such rows. A version with 5,050 instructions took 2.8,
# and at 1M (two segments of up to 4,096) 209 ms beside 1,059 of scores.


@triton.jit
def _store_best(s, row, j, live, NB, BM: tl.constexpr, NPB: tl.constexpr, BSP: tl.constexpr):
    """Products s [BM,NPB*BSP] of the NPB blocks from number j * NPB on -> their maxima, into the rows [BM] of scores."""
    if NPB == 1:
        tl.store(row + j, tl.max(s, 1), mask=live)
    else:
        block = j * NPB + tl.arange(0, NPB)
        best = tl.max(tl.reshape(s, (BM, NPB, BSP)), 2)  # [BM,NPB]
        tl.store(row[:, None] + block[None, :], best, mask=live[:, None] & (block < NB)[None, :])


@triton.jit
def _to_fp8(x):
    """x [M,Di] -> e4m3, each row stretched so that its largest entry is 448, the largest number there is: that changes no order.

    Rounded to 4 significant bits by hand, because the interpreter's cast forgets the carry (7.9 would become 4).
    """
    x = x.to(tl.float32)
    x = x * (448.0 / tl.maximum(tl.max(tl.abs(x), 1), 1e-30))[:, None]
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return bits.to(tl.float32, bitcast=True).to(tl.float8e4nv)


@triton.jit(do_not_specialize=["t0", "Tc", "T", "S", "NB"])
def score_kernel(iq, ik, iks, lens, scores, t0, Tc, T, S, NB, Hkv: tl.constexpr, Di: tl.constexpr, BS: tl.constexpr,
                 BSP: tl.constexpr, NPB: tl.constexpr, BM: tl.constexpr, QUANT: tl.constexpr):  # fmt: skip
    """scores [B*Hkv,Tc,NB] of the queries t0..t0+Tc: each block's best visible product. One program: BM queries of one group, all
    their blocks.

    NPB blocks of BS keys (padded to BSP columns) are multiplied at a time. Blocks after a tile's last query are left unwritten.
    QUANT: ik is FP8 and iks [B,S] its scales.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries see the most blocks: start with them
    bh = tl.program_id(1)
    b = (bh // Hkv).to(tl.int64)
    r = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, Di)
    c = tl.arange(0, NPB * BSP)
    live = r < Tc
    start = tl.load(lens + b) - T + t0  # position of the chunk's first query
    pos = start + r
    q = tl.load(iq + ((b * T + t0 + r)[:, None] * Hkv + bh % Hkv) * Di + d[None, :], mask=live[:, None], other=0.0)  # [BM,Di]
    if QUANT:
        q = _to_fp8(q)
    first = start + tile * BM
    last = start + tl.minimum(tile * BM + BM, Tc) - 1
    whole = tl.maximum(first + 1, 0) // (BS * NPB)  # steps in which every query sees every key: no mask
    steps = tl.where(last < 0, 0, last // (BS * NPB) + 1)
    real = c % BSP < BS
    n = (c // BSP) * BS + c % BSP  # [NPB*BSP] the key of each column
    keys = ik + b * S * Di + (n * Di)[:, None] + d[None, :]
    row = scores + (bh.to(tl.int64) * Tc + r) * NB
    for j in range(whole):
        at = keys + j * (NPB * BS * Di)
        kk = tl.load(at) if BSP == BS else tl.load(at, mask=real[:, None], other=0.0)  # [NPB*BSP,Di]
        s = tl.dot(q, tl.trans(kk), input_precision="ieee")  # [BM,NPB*BSP]
        if QUANT:
            s *= tl.load(iks + b * S + j * (NPB * BS) + n, mask=real, other=0.0)[None, :]
        if BSP > BS:
            s = tl.where(real[None, :], s, float("-inf"))
        _store_best(s, row, j, live, NB, BM, NPB, BSP)
    for j in range(whole, steps):
        at = j * (NPB * BS) + n
        there = real & (at <= last)
        kk = tl.load(keys + j * (NPB * BS * Di), mask=there[:, None], other=0.0)
        s = tl.dot(q, tl.trans(kk), input_precision="ieee")
        if QUANT:
            s *= tl.load(iks + b * S + at, mask=there, other=0.0)[None, :]
        s = tl.where(real[None, :] & (at[None, :] <= pos[:, None]), s, float("-inf"))
        _store_best(s, row, j, live, NB, BM, NPB, BSP)


@triton.jit(do_not_specialize=["t0", "Tc", "T", "Tout", "tout", "NB", "width"])
def topk_kernel(scores, candidates, lens, ids, t0, Tc, T, Tout, tout, NB, width, Hkv: tl.constexpr, K: tl.constexpr,
                KP: tl.constexpr, BS: tl.constexpr, R: tl.constexpr, N: tl.constexpr, AGAIN: tl.constexpr):  # fmt: skip
    """The K best of at most N blocks, the local one always among them, for R queries a program: a threshold by bisection, then
    compaction.

    Scores become integers that sort the same way. Counting the entries >= a guess costs one add each, and halving the interval
    between a value that K reach and one that fewer reach finds the K-th largest in at most 31 rounds, about 8 in practice because
    the start is close: with the columns dealt into K hands, K different entries reach the worst of the K best of hands. Ties at
    the threshold go to the lower id.

    program_id(2) is a segment of N of the NB columns. With more than one segment their winners are ranked AGAIN, as `candidates`
    [B*Hkv,Tc,width].
    """
    bh = tl.program_id(1)
    seg = tl.program_id(2)
    r = tl.program_id(0) * R + tl.arange(0, R)
    live = r < Tc
    row = bh.to(tl.int64) * Tc + r
    pos = tl.load(lens + bh // Hkv) - T + t0 + r
    local = tl.where(live & (pos >= 0), tl.minimum(pos // BS, NB - 1), -2)
    c = tl.arange(0, N)
    if AGAIN:
        block = tl.load(candidates + row[:, None] * width + c[None, :], mask=live[:, None] & (c < width)[None, :], other=-1)  # [R,N]
        seen = (block >= 0) & (block <= local[:, None])
        n = tl.sum(seen.to(tl.int32), 1)
    else:
        block = (seg * N + c)[None, :]  # [1,N]
        seen = block <= local[:, None]
        n = tl.minimum(tl.maximum(local + 1 - seg * N, 0), N)
    x = tl.load(scores + row[:, None] * NB + block, mask=seen, other=0.0)  # [R,N]
    x = tl.minimum(tl.where(x >= -BIG, x, -BIG), BIG) + 0.0  # NaN ranks lowest: no comparison holds for it. And -0 + 0 is 0
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(seen, bits ^ ((bits >> 31) & INT_MAX), INT_MIN)
    top = tl.max(key, 1)
    hands = tl.max(tl.reshape(key, (R, N // KP, KP)), 1)  # [R,KP] the best of each hand
    few = n <= K  # keep all
    lo = tl.where(few, INT_MIN + 1, tl.maximum(tl.min(hands, 1), INT_MIN + 1))  # [R] at least K reach it, if K are seen
    hi = tl.where(few, INT_MIN + 1, top + 1)  # fewer than K reach it: only the local block may
    key = tl.where(block == local[:, None], INT_MAX, key)
    if K == 1:
        has = tl.max(key, 1) == INT_MAX  # the segment that holds the local block keeps that and the others their best
        lo = tl.where(has, INT_MAX, tl.maximum(top, INT_MIN + 1))
        hi = lo
    going = tl.max((lo < hi - 1).to(tl.int32), 0)
    while going > 0:
        mid = (lo & hi) + ((lo ^ hi) >> 1)  # their mean without overflow
        reach = tl.sum((key >= mid[:, None]).to(tl.int32), 1)
        wide = lo < hi - 1
        hi = tl.where(wide & (reach < K), mid, hi)
        lo = tl.where(wide & (reach >= K), mid, lo)
        hi = tl.where(wide & (reach == K), lo, hi)  # exactly K: done
        going = tl.max((lo < hi - 1).to(tl.int32), 0)
    above = key > lo[:, None]
    tie = key == lo[:, None]
    both = above.to(tl.int32) * 65536 + tie.to(tl.int32)  # two counts in one scan and one sum
    ranks = tl.cumsum(both, 1)
    total = tl.sum(both, 1)
    at = tl.where(above, ranks // 65536, (total // 65536)[:, None] + ranks % 65536) - 1  # [R,N] slot
    out = ids + ((bh.to(tl.int64) * Tout + tout + r) * tl.num_programs(2) + seg)[:, None] * K
    tl.store(out + at, block, mask=(above | tie) & (at < K))
    slot = tl.arange(0, KP)
    rest = live[:, None] & (slot[None, :] >= (total // 65536 + total % 65536)[:, None]) & (slot < K)[None, :]
    tl.store(out + slot[None, :], tl.full([R, KP], -1, tl.int32), mask=rest)


def _rank_tiles(N):
    """Rows a program and warps of topk_kernel for rows of N: those with the fewest instructions a row, counted in sm_90 machine code."""
    return (1, max(2, N // 512)) if N >= 128 else (1024 // N, 4)


@torch.library.custom_op("nanom3::select_blocks", mutates_args=())
@_on_its_device
def _select_blocks(iq: torch.Tensor, ik: torch.Tensor, block_size: int, topk: int, lens: torch.Tensor | None,
                   ik_scale: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    B, T, Hkv, Di = iq.shape
    S = ik.shape[1]
    if 0 < T <= FEW and Hkv * T <= 128:
        return _decode_select(iq, ik, block_size, topk, lens, ik_scale)
    scale = ik if ik_scale is None else ik_scale.contiguous()  # not read if None
    iq, ik, lens = iq.contiguous(), ik.contiguous(), _lengths(lens, B, S, iq.device)
    NB = -(-S // block_size)
    KP = _pow2(topk)
    ids = torch.empty(B, Hkv, T, topk, dtype=torch.int32, device=iq.device)
    BSP = _pow2(block_size, 16)
    small = _shared_memory() < SMALL_CARD or iq.dtype == torch.float32
    BM, NPB = (32, 1) if iq.dtype == torch.float32 else (64 if small else 128, 128 // BSP if BSP == block_size else 1)
    stages = 1 if small else 2 if ik_scale is None else 3  # in FP8 3, and registers for two programs on a multiprocessor
    Tc = min(T, max(128, BUDGET // 2 // (4 * B * Hkv * NB) // 128 * 128))  # queries at a time
    scores = torch.empty(B * Hkv, Tc, NB, dtype=torch.float32, device=iq.device)
    most = -(-NB // MAX_SEGMENT)
    _refuse(f"S = {S} has too many blocks of {block_size}" if most > 1 and most * topk > 16384 else None)
    winners = torch.empty(B * Hkv, Tc, most * topk, dtype=torch.int32, device=iq.device) if most > 1 else ids
    for t0 in range(0, T, Tc):
        n = min(Tc, T - t0)
        score_kernel[(triton.cdiv(n, BM), B * Hkv)](iq, ik, scale, lens, scores, t0, n, T, S, NB, Hkv, Di, block_size, BSP, NPB,
                                                    BM, ik_scale is not None, num_warps=4 if small else 8, num_stages=stages,
                                                    maxnreg=128 if stages == 3 else None)  # fmt: skip
        seen = max(1, -(-(S - T + t0 + n) // block_size))  # early queries see few blocks
        segments = -(-seen // MAX_SEGMENT)
        width, seen = segments * topk, max(KP, _pow2(min(seen, MAX_SEGMENT)))
        R, warps = _rank_tiles(seen)
        out, Tout, tout = (winners, n, 0) if segments > 1 else (ids, T, t0)
        topk_kernel[(triton.cdiv(n, R), B * Hkv, segments)](scores, scores, lens, out, t0, n, T, Tout, tout, NB, 0, Hkv, topk, KP,
                                                            block_size, R, seen, False, num_warps=warps)  # fmt: skip
        if segments > 1:
            W = _pow2(width, KP)
            R, warps = _rank_tiles(W)
            topk_kernel[(triton.cdiv(n, R), B * Hkv, 1)](scores, winners, lens, ids, t0, n, T, T, t0, NB, width, Hkv, topk, KP,
                                                         block_size, R, W, True, num_warps=warps)  # fmt: skip
    return ids


@_select_blocks.register_fake
def _(iq, ik, block_size, topk, lens, ik_scale=None):
    return iq.new_empty(iq.shape[0], iq.shape[2], iq.shape[1], topk, dtype=torch.int32)


def select_blocks(iq, ik, block_size, topk, lens=None):
    """iq [B,T,Hkv,Di], ik [B,S,Di] or msa.quantize's pair (FP8 [B,S,Di], scales [B,S]) -> ids [B,Hkv,T,topk] int32: see
    msa.select_blocks. ValueError names the argument."""
    ik, scale = ik if isinstance(ik, tuple) else (ik, None)
    B, Di = iq.shape[0], iq.shape[3]
    _check({"iq": iq, "ik": ik}, lens, block_size, {"ik": (B, ik.shape[1], Di)})
    _refuse(supported(iq.dtype, Di=Di, block_size=block_size, topk=topk, fp8=scale is not None))
    if (ik.dtype == FP8) != (scale is not None) or (scale is not None and tuple(scale.shape) != tuple(ik.shape[:2])):
        raise ValueError(f"ik in FP8 comes as a pair with its scales [{B}, {ik.shape[1]}], ik in another dtype without")
    return _select_blocks(iq.detach(), ik.detach(), block_size, topk, lens, scale)


# ---------------------------------------------------------------------------------------------------------------------------
# Chapter 2: from "which blocks does a query keep" to "which queries keep this block"
#
# Query-outer attention (each query fetches its 16 blocks) reads 16 x 64 KB of K and V for 16 heads' worth of work: 550 GB through
# L2 at 128K, 67 ms, and every public Triton version sits at that wall. Turned inside out, a program holds ONE block's K and V and
# fetches the queries that keep it: 4 KB a query instead of 64 KB a block. For that the selection is inverted, on the GPU, with no
# wait for the host.
#
# Floor: ids and ranks, 34 MB each at 128K, a few times over: 0.05 ms. The entries need no sorting, counting is enough:
# rank_kernel takes a number at the entry's list (an atomic add returns how many came before), place_kernel writes it there.
# Measured: 0.7 + 0.2 ms at 128K; the atomics. Two sinks that every query keeps are two counters that everybody wants: 2.5 ms.
#
# Lists are padded to whole PROGRAMS of QC entries, -1 after the last, so that the attention kernels need no table: program i
# takes entries i*QC.. and looks up from the first of them which block it serves. Work comes in PIECES (nbg groups of rows x Tp
# queries) that bound the memory, and within a piece in CHUNKS of TC queries with lists of their own, so that the queries a chunk
# fetches stay in L2.


@triton.jit
def _find(x, bg0, t0, Tp, Hkv: tl.constexpr):
    """Query x of a piece -> batch row, group, position in T."""
    bg = bg0 + x // Tp
    return bg // Hkv, bg % Hkv, t0 + x % Tp


@triton.jit
def _spread():
    """This program's number in the lists: WAYS places far apart are worked on in turns. A block that very many queries keep fills many
    programs in a row; if they ran at the same time, all would add to the same rows of its gradient at the same time."""
    i = tl.program_id(0)
    return i % WAYS * (tl.num_programs(0) // WAYS) + i // WAYS


@triton.jit
def _open(mine, e0, ids, lens, bg0, t0, Tp, T, Hkv: tl.constexpr, K: tl.constexpr, BS: tl.constexpr, QC: tl.constexpr):
    """What a program must know of its list, whose first entry is e0: row, group, block, the row's length, how many queries of the
    piece are those of groups before, how many entries there are, and whether one of them does not see the whole block."""
    b, h, first = _find(e0 // K, bg0, t0, Tp, Hkv)
    block = tl.load(ids + ((b * Hkv + h).to(tl.int64) * T + first) * K + e0 % K)
    length = tl.load(lens + b)
    skip = (e0 // K) // Tp * Tp
    listed = tl.load(mine + tl.arange(0, QC))
    many = tl.sum((listed >= 0).to(tl.int32), 0)
    lowest = length - T + t0 + tl.min(tl.where(listed >= 0, listed // K - skip, T), 0)  # the first query's position
    return b, h, block, length, skip, many, block * BS + BS - 1 > lowest


@triton.jit(do_not_specialize=["bg0", "t0", "Tp", "T", "NX", "NB", "TC", "NCT"])
def rank_kernel(ids, lens, counts, rank, bg0, t0, Tp, T, NX, NB, TC, NCT, Hkv: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
                BS: tl.constexpr, QC: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """rank [NX,K]: how many entries came before at the same list, -1 for those that do not count (empty, future, repeated).

    counts must start at QC - 1, so that counts // QC is the number of programs.
    """
    x = tl.program_id(0) * R + tl.arange(0, R)
    s = tl.arange(0, KP)
    b, h, t = _find(x, bg0, t0, Tp, Hkv)
    mine = ids + ((b * Hkv + h).to(tl.int64) * T + t) * K  # [R]
    live = x < NX
    block = tl.load(mine[:, None] + s[None, :], mask=live[:, None] & (s < K)[None, :], other=-1)  # [R,KP]
    pos = tl.load(lens + b, mask=live, other=0) - T + t
    ok = (block >= 0) & (block <= tl.where(pos < 0, -1, pos // BS)[:, None])
    for j in range(K - 1):
        other = tl.load(mine + j, mask=live, other=-1)
        ok = ok & ((block != other[:, None]) | (s <= j)[None, :])
    chain = ((x // Tp) * NCT + (x % Tp) // TC)[:, None] * NB + block
    n = tl.atomic_add(counts + chain, 1, mask=ok, sem="relaxed") - (QC - 1)
    tl.store(rank + x.to(tl.int64)[:, None] * K + s[None, :], tl.where(ok, n, -1), mask=live[:, None] & (s < K)[None, :])


@triton.jit(do_not_specialize=["bg0", "t0", "Tp", "T", "NE", "NB", "TC", "NCT"])
def place_kernel(ids, counts, ends, rank, entries, bg0, t0, Tp, T, NE, NB, TC, NCT, K: tl.constexpr, QC: tl.constexpr,
                 R: tl.constexpr):  # fmt: skip
    """entries[list's start + rank] = entry. `ends` counts programs: the running sum of counts // QC."""
    e = tl.program_id(0) * R + tl.arange(0, R)
    n = tl.load(rank + e, mask=e < NE, other=-1)
    ok = n >= 0
    x = e // K
    block = tl.load(ids + ((bg0 + x // Tp).to(tl.int64) * T + t0 + x % Tp) * K + e % K, mask=ok, other=0)
    chain = ((x // Tp) * NCT + (x % Tp) // TC) * NB + block
    count = tl.load(counts + chain, mask=ok, other=0)
    start = (tl.load(ends + chain, mask=ok, other=0) - count // QC) * QC
    tl.store(entries + start + n, e, mask=ok)


def _pieces(BG, T, bytes_a_query, row):
    """Cut BG * T queries so that a piece's temporary results fit the budget: (bg0, nbg, t0, Tp), whole groups if possible.

    row: numbers between one query and the next in memory. Within a group's piece offsets are 32 bits.
    """
    most = max(128, BUDGET // bytes_a_query)
    longest = min(most, 2**31 // row - 1)
    if longest >= T:
        n = most // T
        return [(bg0, min(n, BG - bg0), 0, T) for bg0 in range(0, BG, n)]
    return [(bg, 1, t0, min(longest, T - t0)) for bg in range(BG) for t0 in range(0, T, longest)]


def _chunk(T, NB, K, bytes_a_query, entries_a_list):
    """Queries whose data stay in L2 while their lists are worked through, but enough that a list is worth fetching a block."""
    return min(T, max(2**24 // bytes_a_query, entries_a_list * NB // K))


def _invert(ids, lens, piece, Hkv, NB, block_size, TC, QC):
    """-> entries [programs * QC] int32 (query * K + slot within the piece, or -1), rank [nbg*Tp*K] int32, programs."""
    bg0, nbg, t0, Tp = piece
    T, K = ids.shape[2:]
    NX, NCT = nbg * Tp, -(-Tp // TC)
    NE, lists = NX * K, nbg * NCT * NB
    counts = torch.full((lists,), QC - 1, dtype=torch.int32, device=ids.device)
    rank = torch.empty(NE, dtype=torch.int32, device=ids.device)
    KP = _pow2(K)
    R = max(1, 1024 // KP)
    rank_kernel[(triton.cdiv(NX, R),)](ids, lens, counts, rank, bg0, t0, Tp, T, NX, NB, TC, NCT, Hkv, K, KP, block_size, QC, R)
    ends = torch.cumsum(counts // QC, 0, dtype=torch.int32)
    programs = triton.cdiv(min(NE, NE // QC + lists), WAYS.value) * WAYS.value  # there cannot be more; those beyond the last find -1 and end at once
    entries = torch.full((programs * QC,), -1, dtype=torch.int32, device=ids.device)
    place_kernel[(triton.cdiv(NE, 1024),)](ids, counts, ends, rank, entries, bg0, t0, Tp, T, NE, NB, TC, NCT, K, QC, 1024)
    return entries, rank, programs


# ---------------------------------------------------------------------------------------------------------------------------
# Chapter 3: attention, forward
#
# A program multiplies M rows (M / G queries x G heads) with its block at a time. Softmax over 16 blocks that 16 programs hold:
# each writes its own normalised output and log-sum-exp for every entry, and combine_kernel takes their weighted mean. No atomics:
# every entry has its place.
#
# Floor: 34 GB of partials written and read again, 16 ms; 8.8 TFLOP, 11.2 ms; 34 GB of Q, out of L2 if it stays there, else 8 ms
# more.
# Measured at 128K: 27 ms + 8.7 ms in combine_kernel (3.95 TB/s, at its floor) + 0.9 ms for the lists = 37 ms. Neither bytes nor
# products explain the 27: three programs of 4 warps on a multiprocessor, which is what K, V and half of Q leave room for, do not
# hide one another's product - softmax - product - store. Tried, whole operator: two stages, and so two programs, 37.3; 128
# entries a program 44.3; in an earlier run 32 entries 44.6 and 8 warps 54.
#
# Why not query-outer, or the union of the blocks that 8 neighbours keep (one K and V fetch for all of them)? The first meets the
# L2 wall of chapter 2 whatever one does, and with G = 2 fills two rows of a 64-row tile. The second is the faster one while
# neighbours agree and T is small (1.6 ms at 8K in a first trial), and falls behind at 128K (44 ms), and far behind when they do
# not agree. This one does not care what is selected, and its lists serve the backward and the KL, too.


@triton.jit(do_not_specialize=["bg0", "t0", "Tp", "T", "S"])
def attend_kernel(q, k, v, ids, lens, entries, partial, plse, bg0, t0, Tp, T, S, scale, Hkv: tl.constexpr, G: tl.constexpr,
                  GP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr, BS: tl.constexpr, BSP: tl.constexpr,
                  QC: tl.constexpr, QT: tl.constexpr):  # fmt: skip
    """One program: up to QC entries of one block -> partial [NE,G,D] and plse [NE,G] (log2). G heads are padded to GP rows.

    HALF: dims of Q fetched at a time, all or half of them.
    """
    mine = entries + tl.program_id(0) * QC
    e0 = tl.load(mine)
    if e0 < 0:
        return
    b, h, block, length, skip, many, edge = _open(mine, e0, ids, lens, bg0, t0, Tp, T, Hkv, K, BS, QC)
    r = tl.arange(0, QT * GP)
    g = r % GP
    d = tl.arange(0, D)
    dh = tl.arange(0, HALF)
    c = tl.arange(0, BSP)
    n = tl.where(c < BS, block * BS + c, INT_MAX)  # INT_MAX: no query stands after it
    there = (n < length)[:, None]
    at = ((b.to(tl.int64) * S + n) * Hkv + h)[:, None] * D
    k0 = tl.load(k + at + dh[None, :], mask=there, other=0.0)  # [BSP,HALF]
    if HALF < D:
        k1 = tl.load(k + at + (dh + HALF)[None, :], mask=there, other=0.0)
    vv = tl.load(v + at + d[None, :], mask=there, other=0.0)  # [BSP,D]
    queries = q + ((b.to(tl.int64) * T + t0) * Hkv + h) * (G * D)  # the first of the piece
    e = tl.load(mine + r // GP)  # [M]
    for i in range(0, many, QT):
        ok = (e >= 0) & (g < G)
        x = e // K - skip
        qq = queries + (x * (Hkv * G * D) + g * D)[:, None] + dh[None, :]
        s = tl.dot(tl.load(qq, mask=ok[:, None], other=0.0), tl.trans(k0), input_precision="ieee")  # [M,BSP]
        if HALF < D:
            s = tl.dot(tl.load(qq + HALF, mask=ok[:, None], other=0.0), tl.trans(k1), s, input_precision="ieee")
        if edge | (BSP > BS):
            s = tl.where(n[None, :] <= (length - T + t0 + x)[:, None], s, LOW)
        m = tl.max(s, 1) * (scale * LOG2E)
        p = tl.exp2(s * (scale * LOG2E) - m[:, None])
        total = tl.sum(p, 1)
        o = tl.dot(p.to(vv.dtype), vv, input_precision="ieee") * (1.0 / total)[:, None]  # [M,D]
        put = e * G + g
        tl.store(partial + (put * D)[:, None] + d[None, :], o.to(partial.dtype.element_ty), mask=ok[:, None])
        tl.store(plse + put, m + tl.log2(total), mask=ok)
        ahead = i + QT + r // GP
        e = tl.load(mine + ahead, mask=ahead < QC, other=-1)


@triton.jit(do_not_specialize=["bg0", "t0", "Tp", "T", "NX"])
def combine_kernel(partial, plse, rank, out, lse, bg0, t0, Tp, T, NX, Hkv: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
                   D: tl.constexpr, K: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """The K partial outputs of a query, weighted by exp(their lse - the common lse). A query without entries gets 0 and -inf."""
    r = tl.arange(0, R * GP)
    x = tl.program_id(0) * R + r // GP  # [R*GP]
    g = r % GP
    d = tl.arange(0, D)
    live = (x < NX) & (g < G)
    b, h, t = _find(x, bg0, t0, Tp, Hkv)
    e = x.to(tl.int64) * K
    m = tl.full([R * GP], LOW, tl.float32)
    total = tl.zeros([R * GP], tl.float32)
    for s in range(K):
        ok = live & (tl.load(rank + e + s, mask=live, other=-1) >= 0)
        z = tl.load(plse + (e + s) * G + g, mask=ok, other=LOW)
        new = tl.maximum(m, z)
        total = total * tl.exp2(m - new) + tl.where(ok, tl.exp2(z - new), 0.0)
        m = new
    acc = tl.zeros([R * GP, D], tl.float32)
    for s in range(K):
        ok = live & (tl.load(rank + e + s, mask=live, other=-1) >= 0)
        z = tl.load(plse + (e + s) * G + g, mask=ok, other=LOW)
        w = tl.where(ok, tl.exp2(z - m) / tl.maximum(total, 1.0), 0.0)  # the largest term alone makes total 1
        o = tl.load(partial + ((e + s) * G + g)[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        acc += w[:, None] * o.to(tl.float32)
    head = h * G + g
    to = (b.to(tl.int64) * T + t) * (Hkv * G) + head
    tl.store(out + to[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=live[:, None])
    some = total > 0
    value = tl.where(some, (m + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))
    tl.store(lse + (b.to(tl.int64) * (Hkv * G) + head) * T + t, value, mask=live)


@torch.library.custom_op("nanom3::sparse_attention", mutates_args=())
@_on_its_device
def _sparse_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor, block_size: int,
                      lens: torch.Tensor | None, scale: float) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    B, T, H, D = q.shape
    S, Hkv, K = k.shape[1], k.shape[2], ids.shape[3]
    if 0 < T <= FEW:
        return _decode_attention(q, k, v, ids, block_size, lens, scale)
    q, k, v, ids, lens = q.contiguous(), k.contiguous(), v.contiguous(), ids.contiguous(), _lengths(lens, B, S, q.device)
    G, GP, BSP, NB = H // Hkv, _pow2(H // Hkv), _pow2(block_size, 16), -(-S // block_size)
    M, QC, warps, stages = _tiles("attend", q.dtype, D, block_size)
    out = torch.empty_like(q)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    pieces = _pieces(B * Hkv, T, K * G * D * q.element_size(), H * D)
    most = max((nbg * Tp for _, nbg, _, Tp in pieces), default=0) * K * G
    partial = torch.empty(most, D, dtype=q.dtype, device=q.device)
    plse = torch.empty(most, dtype=torch.float32, device=q.device)
    TC = _chunk(T, NB, K, G * D * q.element_size(), 128)
    R = max(1, 2048 // (GP * D))
    for piece in pieces:
        bg0, nbg, t0, Tp = piece
        entries, rank, programs = _invert(ids, lens, piece, Hkv, NB, block_size, TC, QC)
        attend_kernel[(programs,)](q, k, v, ids, lens, entries, partial, plse, bg0, t0, Tp, T, S, scale, Hkv, G, GP, D,
                                   min(D, 64), K, block_size, BSP, QC, max(1, M // GP), num_warps=warps, num_stages=stages)  # fmt: skip
        combine_kernel[(triton.cdiv(nbg * Tp, R),)](partial, plse, rank, out, lse, bg0, t0, Tp, T, nbg * Tp, Hkv, G, GP, D, K, R)
    return out, lse


@_sparse_attention.register_fake
def _(q, k, v, ids, block_size, lens, scale):
    B, T, H, _ = q.shape
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(B, H, T, dtype=torch.float32)


# ---------------------------------------------------------------------------------------------------------------------------
# Chapter 4: attention, backward
#
# The same lists, the same walk. With P = exp(S - lse) recomputed from q and k and delta = sum(out * dout):
#   dV += P^T dO     dP = dO V^T     dS = P * (dP - delta)     dK += dS^T Q     dQ = dS K
# five products instead of two. dK and dV gather in registers over a program's entries and are then added, in fp32, to the block's
# rows (several programs may serve one block: the order of these additions, and so their last bits, can change from run to run;
# everything else is deterministic). dQ comes as one partial per entry, summed by sum_kernel.
#
# Floor at 128K: 22 TFLOP, 28 ms; the dQ partials 16 ms, beside it. Measured with 1,024 entries a program: 66 ms + sum 8.6 (4.1
# TB/s) + delta 1 + lists 1.5 + casts 0.4 = 78 ms; with 512, as it now stands, 75.4 where 1,024 took 77.1. dK, dV and two [128,64]
# tiles fill the registers of 8 warps, so that one program has a multiprocessor to itself and its five products wait for each other.
# Tried in an earlier run: one stage 84; 4 warps (spills) and M = 32 lost by far.


@triton.jit(do_not_specialize=["T", "NR"])
def delta_kernel(out, dout, lse, delta, lse2, T, NR, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """delta [B*T*H] = sum over D of out * dout; lse2 is lse in that order, times log2(e)."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.arange(0, D)
    live = r < NR
    o = tl.load(out + r[:, None] * D + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    do = tl.load(dout + r[:, None] * D + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    tl.store(delta + r, tl.sum(o * do, 1), mask=live)
    x = r // H
    z = tl.load(lse + (x // T * H + r % H) * T + x % T, mask=live, other=0.0)
    tl.store(lse2 + r, z * LOG2E, mask=live)


@triton.jit(do_not_specialize=["bg0", "t0", "Tp", "T", "S", "dbg"])
def attend_backward_kernel(q, k, v, do, lse2, delta, ids, lens, entries, dq, dk, dv, bg0, t0, Tp, T, S, dbg, scale,
                           Hkv: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
                           BS: tl.constexpr, BSP: tl.constexpr, QC: tl.constexpr, QT: tl.constexpr):  # fmt: skip
    """One program: up to QC entries of one block -> dq [NE,G,D] partials; adds to dk and dv [groups from dbg on,S,D] fp32."""
    mine = entries + _spread() * QC
    e0 = tl.load(mine)
    if e0 < 0:
        return
    b, h, block, length, skip, many, edge = _open(mine, e0, ids, lens, bg0, t0, Tp, T, Hkv, K, BS, QC)
    r = tl.arange(0, QT * GP)
    g = r % GP
    d = tl.arange(0, D)
    c = tl.arange(0, BSP)
    n = tl.where(c < BS, block * BS + c, INT_MAX)
    at = ((b.to(tl.int64) * S + n) * Hkv + h)[:, None] * D + d[None, :]
    kk = tl.load(k + at, mask=(n < length)[:, None], other=0.0)  # [BSP,D]
    vv = tl.load(v + at, mask=(n < length)[:, None], other=0.0)
    gk = tl.zeros([BSP, D], tl.float32)
    gv = tl.zeros([BSP, D], tl.float32)
    row0 = ((b.to(tl.int64) * T + t0) * Hkv + h) * G  # of the piece's first query, its first head
    e = tl.load(mine + r // GP)  # [M]
    for i in range(0, many, QT):
        ok = (e >= 0) & (g < G)
        x = e // K - skip
        row = x * (Hkv * G) + g
        qq = tl.load(q + row0 * D + (row * D)[:, None] + d[None, :], mask=ok[:, None], other=0.0)  # [M,D]
        gg = tl.load(do + row0 * D + (row * D)[:, None] + d[None, :], mask=ok[:, None], other=0.0)
        ll = tl.load(lse2 + row0 + row, mask=ok, other=0.0)
        dd = tl.load(delta + row0 + row, mask=ok, other=0.0)
        s = tl.dot(kk, tl.trans(qq), input_precision="ieee") * (scale * LOG2E)  # [BSP,M]
        if edge | (BSP > BS):
            s = tl.where(n[:, None] <= (length - T + t0 + x)[None, :], s, LOW)
        p = tl.exp2(s - ll[None, :])  # 1 in the columns without an entry: their q and do are 0, and so is all that p reaches
        gv = tl.dot(p.to(gg.dtype), gg, gv, input_precision="ieee")
        dp = tl.dot(vv, tl.trans(gg), input_precision="ieee")
        ds = (p * (dp - dd[None, :])).to(qq.dtype)
        gk = tl.dot(ds, qq, gk, input_precision="ieee")
        gq = tl.dot(tl.trans(ds), kk, input_precision="ieee")  # [M,D]
        put = (e * G + g) * D
        tl.store(dq + put[:, None] + d[None, :], gq.to(dq.dtype.element_ty), mask=ok[:, None])
        ahead = i + QT + r // GP
        e = tl.load(mine + ahead, mask=ahead < QC, other=-1)
    to = ((b * Hkv + h - dbg).to(tl.int64) * S + n)[:, None] * D + d[None, :]
    tl.atomic_add(dk + to, gk * scale, mask=(n < length)[:, None], sem="relaxed")
    tl.atomic_add(dv + to, gv, mask=(n < length)[:, None], sem="relaxed")


@triton.jit(do_not_specialize=["bg0", "t0", "Tp", "T", "NX"])
def sum_kernel(partial, rank, out, bg0, t0, Tp, T, NX, scale, Hkv: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
               D: tl.constexpr, K: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """out [B,T,Hkv*G,D] = scale * the sum of a query's partial results [NE,G,D]."""
    r = tl.arange(0, R * GP)
    x = tl.program_id(0) * R + r // GP
    g = r % GP
    d = tl.arange(0, D)
    live = (x < NX) & (g < G)
    b, h, t = _find(x, bg0, t0, Tp, Hkv)
    e = x.to(tl.int64) * K
    acc = tl.zeros([R * GP, D], tl.float32)
    for s in range(K):
        ok = live & (tl.load(rank + e + s, mask=live, other=-1) >= 0)
        acc += tl.load(partial + ((e + s) * G + g)[:, None] * D + d[None, :], mask=ok[:, None], other=0.0).to(tl.float32)
    to = (b.to(tl.int64) * T + t) * (Hkv * G) + h * G + g
    tl.store(out + to[:, None] * D + d[None, :], (acc * scale).to(out.dtype.element_ty), mask=live[:, None])


@torch.library.custom_op("nanom3::sparse_attention_backward", mutates_args=())
@_on_its_device
def _sparse_attention_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                               lse: torch.Tensor, ids: torch.Tensor, block_size: int, lens: torch.Tensor | None,
                               scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    B, T, H, D = q.shape
    S, Hkv, K = k.shape[1], k.shape[2], ids.shape[3]
    q, k, v, ids, lens = q.contiguous(), k.contiguous(), v.contiguous(), ids.contiguous(), _lengths(lens, B, S, q.device)
    dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
    G, GP, BSP, NB = H // Hkv, _pow2(H // Hkv), _pow2(block_size, 16), -(-S // block_size)
    M, QC, warps, stages = _tiles("backward", q.dtype, D, block_size)
    delta, lse2 = torch.empty(B * T * H, device=q.device), torch.empty(B * T * H, device=q.device)
    rows = max(1, 4096 // D)
    if B * T * H:
        delta_kernel[(triton.cdiv(B * T * H, rows),)](out, dout, lse, delta, lse2, T, B * T * H, H, D, rows)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    BG = B * Hkv
    nbg = max(1, min(BG, BUDGET // 4 // max(1, 2 * 4 * S * D)))  # groups whose dK and dV stand in fp32 at a time
    size = K * G * D * q.element_size()
    pieces = [[(bg0 + p[0], *p[1:]) for p in _pieces(min(nbg, BG - bg0), T, size, H * D)] for bg0 in range(0, BG, nbg)]
    most = max((p[1] * p[3] for run in pieces for p in run), default=0) * K * G
    partial = torch.empty(most, D, dtype=q.dtype, device=q.device)
    TC = _chunk(T, NB, K, 2 * G * D * q.element_size(), QC)
    R = max(1, 2048 // (GP * D))
    for run in pieces:
        dbg = run[0][0]
        ng = min(nbg, BG - dbg)
        sums = torch.zeros(2, ng, S, D, dtype=torch.float32, device=q.device)
        for piece in run:
            bg0, n, t0, Tp = piece
            entries, rank, programs = _invert(ids, lens, piece, Hkv, NB, block_size, TC, QC)
            attend_backward_kernel[(programs,)](q, k, v, dout, lse2, delta, ids, lens, entries, partial, sums[0], sums[1], bg0,
                                                t0, Tp, T, S, dbg, scale, Hkv, G, GP, D, K, block_size, BSP, QC, max(1, M // GP),
                                                num_warps=warps, num_stages=stages)  # fmt: skip
            sum_kernel[(triton.cdiv(n * Tp, R),)](partial, rank, dq, bg0, t0, Tp, T, n * Tp, scale, Hkv, G, GP, D, K, R)
        for grad, total in ((dk, sums[0]), (dv, sums[1])):
            if ng == BG:
                grad.copy_(total.view(B, Hkv, S, D).transpose(1, 2))
            else:
                for i in range(ng):
                    grad[(dbg + i) // Hkv, :, (dbg + i) % Hkv] = total[i]
    return dq, dk, dv


@_sparse_attention_backward.register_fake
def _(dout, q, k, v, out, lse, ids, block_size, lens, scale):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save_attention(ctx, inputs, output):
    q, k, v, ids, block_size, lens, scale = inputs
    ctx.save_for_backward(q, k, v, ids, lens, *output)
    ctx.block_size, ctx.scale = block_size, scale


def _attention_gradients(ctx, dout, _dlse):
    q, k, v, ids, lens, out, lse = ctx.saved_tensors
    dq, dk, dv = _sparse_attention_backward(dout, q, k, v, out, lse, ids, ctx.block_size, lens, ctx.scale)
    return dq, dk, dv, None, None, None, None


_sparse_attention.register_autograd(_attention_gradients, setup_context=_save_attention)


def sparse_attention(q, k, v, ids, block_size, lens=None, scale=None):
    """q [B,T,H,D], k and v [B,S,Hkv,D], ids [B,Hkv,T,K] int32 -> out [B,T,H,D], lse [B,H,T]: see msa.sparse_attention.

    ValueError names the argument that is wrong. lse carries no gradient.
    """
    B, T, H, D = q.shape
    S, Hkv = k.shape[1], k.shape[2]
    shapes = {"k": (B, S, Hkv, D), "v": (B, S, Hkv, D), "ids": (B, Hkv, T, ids.shape[-1])}
    _check({"q": q, "k": k, "v": v, "ids": ids}, lens, block_size, shapes)
    _refuse(supported(q.dtype, D, None, block_size, ids.shape[3], H, Hkv))
    _refuse(f"scale must be positive, not {scale}" if scale is not None and not scale > 0 else None)
    out, lse = _sparse_attention(q, k, v, ids, block_size, lens, D**-0.5 if scale is None else float(scale))
    return out, lse.detach()


# ---------------------------------------------------------------------------------------------------------------------------
# Chapter 5: how the index branch learns
#
# Over a query's kept tokens: teacher p = mean over G heads of exp(scale * q_h . k - lse_h), student = softmax of z = iq . ik /
# sqrt(Di), loss = sum p (log p - z) + lse_z, d loss / d z = student - p. Naive: both distributions, 8.4 million entries x 128
# tokens, in memory.
# Idea: a program has the block's K and index keys at hand. 64 queries at a time it adds up the teacher's heads in one [64,128]
# tile of registers, and the loss AND both gradients follow from that tile at once: the heads' products, which are nearly all the
# work, are done once for the forward and the backward together. Only the student's lse must be known before, from a pass with one
# product (student_kernel).
# Floor: (G + 1 + 1 + 2) products a tile against 2 G in attention's forward; 16 heads: 5.5 TFLOP at 128K, 7.0 ms at the product's
# rate.
# Measured: 23 ms, of which kl_kernel 20 and student_kernel 1.2. 8 warps have a multiprocessor to themselves here, too, and each of
# the 16 products waits for its exponentials. Tried: 256 entries a program 24.7; in an earlier run 64 queries a tile 27.8, 4
# warps 33.5. Where all queries keep the same two sinks it took 41 ms until _spread kept the programs that run at the same time from
# adding to the same rows of dik: 21.6.


@triton.jit
def _rows(first, x, ok, stride: tl.constexpr, N: tl.constexpr):
    """Rows x [QT] of N numbers, `stride` apart, from `first` on -> [QT,N]; zeros where not ok."""
    return tl.load(first + (x * stride)[:, None] + tl.arange(0, N)[None, :], mask=ok[:, None], other=0.0)


@triton.jit(do_not_specialize=["bg0", "t0", "Tp", "T", "S"])
def student_kernel(iq, ik, ids, lens, entries, each, bg0, t0, Tp, T, S, zscale, Hkv: tl.constexpr, Di: tl.constexpr,
                   K: tl.constexpr, BS: tl.constexpr, BSP: tl.constexpr, QC: tl.constexpr, QT: tl.constexpr):  # fmt: skip
    """each [NE]: the log-sum-exp of the student's logits over the visible tokens of each entry."""
    mine = entries + tl.program_id(0) * QC
    e0 = tl.load(mine)
    if e0 < 0:
        return
    b, h, block, length, skip, many, _ = _open(mine, e0, ids, lens, bg0, t0, Tp, T, Hkv, K, BS, QC)
    c = tl.arange(0, BSP)
    n = tl.where(c < BS, block * BS + c, INT_MAX)
    kk = _rows(ik, b.to(tl.int64) * S + n, n < length, Di, Di)  # [BSP,Di]
    queries = iq + ((b.to(tl.int64) * T + t0) * Hkv + h) * Di
    for i in range(0, many, QT):
        slot = i + tl.arange(0, QT)
        e = tl.load(mine + slot, mask=slot < many, other=-1)  # [QT]
        x = e // K - skip
        z = tl.dot(_rows(queries, x, e >= 0, Hkv * Di, Di), tl.trans(kk), input_precision="ieee") * (zscale * LOG2E)  # [QT,BSP]
        z = tl.where(n[None, :] <= (length - T + t0 + x)[:, None], z, LOW)
        m = tl.max(z, 1)
        tl.store(each + e, (m + tl.log2(tl.sum(tl.exp2(z - m[:, None]), 1))) * LN2, mask=e >= 0)


@triton.jit(do_not_specialize=["NX"])
def student_merge_kernel(each, rank, zlse, count, NX, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr):
    """zlse [NX]: log-sum-exp over a query's entries in each [NX,K]. The number of queries that have entries is added to count."""
    x = tl.program_id(0) * R + tl.arange(0, R)
    s = tl.arange(0, KP)
    at = x.to(tl.int64)[:, None] * K + s[None, :]  # [R,KP]
    ok = tl.load(rank + at, mask=(x < NX)[:, None] & (s < K)[None, :], other=-1) >= 0
    z = tl.load(each + at, mask=ok, other=LOW)
    m = tl.max(z, 1)
    total = tl.sum(tl.where(ok, tl.exp2((z - m[:, None]) * LOG2E), 0.0), 1)
    tl.store(zlse + x, m + tl.log2(tl.maximum(total, 1.0)) * LN2, mask=x < NX)
    tl.atomic_add(count, tl.sum((total > 0).to(tl.int32), 0), sem="relaxed")


@triton.jit
def _teacher(queries, lse, k_tile, x, ok, edge, scale, Hkv: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """The mean over the group's heads of their attention to the keys of k_tile [N,D]: [QT,N]. queries and lse: where row 0 of x
    [QT] has its first head's numbers. Only past the edge of what is visible can a product exceed the log-sum-exp."""
    p = tl.zeros([x.shape[0], k_tile.shape[0]], tl.float32)
    for g in range(G):
        qq = _rows(queries + g * D, x, ok, Hkv * G * D, D)  # [QT,D]
        s = tl.dot(qq, tl.trans(k_tile), input_precision="ieee") * (scale * LOG2E)
        s -= tl.load(lse + x * (Hkv * G) + g, mask=ok, other=0.0)[:, None] * LOG2E
        if edge:
            s = tl.minimum(s, 0.0)
        p += tl.exp2(s)
    return p * (1.0 / G)


@triton.jit
def _imitate(p, z):
    """Teacher p and the student's logits less their log-sum-exp, both [QT,N] -> the loss of each query [QT], and d loss / d z."""
    least = tl.maximum(p, 1e-37)  # a normal number, for the hardware's own logarithm: one instruction where tl.log2 takes twenty
    logp = (tl.log2(least) if INTERPRETED else libdevice.fast_log2f(least)) * LN2
    return tl.sum(tl.where(p > 0, p * (logp - z), 0.0), 1), tl.exp2(z * LOG2E) - p


@triton.jit(do_not_specialize=["bg0", "t0", "Tp", "T", "S"])
def kl_kernel(q, k, lse, iq, ik, ids, lens, entries, zlse, loss, diq, dik, bg0, t0, Tp, T, S, scale, zscale, Hkv: tl.constexpr,
              G: tl.constexpr, D: tl.constexpr, Di: tl.constexpr, K: tl.constexpr, BS: tl.constexpr, BSP: tl.constexpr,
              QC: tl.constexpr, QT: tl.constexpr, HOLD: tl.constexpr):  # fmt: skip
    """One program: up to QC entries of one block -> loss [NE] and diq [NE,Di] partials; dik [B,S,Di] fp32 is added to.

    lse [B,T,H] is the main branch's, zlse [NE // K] the student's over its whole support. Gradients are those of the SUM of all
    KLs. HOLD keeps the block's index keys in shared memory beside its K; else they are fetched again for every tile.
    """
    mine = entries + _spread() * QC
    e0 = tl.load(mine)
    if e0 < 0:
        return
    b, h, block, length, skip, many, edge = _open(mine, e0, ids, lens, bg0, t0, Tp, T, Hkv, K, BS, QC)
    edge = edge | (BSP > BS)
    di = tl.arange(0, Di)
    c = tl.arange(0, BSP)
    n = tl.where(c < BS, block * BS + c, INT_MAX)
    at = b.to(tl.int64) * S + n
    kk = _rows(k + h * D, at, n < length, Hkv * D, D)  # [BSP,D]
    ii = _rows(ik, at, n < length, Di, Di)  # [BSP,Di]
    gi = tl.zeros([BSP, Di], tl.float32)
    row0 = (b.to(tl.int64) * T + t0) * Hkv + h  # the piece's first query
    for i in range(0, many, QT):
        slot = i + tl.arange(0, QT)
        e = tl.load(mine + slot, mask=slot < many, other=-1)  # [QT]
        ok = e >= 0
        x = e // K - skip
        p = _teacher(q + row0 * (G * D), lse + row0 * G, kk, x, ok, edge, scale, Hkv, G, D)  # [QT,BSP]
        if not HOLD:
            ii = _rows(ik, at, n < length, Di, Di)
        qq = _rows(iq + row0 * Di, x, ok, Hkv * Di, Di)  # [QT,Di]
        zl = tl.load(zlse + e // K, mask=ok, other=0.0)
        z = tl.dot(qq, tl.trans(ii), input_precision="ieee") * zscale - zl[:, None]  # [QT,BSP] log student
        if edge:
            seen = n[None, :] <= (length - T + t0 + x)[:, None]
            p, z = tl.where(seen, p, 0.0), tl.where(seen, z, LOW)
        cost, dz = _imitate(p, z)
        tl.store(loss + e, cost, mask=ok)
        dz = dz.to(qq.dtype)
        gq = tl.dot(dz, ii, input_precision="ieee")  # [QT,Di]
        tl.store(diq + (e * Di)[:, None] + di[None, :], gq.to(diq.dtype.element_ty), mask=ok[:, None])
        gi = tl.dot(tl.trans(dz), qq, gi, input_precision="ieee")
    tl.atomic_add(dik + at[:, None] * Di + di[None, :], gi * zscale, mask=(n < length)[:, None], sem="relaxed")


@triton.jit(do_not_specialize=["T", "S"])
def kl_dense_kernel(q, k, lse, iq, ik, lens, loss, diq, dik, T, S, scale, zscale, Hkv: tl.constexpr, G: tl.constexpr,
                    D: tl.constexpr, Di: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """The warm-up's loss: the support is everything visible. One program: BM queries of one group, all keys, twice (lse first).

    loss [B*Hkv,T], diq [B,T,Hkv,Di]; dik [B,S,Di] fp32 is added to.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // Hkv
    h = bh % Hkv
    length = tl.load(lens + b)
    t = tile * BM + tl.arange(0, BM)
    pos = length - T + t
    ok = (t < T) & (pos >= 0)
    end = tl.minimum(length, length - T + tile * BM + BM)  # keys that the last query sees
    di = tl.arange(0, Di)
    c = tl.arange(0, BN)
    row0 = b.to(tl.int64) * T * Hkv + h
    x = t.to(tl.int64)
    qq = _rows(iq + row0 * Di, x, ok, Hkv * Di, Di)  # [BM,Di]
    m = tl.full([BM], LOW, tl.float32)
    total = tl.zeros([BM], tl.float32)
    for j in range(0, end, BN):
        n = j + c
        ii = _rows(ik, b.to(tl.int64) * S + n, n < length, Di, Di)
        z = tl.dot(qq, tl.trans(ii), input_precision="ieee") * (zscale * LOG2E)
        z = tl.where(n[None, :] <= pos[:, None], z, LOW)
        new = tl.maximum(m, tl.max(z, 1))
        total = total * tl.exp2(m - new) + tl.sum(tl.exp2(z - new[:, None]), 1)
        m = new
    zl = (m + tl.log2(tl.where(total > 0, total, 1.0))) * LN2
    cost = tl.zeros([BM], tl.float32)
    gq = tl.zeros([BM, Di], tl.float32)
    for j in range(0, end, BN):
        n = j + c
        at = b.to(tl.int64) * S + n
        kk, ii = _rows(k + h * D, at, n < length, Hkv * D, D), _rows(ik, at, n < length, Di, Di)
        p = _teacher(q + row0 * (G * D), lse + row0 * G, kk, x, ok, True, scale, Hkv, G, D)
        z = tl.dot(qq, tl.trans(ii), input_precision="ieee") * zscale - zl[:, None]
        seen = (n[None, :] <= pos[:, None]) & ok[:, None]
        more, dz = _imitate(tl.where(seen, p, 0.0), tl.where(seen, z, LOW))
        cost += more
        dz = dz.to(qq.dtype)
        gq = tl.dot(dz, ii, gq, input_precision="ieee")
        gi = tl.dot(tl.trans(dz), qq, input_precision="ieee") * zscale
        tl.atomic_add(dik + at[:, None] * Di + di[None, :], gi, mask=(n < end)[:, None], sem="relaxed")
    tl.store(loss + bh.to(tl.int64) * T + t, cost, mask=t < T)
    put = ((b.to(tl.int64) * T + t) * Hkv + h)[:, None] * Di + di[None, :]
    tl.store(diq + put, (gq * zscale).to(diq.dtype.element_ty), mask=(t < T)[:, None])


@torch.library.custom_op("nanom3::index_kl", mutates_args=())
@_on_its_device
def _index_kl(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, iq: torch.Tensor, ik: torch.Tensor, ids: torch.Tensor | None,
              block_size: int, lens: torch.Tensor | None, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor,
              torch.Tensor]:  # fmt: skip
    """-> loss [], 1 / count [], and the gradients of count * loss by iq and ik."""
    B, T, H, D = q.shape
    S, Hkv, Di = k.shape[1], k.shape[2], ik.shape[2]
    G, zscale, device = H // Hkv, Di**-0.5, q.device
    q, k, iq, ik, lens = q.contiguous(), k.contiguous(), iq.contiguous(), ik.contiguous(), _lengths(lens, B, S, device)
    lse = lse.transpose(1, 2).contiguous()  # [B,T,H]
    diq = torch.empty_like(iq)
    dik = torch.zeros(B, S, Di, dtype=torch.float32, device=device)
    if ids is None:
        M, _, warps, stages = _tiles("dense", q.dtype, max(D, Di), 64)
        loss = torch.empty(B * Hkv, T, dtype=torch.float32, device=device)
        if loss.numel():
            N = 64 if M > 16 else 32  # keys at a time
            kl_dense_kernel[(triton.cdiv(T, M), B * Hkv)](q, k, lse, iq, ik, lens, loss, diq, dik, T, S, scale, zscale, Hkv, G, D,
                                                          Di, M, N, num_warps=warps, num_stages=stages)  # fmt: skip
        total, count = loss.sum(), lens.clamp(0, T).sum() * Hkv
    else:
        ids, K = ids.contiguous(), ids.shape[3]
        BSP, NB = _pow2(block_size, 16), -(-S // block_size)
        M, QC, warps, stages = _tiles("kl", q.dtype, max(D, Di), block_size)
        total, count = 0.0, torch.zeros((), dtype=torch.int32, device=device)
        pieces = _pieces(B * Hkv, T, K * (Di * q.element_size() + 16), max(H * D, Hkv * Di))
        partial = torch.empty(max((p[1] * p[3] for p in pieces), default=0) * K, Di, dtype=q.dtype, device=device)
        TC = _chunk(T, NB, K, G * D * q.element_size(), QC)
        R = max(1, 2048 // Di)
        for piece in pieces:
            bg0, nbg, t0, Tp = piece
            entries, rank, programs = _invert(ids, lens, piece, Hkv, NB, block_size, TC, QC)
            each, loss = torch.empty(nbg * Tp, K, device=device), torch.zeros(nbg * Tp, K, device=device)
            student_kernel[(programs,)](iq, ik, ids, lens, entries, each, bg0, t0, Tp, T, S, zscale, Hkv, Di, K, block_size, BSP,
                                        QC, M, num_warps=warps, num_stages=stages)  # fmt: skip
            zlse = torch.empty(nbg * Tp, device=device)
            rows = max(1, 1024 // _pow2(K))
            student_merge_kernel[(triton.cdiv(nbg * Tp, rows),)](each, rank, zlse, count, nbg * Tp, K, _pow2(K), rows)
            kl_kernel[(programs,)](q, k, lse, iq, ik, ids, lens, entries, zlse, loss, partial, dik, bg0, t0, Tp, T, S, scale,
                                   zscale, Hkv, G, D, Di, K, block_size, BSP, QC, M, _shared_memory() >= SMALL_CARD,
                                   num_warps=warps, num_stages=stages)  # fmt: skip
            total = total + loss.sum()
            sum_kernel[(triton.cdiv(nbg * Tp, R),)](partial, rank, diq, bg0, t0, Tp, T, nbg * Tp, zscale, Hkv, 1, 1, Di, K, R)
    inverse = 1.0 / count.clamp(min=1).float()
    return total * inverse, inverse, diq, dik.to(ik.dtype)


@_index_kl.register_fake
def _(q, k, lse, iq, ik, ids, block_size, lens, scale):
    one = q.new_empty((), dtype=torch.float32)
    same = {"memory_format": torch.contiguous_format}
    return one, torch.empty_like(one), torch.empty_like(iq, **same), torch.empty_like(ik, **same)


def _save_kl(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])


def _kl_gradients(ctx, dloss, _1, _2, _3):
    inverse, diq, dik = ctx.saved_tensors
    return None, None, None, diq * (dloss * inverse), dik * (dloss * inverse), None, None, None, None


_index_kl.register_autograd(_kl_gradients, setup_context=_save_kl)


def index_kl(q, k, lse, iq, ik, ids, block_size, lens=None, scale=None):
    """The index branch's loss, a scalar with gradients for iq and ik only: see msa.index_kl. ids None: everything visible, lse
    then dense attention's.

    q [B,T,H,D], k [B,S,Hkv,D], lse [B,H,T], iq [B,T,Hkv,Di], ik [B,S,Di], ids [B,Hkv,T,K]. ValueError names a bad argument.
    """
    B, T, H, D = q.shape
    S, Hkv, Di = k.shape[1], k.shape[2], ik.shape[2]
    named = {"q": q, "k": k, "lse": lse, "iq": iq, "ik": ik, **({} if ids is None else {"ids": ids})}
    shapes = {"k": (B, S, Hkv, D), "lse": (B, H, T), "iq": (B, T, Hkv, Di), "ik": (B, S, Di)}
    if ids is not None:
        shapes["ids"] = (B, Hkv, T, ids.shape[-1])
    _check(named, lens, block_size, shapes)
    if iq.dtype != q.dtype:  # the products need one dtype; autograd casts the gradients back
        iq, ik = iq.to(q.dtype), ik.to(q.dtype)
    _refuse(supported(q.dtype, D, Di, block_size, None if ids is None else ids.shape[3], H, Hkv))
    scale = D**-0.5 if scale is None else float(scale)
    return _index_kl(q.detach(), k.detach(), lse.detach(), iq, ik, ids, block_size, lens, scale)[0]


# ---------------------------------------------------------------------------------------------------------------------------
# Chapter 6: decoding
#
# One new token a row (or up to 8, of which some are guesses): almost no products, all bytes. At 1M keys a dense layer reads 2.1 GB
# of K and V, 0.5 ms. MSA reads 268 MB of index keys, and of K and V 1 MB a group: 65 us, if nothing is read twice and nothing
# waits. Three rules follow.
# (a) The index key head is shared: a program fetches a block's index keys ONCE and multiplies them with the index queries of all
#     groups and all T tokens together (4 x 1 rows, padded to the 16 that a tensor core takes). Each group by itself, as in
#     chapter 1, would read them four times.
# (b) Split-K: one query must keep a whole GPU busy, so its keys are dealt out to many programs. Attention's splits each write a
#     partial output and its log-sum-exp, a second kernel takes their weighted mean.
# (c) Few launches, none of which depends on what is in the GPU's memory: grids follow from B, T, K and the cache's capacity,
#     programs beyond a row's length end at once, the host never waits. So a whole step can be recorded as one CUDA graph.
# FP8 index keys (msa.quantize) halve the bytes: 138 MB with their scales.
#
# Floors at 1M, batch 1: index keys 64 us at 4.2 TB/s, in FP8 33 us; the kept K and V 1 us. Predicted: index scan 72 us (90% of the
# copy rate), in FP8 38 us; the top-k of 4 rows of 8,192 and the two attention kernels wait for latency, not bytes: 6 us and 10 us.
# Measured (results/longcontext.json): index scan 63 us, in FP8 39; top-k 15 us, more than twice the guess: four programs, each
# alone with 8,192 numbers; attention and merge 6 us. In a graph the whole step takes 88 us (FP8 63) where cuDNN's dense one takes
# 474, and for 8 rows 512 (FP8 297) against 3,713. Since then such rows are cut into eight (5 us, as measured for rows of 1,024) and
# their winners ranked again (4 us): 10 us expected, not yet timed.


@triton.jit(do_not_specialize=["S", "NB"])
def decode_score_kernel(iq, ik, iks, lens, scores, S, NB, T: tl.constexpr, Hkv: tl.constexpr, Di: tl.constexpr, BS: tl.constexpr,
                        BSP: tl.constexpr, MP: tl.constexpr, RUN: tl.constexpr, QUANT: tl.constexpr):  # fmt: skip
    """scores [B,Hkv,T,NB]. One program: RUN blocks of one row against all its Hkv * T index queries (padded to MP)."""
    b = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * RUN
    length = tl.minimum(tl.load(lens + b), S)
    if first * BS >= length:
        return
    m = tl.arange(0, MP)
    h = m // T
    t = m % T
    d = tl.arange(0, Di)
    c = tl.arange(0, BSP)
    live = m < Hkv * T
    q = tl.load(iq + ((b * T + t) * Hkv + h)[:, None] * Di + d[None, :], mask=live[:, None], other=0.0)  # [MP,Di]
    if QUANT:
        q = _to_fp8(q)
    to = scores + ((b * Hkv + h) * T + t) * NB
    for j in range(first, tl.minimum(first + RUN, (length + BS - 1) // BS)):
        n = tl.where(c < BS, j * BS + c, INT_MAX)
        kk = tl.load(ik + (b * S + n)[:, None] * Di + d[None, :], mask=(n < length)[:, None], other=0.0)  # [BSP,Di]
        if QUANT:
            stretch = tl.load(iks + b * S + n, mask=n < length, other=0.0)
        s = tl.dot(q, tl.trans(kk), input_precision="ieee")  # [MP,BSP]
        if QUANT:
            s *= stretch[None, :]
        s = tl.where(n[None, :] <= (length - T + t)[:, None], s, float("-inf"))
        tl.store(to + j, tl.max(s, 1), mask=live)


def decode_topk(scores, lens, block_size, topk):
    """scores [B,Hkv,T,NB] of blocks, lens [B] int32 -> ids [B,Hkv,T,topk]. One launch up to 4,096 blocks, two beyond."""
    B, Hkv, T, NB = scores.shape
    KP = _pow2(topk)
    most = MAX_SEGMENT if NB <= MAX_SEGMENT else min(1024, MAX_SEGMENT)  # few rows: for a long one, many programs
    segments, width = -(-NB // most), -(-NB // most) * topk
    _refuse(f"{NB} blocks are too many" if segments > 1 and width > 16384 else None)
    ids = torch.empty(B, Hkv, T, topk, dtype=torch.int32, device=scores.device)
    winners = torch.empty(B, Hkv, T, width, dtype=torch.int32, device=scores.device) if segments > 1 else ids
    passes = [(scores, winners, segments, 0, min(NB, most), False)]
    if segments > 1:
        passes.append((winners, ids, 1, width, width, True))
    for candidates, to, n, width, columns, again in passes:
        N = _pow2(columns, KP)
        R = max(1, 1024 // N)
        topk_kernel[(triton.cdiv(T, R), B * Hkv, n)](scores, candidates, lens, to, 0, T, T, T, 0, NB, width, Hkv, topk, KP,
                                                     block_size, R, N, again, num_warps=16 if N > 2048 else 4)  # fmt: skip
    return ids


def _decode_select(iq, ik, block_size, topk, lens, ik_scale):
    """_select_blocks for T <= FEW: ids [B,Hkv,T,topk]."""
    B, T, Hkv, Di = iq.shape
    S, device = ik.shape[1], iq.device
    iq, ik, NB, BSP = iq.contiguous(), ik.contiguous(), -(-S // block_size), _pow2(block_size, 16)
    lens = torch.full((B,), S, dtype=torch.int32, device=device) if lens is None else lens.to(device, torch.int32).contiguous()
    scores = torch.empty(B, Hkv, T, NB, dtype=torch.float32, device=device)
    run = min(8, _pow2(B * NB // 1024))  # about 1,000 programs, 8 a multiprocessor, or runs of 8 blocks: long enough to stream
    slow = iq.dtype == torch.float32 or _shared_memory() < SMALL_CARD
    scale = ik if ik_scale is None else ik_scale.contiguous()  # not read if None
    decode_score_kernel[(B, triton.cdiv(NB, run))](iq, ik, scale, lens, scores, S, NB, T, Hkv, Di, block_size, BSP,
                                                   _pow2(Hkv * T, 16), run, ik_scale is not None, num_warps=4,
                                                   num_stages=1 if slow else 3)  # fmt: skip
    return decode_topk(scores, lens, block_size, topk)


@triton.jit(do_not_specialize=["T", "S", "K"])
def decode_attend_kernel(q, k, v, ids, lens, partial, plse, T, S, K, scale, Hkv: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
                         D: tl.constexpr, KP: tl.constexpr, BS: tl.constexpr, BSP: tl.constexpr, PER: tl.constexpr,
                         DENSE: tl.constexpr):  # fmt: skip
    """One program: the G heads (padded to GP) of one query and group, on PER of its K blocks, of all blocks if DENSE.

    -> its part of partial [B,Hkv,T,splits,G,D] fp32 and plse [B,Hkv,T,splits,G] (log2; LOW where nothing was visible).
    """
    x = tl.program_id(0)  # (b * Hkv + h) * T + t
    first = tl.program_id(1) * PER
    b = (x // T // Hkv).to(tl.int64)
    h = x // T % Hkv
    pos = tl.minimum(tl.load(lens + b), S) - T + x % T
    last = tl.where(pos < 0, -1, pos // BS)  # the block it stands in
    end = tl.minimum(first + PER, last + 1 if DENSE else K)
    if first >= end:
        return
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    c = tl.arange(0, BSP)
    slot = tl.arange(0, KP)
    mine = ids + x.to(tl.int64) * K
    row = ((b * T + x % T) * Hkv + h) * G + g
    qq = tl.load(q + row[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0)  # [GP,D]
    listed = tl.full([KP], -1, tl.int32)
    if not DENSE:
        listed = tl.load(mine + slot, mask=slot < K, other=-1)
    m = tl.full([GP], LOW, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, D], tl.float32)
    for j in range(first, end):
        block = j
        if not DENSE:
            block = tl.load(mine + j)
            before = tl.sum(((listed == block) & (slot < j)).to(tl.int32), 0)
            block = tl.where((block >= 0) & (block <= last) & (before == 0), block, -1)
        n = tl.where((c < BS) & (block >= 0), block * BS + c, INT_MAX)
        seen = n <= pos
        at = ((b * S + n) * Hkv + h)[:, None] * D + d[None, :]
        kk = tl.load(k + at, mask=seen[:, None], other=0.0)  # [BSP,D]
        vv = tl.load(v + at, mask=seen[:, None], other=0.0)
        s = tl.dot(qq, tl.trans(kk), input_precision="ieee") * (scale * LOG2E)  # [GP,BSP]
        s = tl.where(seen[None, :], s, LOW)
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.where(seen[None, :], tl.exp2(s - new[:, None]), 0.0)
        fade = tl.exp2(m - new)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(vv.dtype), vv, input_precision="ieee")
        m = new
    put = (x.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * G + g
    some = tl.where(total > 0, total, 1.0)
    tl.store(plse + put, tl.where(total > 0, m + tl.log2(some), LOW), mask=g < G)
    tl.store(partial + put[:, None] * D + d[None, :], acc / some[:, None], mask=(g < G)[:, None])


@triton.jit(do_not_specialize=["T", "S", "splits"])
def decode_merge_kernel(partial, plse, lens, out, lse, T, S, splits, Hkv: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
                        BS: tl.constexpr, PER: tl.constexpr, C: tl.constexpr, DENSE: tl.constexpr):  # fmt: skip
    """One program: the partial outputs of one query and head, C at a time, weighted by exp(their lse - the common lse)."""
    x = tl.program_id(0)
    g = tl.program_id(1)
    b = (x // T // Hkv).to(tl.int64)
    h = x // T % Hkv
    pos = tl.minimum(tl.load(lens + b), S) - T + x % T
    many = splits
    if DENSE:
        many = tl.where(pos < 0, 0, pos // BS // PER + 1)  # the others wrote nothing
    d = tl.arange(0, D)
    m = tl.full([1], LOW, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([D], tl.float32)
    for i in range(0, many, C):
        s = i + tl.arange(0, C)
        at = (x.to(tl.int64) * splits + s) * G + g
        z = tl.load(plse + at, mask=s < many, other=LOW)  # [C]
        o = tl.load(partial + at[:, None] * D + d[None, :], mask=(s < many)[:, None], other=0.0)  # [C,D]
        new = tl.maximum(m, tl.max(z, 0))
        w = tl.where(z > LOW, tl.exp2(z - new), 0.0)
        fade = tl.exp2(m - new)
        acc = acc * fade + tl.sum(w[:, None] * o, 0)
        total = total * fade + tl.sum(w, 0)
        m = new
    some = tl.where(total > 0, total, 1.0)
    to = ((b * T + x % T) * Hkv + h) * G + g
    tl.store(out + to * D + d, (acc / some).to(out.dtype.element_ty))
    value = tl.where(total > 0, (m + tl.log2(some)) * LN2, float("-inf"))
    tl.store(lse + ((b * Hkv + h) * G + g) * T + x % T + tl.arange(0, 1), value)


def _decode_attention(q, k, v, ids, block_size, lens, scale):
    """_sparse_attention for T <= FEW; ids None: all blocks."""
    B, T, H, D = q.shape
    S, Hkv, device = k.shape[1], k.shape[2], q.device
    dense, G, X = ids is None, H // Hkv, B * Hkv * T
    K = -(-S // block_size) if dense else ids.shape[3]
    # Sparse: about 1,000 programs, of one block each if need be. Dense: about 500, for then the merge has few parts to read.
    per = min(_pow2(K), _pow2(triton.cdiv(X * K, 512 if dense else 1024)))
    splits = triton.cdiv(K, per)
    q, k, v, ids = q.contiguous(), k.contiguous(), v.contiguous(), q if dense else ids.contiguous()
    lens = torch.full((B,), S, dtype=torch.int32, device=device) if lens is None else lens.to(device, torch.int32).contiguous()
    partial = torch.empty(X, splits, G, D, dtype=torch.float32, device=device)
    plse = torch.empty(X, splits, G, dtype=torch.float32, device=device)
    out, lse = torch.empty_like(q), torch.empty(B, H, T, dtype=torch.float32, device=device)
    slow = q.dtype == torch.float32 or _shared_memory() < SMALL_CARD
    decode_attend_kernel[(X, splits)](q, k, v, ids, lens, partial, plse, T, S, K, scale, Hkv, G, _pow2(G, 16), D,
                                      1 if dense else _pow2(K), block_size, _pow2(block_size, 16), per, dense, num_warps=4,
                                      num_stages=1 if slow else 3)  # fmt: skip
    C = min(64, _pow2(splits))  # parts at a time
    decode_merge_kernel[(X, G)](partial, plse, lens, out, lse, T, S, splits, Hkv, G, D, block_size, per, C, dense)
    return out, lse


@_on_its_device
def _dense_decode(q, k, v, lens, scale):
    return _decode_attention(q, k, v, None, 128 if q.dtype != torch.float32 else 32, lens, scale)


def dense_decode(q, k, v, lens=None, scale=None):
    """At most FEW queries a row, attention to everything visible: see msa.dense_attention. No gradient. ValueError names the argument.

    q [B,T,H,D], k and v [B,S,Hkv,D] -> out [B,T,H,D], lse [B,H,T].
    """
    B, T, H, D = q.shape
    S, Hkv = k.shape[1], k.shape[2]
    _check({"q": q, "k": k, "v": v}, lens, 128, {"k": (B, S, Hkv, D), "v": (B, S, Hkv, D)})
    _refuse(supported(q.dtype, D, H=H, Hkv=Hkv))
    _refuse(None if 0 < T <= FEW else f"q has {T} positions: decoding takes 1 to {FEW}")
    return _dense_decode(q.detach(), k.detach(), v.detach(), lens, D**-0.5 if scale is None else float(scale))


# ---------------------------------------------------------------------------------------------------------------------------


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    B, T, H, Hkv, D, Di, block, K = 1, 120, 8, 2, 16, 16, 16, 3
    shapes = (B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, D), (B, T, Hkv, Di), (B, T, Di)
    q, k, v, iq, ik = (torch.randn(*shape, device=device, requires_grad=True) for shape in shapes)
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU, in the Triton interpreter"
    print(f"on {where}: {H} query heads in {Hkv} groups, {T} positions, {-(-T // block)} blocks of {block} keys, {K} kept")
    ids = select_blocks(iq, ik, block, K)
    print(f"ids {list(ids.shape)}: the last query keeps {ids[0, :, -1].tolist()}, one list for each group")
    out, lse = sparse_attention(q, k, v, ids, block)
    loss = index_kl(q, k, lse, iq, ik, ids, block)
    grads = torch.autograd.grad(out.square().sum() + loss, (q, k, v, iq, ik))
    print(f"attention {list(out.shape)}, index KL {loss.item():.3f}, gradients " + ", ".join(str(list(g.shape)) for g in grads))
    everything = select_blocks(iq, ik, block, 16)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    dense = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
    error = (sparse_attention(q, k, v, everything, block)[0] - dense).abs().max().item()
    print(f"keeping all blocks IS dense attention: largest difference {error:.0e}")
    T, E = 2**17, 2**17 * 4 * 16  # entries
    print(f"at 128K and the released shape: {T / 2 / 16 / 128:.0f} times fewer products than dense attention.")
    print(
        f"Query by query that is {E * 2**16 / 1e9:.0f} GB of K and V to read. Block by block it is {E * 2**12 / 1e9:.0f} GB of Q"
    )
    print(f"to read and {E * 2**12 / 1e9:.0f} GB of partial outputs to write, and to read once more when they are combined.")


if __name__ == "__main__":
    main()
