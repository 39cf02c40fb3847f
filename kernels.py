"""MiniMax Sparse Attention (MSA) in Triton: the functions of msa.py, for training and inference on any GPU that runs Triton.

    python kernels.py                   a demonstration in seconds; without a GPU it runs in Triton's interpreter, on the CPU

Three operators, told in the order in which a layer calls them (B batch, T queries, S keys, H query heads, Hkv KV heads = groups,
G = H // Hkv heads in a group, D and Di head dims):

    select_blocks      iq [B,T,Hkv,Di], ik [B,S,Di]                        -> ids [B,Hkv,T,K]            chapter 1
    sparse_attention   q [B,T,H,D], k and v [B,S,Hkv,D], ids               -> out [B,T,H,D], lse [B,H,T] chapters 2-4
    index_kl           q, k, lse, iq, ik, ids (None: everything visible)   -> the index branch's loss    chapter 5

What they mean, to the letter, is written in msa.py; here is how they are made fast. The numbers that steer every choice are
those of one H200 at the released shape (B 1, H 64, Hkv 4, D = Di = 128, blocks of 128 keys, K = 16 blocks a query, bf16): 772
TFLOP/s of matrix products and 4.28 TB/s of device memory, measured in the same run as every "measured" below (torch 2.11,
Triton 3.6), and about 8 TB/s out of the 50 MB of L2 cache. "128K" means T = S = 131,072. No kernel here ever writes a T x S
tensor.

                             8K             32K             128K                floor at 128K
    select_blocks            1.2 ms         2.6 ms          22 ms               12.4 ms
    sparse attention         2.4            10.3            40                  17 (25 if Q comes from memory for every entry)
      its backward           4.7            20              80                  30
    index KL + gradients     2.1            7.7             27                  7
    cuDNN dense, fwd + bwd   1.8 + 5.6      30 + 83         522 + 1329

(Medians on uniform random selections. The KL at 8K and 32K with 64 queries a tile, select_blocks with four rows a program in its
top-k; what stands below is what was faster at 128K.) At 8K, then, dense attention is still faster (MSA: 0.7x); at 32K MSA is 2.8
times, at 128K 10.9 times as fast as dense, index branch and all.

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

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E): the hardware only has exp2
LN2 = tl.constexpr(0.6931471805599453)
LOW = tl.constexpr(-1.0e30)  # instead of -inf where a difference of two of them would be NaN
BIG = tl.constexpr(3.4028234663852886e38)  # the largest float32
INT_MIN = tl.constexpr(-(2**31))
INT_MAX = tl.constexpr(2**31 - 1)

BUDGET = 2**31  # bytes of temporary results at a time: two such buffers and some lists stay under 4 GB, whatever T is
MAX_SEGMENT = 4096  # block scores that one program ranks in registers
SMALL_CARD = 150_000  # bytes of shared memory below which tiles shrink
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


def supported(dtype=None, D=None, Di=None, block_size=None, topk=None, H=None, Hkv=None):
    """None if the kernels can run such a shape, else a short reason; every argument is optional.

    D and Di are head dims, topk the K of ids, H and Hkv the numbers of query and KV heads.
    """
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
    return {"attend": (64, 64, 4, 2), "backward": (64, 512, 8, 2), "kl": (128, 256, 8, 3), "dense": (64, 0, 8, 2)}[kind]


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
# Floor: 2 * T * S / 2 * Di * Hkv = 8.8 TFLOP at 128K, 11.4 ms at the measured product rate; the maxima, 2 GB written and read, 1
# ms.
# Predicted: 80% of the product's rate, 14.2 ms. Measured: 15.6 ms (552 TFLOP/s, 72%): two programs of 8 warps on a multiprocessor
# hide most, not all, of the maxima behind the products. A masked loop after the plain one was tried: its registers leave room for
# only one program.
# Top-k: floor 0.5 ms (2.1 GB read once). Measured: 0.89 ms for 131,072 rows of 1,024 with one row a program (1.7 ms with four), 5
# times faster than torch.topk (2.22 ms for 65,536 rows).


@triton.jit(do_not_specialize=["t0", "Tc", "T", "S", "NB"])
def score_kernel(iq, ik, lens, scores, t0, Tc, T, S, NB, Hkv: tl.constexpr, Di: tl.constexpr, BS: tl.constexpr, BSP: tl.constexpr,
                 NPB: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """scores [B*Hkv,Tc,NB] of the queries t0..t0+Tc: each block's best visible product. One program: BM queries of one group, all
    their blocks.

    NPB blocks of BS keys (padded to BSP columns) are multiplied at a time. Blocks after a tile's last query are left unwritten.
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
    first = start + tile * BM
    last = start + tl.minimum(tile * BM + BM, Tc) - 1
    whole = tl.maximum(first + 1, 0) // BS // NPB  # steps in which every query sees every key: no mask
    steps = tl.where(last < 0, 0, last // (BS * NPB) + 1)
    offset = (c // BSP) * BS + c % BSP  # [NPB*BSP] the key of each column, from the step's first key
    row = bh.to(tl.int64) * Tc + r
    for j in range(steps):
        n = j * (NPB * BS) + offset
        kk = tl.load(ik + (b * S + n)[:, None] * Di + d[None, :], mask=(n <= last)[:, None], other=0.0)  # [NPB*BSP,Di]
        s = tl.dot(q, tl.trans(kk), input_precision="ieee")  # [BM,NPB*BSP]
        if j >= whole:
            s = tl.where(n[None, :] <= pos[:, None], s, float("-inf"))
        if BSP > BS:
            s = tl.where((c % BSP < BS)[None, :], s, float("-inf"))
        if NPB == 1:
            tl.store(scores + row * NB + j, tl.max(s, 1), mask=live)
        else:
            col = j * NPB + tl.arange(0, NPB)
            best = tl.max(tl.reshape(s, (BM, NPB, BSP)), 2)  # [BM,NPB]
            tl.store(scores + row[:, None] * NB + col[None, :], best, mask=live[:, None] & (col < NB)[None, :])


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
    local = tl.where(pos < 0, -1, pos // BS)
    c = seg * N + tl.arange(0, N)
    if AGAIN:
        listed = live[:, None] & (c < width)[None, :]
        block = tl.load(candidates + row[:, None] * width + c[None, :], mask=listed, other=-1)  # [R,N]
    else:
        block = tl.where((c < NB)[None, :], c[None, :], -1) + tl.zeros([R, N], tl.int32)
    seen = (block >= 0) & (block <= local[:, None]) & live[:, None]
    x = tl.load(scores + row[:, None] * NB + block, mask=seen, other=0.0)  # [R,N]
    x = tl.where(x != x, -BIG, tl.minimum(tl.maximum(x, -BIG), BIG))  # noqa: PLR0124  NaN ranks lowest
    x = tl.where(x == 0.0, 0.0, x)  # -0 ties with 0
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ INT_MAX, bits)
    key = tl.where(seen, key, INT_MIN)
    top = tl.max(key, 1)
    hands = tl.max(tl.reshape(key, (R, N // KP, KP)), 1)  # [R,KP] the best of each hand
    lo = tl.maximum(tl.min(hands, 1), INT_MIN + 1)  # [R] at least K reach it, if K are seen
    key = tl.where(seen & (block == local[:, None]), INT_MAX, key)
    n = tl.sum(seen.to(tl.int32), 1)
    lo = tl.where(n <= K, INT_MIN + 1, lo)  # fewer than K: keep all
    hi = tl.where(n <= K, INT_MIN + 1, top + 1)  # fewer than K reach it: only the local block may
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
    ranks = tl.cumsum(above.to(tl.int32) * 65536 + tie.to(tl.int32), 1)  # both counts in one scan
    n_above = tl.sum(above.to(tl.int32), 1)
    at = tl.where(above, ranks // 65536 - 1, n_above[:, None] + ranks % 65536 - 1)  # [R,N] slot
    out = ids + ((bh.to(tl.int64) * Tout + tout + r) * tl.num_programs(2) + seg)[:, None] * K
    tl.store(out + at, block, mask=(above | tie) & (at < K))
    slot = tl.arange(0, KP)
    filled = n_above + tl.sum(tie.to(tl.int32), 1)
    rest = live[:, None] & (slot[None, :] >= filled[:, None]) & (slot < K)[None, :]
    tl.store(out + slot[None, :], tl.full([R, KP], -1, tl.int32), mask=rest)


@torch.library.custom_op("nanom3::select_blocks", mutates_args=())
@_on_its_device
def _select_blocks(iq: torch.Tensor, ik: torch.Tensor, block_size: int, topk: int, lens: torch.Tensor | None) -> torch.Tensor:
    B, T, Hkv, Di = iq.shape
    S = ik.shape[1]
    iq, ik, lens = iq.contiguous(), ik.contiguous(), _lengths(lens, B, S, iq.device)
    NB = -(-S // block_size)
    KP = _pow2(topk)
    ids = torch.empty(B, Hkv, T, topk, dtype=torch.int32, device=iq.device)
    BSP = _pow2(block_size, 16)
    small = _shared_memory() < SMALL_CARD or iq.dtype == torch.float32
    BM, NPB = (32, 1) if iq.dtype == torch.float32 else (64 if small else 128, 128 // BSP if BSP == block_size else 1)
    Tc = min(T, max(128, BUDGET // 2 // (4 * B * Hkv * NB) // 128 * 128))  # queries at a time
    scores = torch.empty(B * Hkv, Tc, NB, dtype=torch.float32, device=iq.device)
    segments = -(-NB // MAX_SEGMENT)
    N = max(_pow2(min(NB, MAX_SEGMENT)), KP)
    width = segments * topk
    _refuse(f"S = {S} has too many blocks of {block_size}" if segments > 1 and width > 16384 else None)
    winners = torch.empty(B * Hkv, Tc, width, dtype=torch.int32, device=iq.device) if segments > 1 else ids
    for t0 in range(0, T, Tc):
        n = min(Tc, T - t0)
        score_kernel[(triton.cdiv(n, BM), B * Hkv)](iq, ik, lens, scores, t0, n, T, S, NB, Hkv, Di, block_size, BSP, NPB, BM,
                                                    num_warps=4 if small else 8, num_stages=1 if small else 2)  # fmt: skip
        seen = N if segments > 1 or S > T else min(N, max(KP, _pow2(-(-(t0 + n) // block_size))))  # early queries see few blocks
        R = max(1, 1024 // seen)
        out, Tout, tout = (winners, n, 0) if segments > 1 else (ids, T, t0)
        topk_kernel[(triton.cdiv(n, R), B * Hkv, segments)](scores, scores, lens, out, t0, n, T, Tout, tout, NB, 0, Hkv, topk, KP,
                                                            block_size, R, seen, False)  # fmt: skip
        if segments > 1:
            W = _pow2(width, KP)
            R = max(1, 1024 // W)
            topk_kernel[(triton.cdiv(n, R), B * Hkv, 1)](scores, winners, lens, ids, t0, n, T, T, t0, NB, width, Hkv, topk, KP,
                                                         block_size, R, W, True)  # fmt: skip
    return ids


@_select_blocks.register_fake
def _(iq, ik, block_size, topk, lens):
    return iq.new_empty(iq.shape[0], iq.shape[2], iq.shape[1], topk, dtype=torch.int32)


def select_blocks(iq, ik, block_size, topk, lens=None):
    """iq [B,T,Hkv,Di], ik [B,S,Di] -> ids [B,Hkv,T,topk] int32: see msa.select_blocks. ValueError names the argument."""
    B, Di = iq.shape[0], iq.shape[3]
    _check({"iq": iq, "ik": ik}, lens, block_size, {"ik": (B, ik.shape[1], Di)})
    _refuse(supported(iq.dtype, Di=Di, block_size=block_size, topk=topk))
    return _select_blocks(iq.detach(), ik.detach(), block_size, topk, lens)


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
# Measured: 1.2 + 0.2 ms at 128K; the atomics.
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


def _pieces(BG, T, bytes_a_query):
    """Cut BG * T queries so that a piece's temporary results fit the budget: (bg0, nbg, t0, Tp), whole groups if possible."""
    most = max(128, BUDGET // bytes_a_query)
    if most >= T:
        n = most // T
        return [(bg0, min(n, BG - bg0), 0, T) for bg0 in range(0, BG, n)]
    return [(bg, 1, t0, min(most, T - t0)) for bg in range(BG) for t0 in range(0, T, most)]


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
    programs = min(NE, NE // QC + lists)  # there cannot be more; those beyond the last find -1 and end at once
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
# Floor: 34 GB of partials written and read again, 16 ms; 8.8 TFLOP, 11.4 ms; 34 GB of Q, out of L2 if it stays there, else 8 ms
# more.
# Measured at 128K: 30 ms + 8.8 ms in combine_kernel (3.95 TB/s, at its floor) + 1.4 ms for the lists = 40 ms. Neither bytes nor
# products explain the 30: chunks of 4K to 32K queries differ by 4%, so it does not matter where Q comes from. Two programs of 4
# warps, which is what K, V and Q leave room for, do not hide one another's product - softmax - product - store. Tried: M = 128
# with 8 warps 52 ms, M = 64 with 8 warps 67, M = 32 65.
#
# Why not query-outer, or the union of the blocks that 8 neighbours keep (one K and V fetch for all of them)? The first meets the
# L2 wall of chapter 2 whatever one does, and with G = 2 fills two rows of a 64-row tile. The second is the faster one while
# neighbours agree and T is small (1.6 ms at 8K in a first trial), and falls behind at 128K (44 ms), and far behind when they do
# not agree. This one does not care what is selected, and its lists serve the backward and the KL, too.


@triton.jit(do_not_specialize=["bg0", "t0", "Tp", "T", "S"])
def attend_kernel(q, k, v, ids, lens, entries, partial, plse, bg0, t0, Tp, T, S, scale, Hkv: tl.constexpr, G: tl.constexpr,
                  GP: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BS: tl.constexpr, BSP: tl.constexpr, QC: tl.constexpr,
                  QT: tl.constexpr):  # fmt: skip
    """One program: up to QC entries of one block -> partial [NE,G,D] and plse [NE,G] (log2). G heads are padded to GP rows."""
    mine = entries + tl.program_id(0) * QC
    e0 = tl.load(mine)
    if e0 < 0:
        return
    skip = (e0 // K) // Tp * Tp  # queries of the piece before this group's
    b, h, first = _find(e0 // K, bg0, t0, Tp, Hkv)
    block = tl.load(ids + ((b * Hkv + h).to(tl.int64) * T + first) * K + e0 % K)
    listed = tl.load(mine + tl.arange(0, QC))
    many = tl.sum((listed >= 0).to(tl.int32), 0)
    length = tl.load(lens + b)
    lowest = length - T + tl.min(tl.where(listed >= 0, t0 + listed // K - skip, T), 0)
    edge = (BSP > BS) | (block * BS + BS - 1 > lowest)  # only queries that stand in the block must not see all of it
    r = tl.arange(0, QT * GP)
    g = r % GP
    d = tl.arange(0, D)
    c = tl.arange(0, BSP)
    n = tl.where(c < BS, block * BS + c, INT_MAX)  # INT_MAX: no query stands after it
    at = (b.to(tl.int64) * S + n) * Hkv + h
    kk = tl.load(k + at[:, None] * D + d[None, :], mask=(n < length)[:, None], other=0.0)  # [BSP,D]
    vv = tl.load(v + at[:, None] * D + d[None, :], mask=(n < length)[:, None], other=0.0)
    for i in range(0, many, QT):
        e = tl.load(mine + i + r // GP, mask=i + r // GP < many, other=-1)  # [M]
        ok = (e >= 0) & (g < G)
        t = t0 + e // K - skip
        row = (b.to(tl.int64) * T + t) * (Hkv * G) + h * G + g
        qq = tl.load(q + row[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)  # [M,D]
        s = tl.dot(qq, tl.trans(kk), input_precision="ieee")  # [M,BSP]
        if edge:
            s = tl.where(n[None, :] <= (length - T + t)[:, None], s, LOW)
        m = tl.max(s, 1) * (scale * LOG2E)
        p = tl.exp2(s * (scale * LOG2E) - m[:, None])
        total = tl.sum(p, 1)
        o = tl.dot(p.to(vv.dtype), vv, input_precision="ieee") * (1.0 / total)[:, None]  # [M,D]
        put = e.to(tl.int64) * G + g
        tl.store(partial + put[:, None] * D + d[None, :], o.to(partial.dtype.element_ty), mask=ok[:, None])
        tl.store(plse + put, m + tl.log2(total), mask=ok)


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
    q, k, v, ids, lens = q.contiguous(), k.contiguous(), v.contiguous(), ids.contiguous(), _lengths(lens, B, S, q.device)
    G, GP, BSP, NB = H // Hkv, _pow2(H // Hkv), _pow2(block_size, 16), -(-S // block_size)
    M, QC, warps, stages = _tiles("attend", q.dtype, D, block_size)
    out = torch.empty_like(q)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    pieces = _pieces(B * Hkv, T, K * G * D * q.element_size())
    most = max((nbg * Tp for _, nbg, _, Tp in pieces), default=0) * K * G
    partial = torch.empty(most, D, dtype=q.dtype, device=q.device)
    plse = torch.empty(most, dtype=torch.float32, device=q.device)
    TC = _chunk(T, NB, K, G * D * q.element_size(), 128)
    R = max(1, 2048 // (GP * D))
    for piece in pieces:
        bg0, nbg, t0, Tp = piece
        entries, rank, programs = _invert(ids, lens, piece, Hkv, NB, block_size, TC, QC)
        attend_kernel[(programs,)](q, k, v, ids, lens, entries, partial, plse, bg0, t0, Tp, T, S, scale, Hkv, G, GP, D, K,
                                   block_size, BSP, QC, max(1, M // GP), num_warps=warps, num_stages=stages)  # fmt: skip
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
# Floor at 128K: 22 TFLOP, 28.5 ms; the dQ partials 16 ms, beside it. Measured: 68 ms + sum 9 (4.06 TB/s) + delta 1 + lists 1.4 =
# 80 ms. dK, dV and two [128,64] tiles fill the registers of 8 warps, so that one program has a multiprocessor to itself and its
# five products wait for each other. Tried: 4 warps 164 ms (spills), M = 32 102 ms, three stages and 128 to 512 entries a program
# within 2%.


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
    mine = entries + tl.program_id(0) * QC
    e0 = tl.load(mine)
    if e0 < 0:
        return
    skip = (e0 // K) // Tp * Tp  # queries of the piece before this group's
    b, h, first = _find(e0 // K, bg0, t0, Tp, Hkv)
    block = tl.load(ids + ((b * Hkv + h).to(tl.int64) * T + first) * K + e0 % K)
    many = tl.sum((tl.load(mine + tl.arange(0, QC)) >= 0).to(tl.int32), 0)
    length = tl.load(lens + b)
    r = tl.arange(0, QT * GP)
    g = r % GP
    d = tl.arange(0, D)
    c = tl.arange(0, BSP)
    n = tl.where(c < BS, block * BS + c, INT_MAX)
    at = (b.to(tl.int64) * S + n) * Hkv + h
    kk = tl.load(k + at[:, None] * D + d[None, :], mask=(n < length)[:, None], other=0.0)  # [BSP,D]
    vv = tl.load(v + at[:, None] * D + d[None, :], mask=(n < length)[:, None], other=0.0)
    gk = tl.zeros([BSP, D], tl.float32)
    gv = tl.zeros([BSP, D], tl.float32)
    for i in range(0, many, QT):
        e = tl.load(mine + i + r // GP, mask=i + r // GP < many, other=-1)  # [M]
        ok = (e >= 0) & (g < G)
        t = t0 + e // K - skip
        row = (b.to(tl.int64) * T + t) * (Hkv * G) + h * G + g
        qq = tl.load(q + row[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)  # [M,D]
        gg = tl.load(do + row[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        ll = tl.load(lse2 + row, mask=ok, other=0.0)
        dd = tl.load(delta + row, mask=ok, other=0.0)
        s = tl.dot(kk, tl.trans(qq), input_precision="ieee") * (scale * LOG2E)  # [BSP,M]
        p = tl.where((n[:, None] <= (length - T + t)[None, :]) & ok[None, :], tl.exp2(s - ll[None, :]), 0.0)
        gv = tl.dot(p.to(gg.dtype), gg, gv, input_precision="ieee")
        dp = tl.dot(vv, tl.trans(gg), input_precision="ieee")
        ds = (p * (dp - dd[None, :])).to(qq.dtype)
        gk = tl.dot(ds, qq, gk, input_precision="ieee")
        gq = tl.dot(tl.trans(ds), kk, input_precision="ieee")  # [M,D]
        put = e.to(tl.int64) * G + g
        tl.store(dq + put[:, None] * D + d[None, :], gq.to(dq.dtype.element_ty), mask=ok[:, None])
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
    pieces = [[(bg0 + p[0], *p[1:]) for p in _pieces(min(nbg, BG - bg0), T, size)] for bg0 in range(0, BG, nbg)]
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
# Floor: (G + 1 + 1 + 2) products a tile against 2 G in attention's forward; 16 heads: 5.5 TFLOP at 128K, 7.1 ms at the product's
# rate.
# Measured: 27 ms with 128 queries a tile and three stages (two stages 32, 64 queries and three stages 30, two stages 38): 8 warps
# have a multiprocessor to themselves here, too, and each of the 16 products waits for its exponentials. student_kernel: 2.2 of
# it.


@triton.jit
def _student(iq, b, t, h, ok, T, Hkv: tl.constexpr, Di: tl.constexpr):
    d = tl.arange(0, Di)
    return tl.load(iq + (((b.to(tl.int64) * T + t) * Hkv + h) * Di)[:, None] + d[None, :], mask=ok[:, None], other=0.0)  # [QT,Di]


@triton.jit(do_not_specialize=["bg0", "t0", "Tp", "T", "S"])
def student_kernel(iq, ik, ids, lens, entries, zlse, bg0, t0, Tp, T, S, zscale, Hkv: tl.constexpr, Di: tl.constexpr,
                   K: tl.constexpr, BS: tl.constexpr, BSP: tl.constexpr, QC: tl.constexpr, QT: tl.constexpr):  # fmt: skip
    """zlse [NE]: the log-sum-exp of the student's logits over the visible tokens of each entry."""
    mine = entries + tl.program_id(0) * QC
    e0 = tl.load(mine)
    if e0 < 0:
        return
    skip = (e0 // K) // Tp * Tp  # queries of the piece before this group's
    b, h, first = _find(e0 // K, bg0, t0, Tp, Hkv)
    block = tl.load(ids + ((b * Hkv + h).to(tl.int64) * T + first) * K + e0 % K)
    many = tl.sum((tl.load(mine + tl.arange(0, QC)) >= 0).to(tl.int32), 0)
    length = tl.load(lens + b)
    d = tl.arange(0, Di)
    c = tl.arange(0, BSP)
    n = tl.where(c < BS, block * BS + c, INT_MAX)
    kk = tl.load(ik + (b.to(tl.int64) * S + n)[:, None] * Di + d[None, :], mask=(n < length)[:, None], other=0.0)  # [BSP,Di]
    for i in range(0, many, QT):
        slot = i + tl.arange(0, QT)
        e = tl.load(mine + slot, mask=slot < many, other=-1)  # [QT]
        t = t0 + e // K - skip
        qq = _student(iq, b, t, h, e >= 0, T, Hkv, Di)
        z = tl.dot(qq, tl.trans(kk), input_precision="ieee") * (zscale * LOG2E)  # [QT,BSP]
        z = tl.where(n[None, :] <= (length - T + t)[:, None], z, LOW)
        m = tl.max(z, 1)
        tl.store(zlse + e, (m + tl.log2(tl.sum(tl.exp2(z - m[:, None]), 1))) * LN2, mask=e >= 0)


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
def _teacher(q, k_tile, lse, b, t, h, ok, seen, T, scale, Hkv: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """The mean over the group's heads of their attention to the keys of k_tile [N,D]: [QT,N]."""
    d = tl.arange(0, D)
    p = tl.zeros(seen.shape, tl.float32)
    for g in range(G):
        row = (b.to(tl.int64) * T + t) * (Hkv * G) + h * G + g  # [QT]
        qq = tl.load(q + row[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)  # [QT,D]
        s = tl.dot(qq, tl.trans(k_tile), input_precision="ieee") * (scale * LOG2E)
        l2 = tl.load(lse + row, mask=ok, other=0.0) * LOG2E
        p += tl.exp2(tl.minimum(s - l2[:, None], 0.0))  # only outside the support is s above the lse
    return tl.where(seen, p * (1.0 / G), 0.0)


@triton.jit(do_not_specialize=["bg0", "t0", "Tp", "T", "S"])
def kl_kernel(q, k, lse, iq, ik, ids, lens, entries, zlse, loss, diq, dik, bg0, t0, Tp, T, S, scale, zscale, Hkv: tl.constexpr,
              G: tl.constexpr, D: tl.constexpr, Di: tl.constexpr, K: tl.constexpr, BS: tl.constexpr, BSP: tl.constexpr,
              QC: tl.constexpr, QT: tl.constexpr, HOLD: tl.constexpr):  # fmt: skip
    """One program: up to QC entries of one block -> loss [NE] and diq [NE,Di] partials; dik [B,S,Di] fp32 is added to.

    lse [B,T,H] is the main branch's, zlse [NE // K] the student's over its whole support. Gradients are those of the SUM of all
    KLs. HOLD keeps the block's index keys in shared memory beside its K; else they are fetched again for every tile.
    """
    mine = entries + tl.program_id(0) * QC
    e0 = tl.load(mine)
    if e0 < 0:
        return
    skip = (e0 // K) // Tp * Tp  # queries of the piece before this group's
    b, h, first = _find(e0 // K, bg0, t0, Tp, Hkv)
    block = tl.load(ids + ((b * Hkv + h).to(tl.int64) * T + first) * K + e0 % K)
    many = tl.sum((tl.load(mine + tl.arange(0, QC)) >= 0).to(tl.int32), 0)
    length = tl.load(lens + b)
    d = tl.arange(0, D)
    di = tl.arange(0, Di)
    c = tl.arange(0, BSP)
    n = tl.where(c < BS, block * BS + c, INT_MAX)
    at = b.to(tl.int64) * S + n
    kk = tl.load(k + (at * Hkv + h)[:, None] * D + d[None, :], mask=(n < length)[:, None], other=0.0)  # [BSP,D]
    ii = tl.load(ik + at[:, None] * Di + di[None, :], mask=(n < length)[:, None], other=0.0)  # [BSP,Di]
    gi = tl.zeros([BSP, Di], tl.float32)
    for i in range(0, many, QT):
        slot = i + tl.arange(0, QT)
        e = tl.load(mine + slot, mask=slot < many, other=-1)  # [QT]
        ok = e >= 0
        t = t0 + e // K - skip
        seen = (n[None, :] <= (length - T + t)[:, None]) & ok[:, None]  # [QT,BSP]
        p = _teacher(q, kk, lse, b, t, h, ok, seen, T, scale, Hkv, G, D)
        if not HOLD:
            ii = tl.load(ik + at[:, None] * Di + di[None, :], mask=(n < length)[:, None], other=0.0)
        qq = _student(iq, b, t, h, ok, T, Hkv, Di)
        zl = tl.load(zlse + e // K, mask=ok, other=0.0)
        z = tl.dot(qq, tl.trans(ii), input_precision="ieee") * zscale - zl[:, None]  # [QT,BSP] log student
        logp = tl.log2(tl.where(p > 0, p, 1.0)) * LN2
        tl.store(loss + e, tl.sum(tl.where(p > 0, p * (logp - z), 0.0), 1), mask=ok)
        dz = tl.where(seen, tl.exp2(tl.minimum(z, 0.0) * LOG2E) - p, 0.0).to(qq.dtype)
        gq = tl.dot(dz, ii, input_precision="ieee")  # [QT,Di]
        tl.store(diq + e.to(tl.int64)[:, None] * Di + di[None, :], gq.to(diq.dtype.element_ty), mask=ok[:, None])
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
    d = tl.arange(0, D)
    c = tl.arange(0, BN)
    qq = _student(iq, b, t, h, ok, T, Hkv, Di)
    m = tl.full([BM], LOW, tl.float32)
    total = tl.zeros([BM], tl.float32)
    for j in range(0, end, BN):
        n = j + c
        ii = tl.load(ik + (b.to(tl.int64) * S + n)[:, None] * Di + di[None, :], mask=(n < length)[:, None], other=0.0)
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
        kk = tl.load(k + (at * Hkv + h)[:, None] * D + d[None, :], mask=(n < length)[:, None], other=0.0)
        ii = tl.load(ik + at[:, None] * Di + di[None, :], mask=(n < length)[:, None], other=0.0)
        seen = (n[None, :] <= pos[:, None]) & ok[:, None]
        p = _teacher(q, kk, lse, b, t, h, ok, seen, T, scale, Hkv, G, D)
        z = tl.dot(qq, tl.trans(ii), input_precision="ieee") * zscale - zl[:, None]
        logp = tl.log2(tl.where(p > 0, p, 1.0)) * LN2
        cost += tl.sum(tl.where(p > 0, p * (logp - z), 0.0), 1)
        dz = tl.where(seen, tl.exp2(tl.minimum(z, 0.0) * LOG2E) - p, 0.0).to(qq.dtype)
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
        pieces = _pieces(B * Hkv, T, K * (Di * q.element_size() + 16))
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
