"""MiniMax Sparse Attention (MSA) in plain PyTorch: slow, obvious, fp32 inside. The Triton versions of the same functions are in kernels.py.

    python msa.py                       a demonstration on the CPU: shapes, one equality, one number
    python msa.py --draw msa.png        the same, and a drawing of MSA around what it computed (results/msa.png)

The idea (arXiv 2606.13392). Full attention lets each query look at all S keys. MSA first asks a tiny second attention, the INDEX
BRANCH, which keys matter, and lets the MAIN BRANCH look at those only:

    index branch   Hkv query heads and ONE key head, all keys, no values: token scores iq . ik / sqrt(Di)
    selection      keys are grouped in blocks of 128; a block scores as its best visible token; each query keeps K = 16 blocks
                   PER KV HEAD (group): the block it stands in, always, and the K - 1 best of the others
    main branch    ordinary softmax attention of the G = H / Hkv query heads of a group over the kept blocks (2,048 tokens)
    learning       choosing is not differentiable, so the language-model loss never reaches the index branch. It learns by imitation:
                   KL(teacher || student) over the kept tokens, teacher = the main branch's own attention, averaged over the G heads

Why each group keeps its own blocks: KV heads look for different things. One selection for all of them (DeepSeek's DSA) must
compromise. Why blocks and not tokens: contiguous reads, and a top-k over S / 128 entries instead of S.

Shapes used everywhere:  q [B,T,H,D]   k,v [B,S,Hkv,D]   iq [B,T,Hkv,Di]   ik [B,S,Di]   ids [B,Hkv,T,K]   lens [B]
Queries are the LAST T of each row: row b holds lens[b] valid keys (None: all S) and query t stands at position lens[b] - T + t. So the
same function serves training (T == S), chunked prefill and decode (T == 1) on a preallocated cache. A query at a negative
position sees nothing: ids -1, output 0, lse -inf, and no part in any loss.
"""

import argparse
import functools
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right

FEW = 8  # queries a row up to which a call is a decoding step, with kernels of its own
FP8 = torch.float8_e4m3fn
ATTENTION = ("msa", "dense", "shared", "token", "local", "random")  # what config.attention may be, see MSA.select


# ---------------------------------------------------------------------------------------------------------------------------
# Norm and rotary positions, shared with model.py


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight) over the last dim, in fp32; weight starts at zero (released model: MiniMaxM3VLRMSNorm)."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


def apply_rope(x, cos, sin):
    """Rotate the first R dims of every head, pairing dim i with i + R/2; the other dims pass unchanged ("partial RoPE").

    x [B,T,H,D], cos and sin [B or 1,T,R] (the two halves repeat each other). Raises ValueError if R > D.
    """
    R = cos.shape[-1]
    if R > x.shape[-1]:
        raise ValueError(f"RoPE rotates {R} dims but the head has only {x.shape[-1]}")
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [B,T,1,R]
    rot, rest = x[..., :R].float(), x[..., R:]
    turned = torch.cat((-rot[..., R // 2 :], rot[..., : R // 2]), dim=-1)
    return torch.cat(((rot * cos + turned * sin).to(x.dtype), rest), dim=-1)


# ---------------------------------------------------------------------------------------------------------------------------
# Which implementation runs


@functools.cache
def _print_once(line):
    print(line)


def _say_once(line):
    if not torch.compiler.is_compiling():
        _print_once(line)


def _kernels(backend, q, **shape):
    """The kernels module if it is to be used, else None. backend: "torch", "triton", or None = Triton on CUDA, torch elsewhere."""
    if backend not in (None, "torch", "triton"):
        raise ValueError(f'backend must be "torch", "triton" or None, not {backend!r}')
    if backend == "torch" or (backend is None and not q.is_cuda):
        return None
    try:
        import kernels
    except ImportError as e:
        if backend == "triton":
            raise
        _say_once(f"msa: no Triton here ({e}): using the PyTorch reference")
        return None
    why = kernels.supported(dtype=q.dtype, **shape)
    if why is not None:
        _say_once(f"msa: {why}: using the PyTorch reference")
        return None
    return kernels


def _fp32(function):
    """Run outside of autocast: inside it, a product of two fp32 tensors would quietly be done in bf16."""

    @functools.wraps(function)
    def run(x, *args, **kw):
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args, **kw)

    return run


def _check(q, k, lens, name="q"):
    T, S = q.shape[1], k.shape[1]
    if lens is None:
        if T > S:
            raise ValueError(f"{name} has {T} positions but the keys only {S}: queries are the last T of S")
    elif lens.shape != (q.shape[0],) or lens.is_floating_point():
        raise ValueError(f"lens must be an integer tensor of shape [{q.shape[0]}], not {lens.dtype} {list(lens.shape)}")


def query_positions(B, T, S, lens, device):
    """Absolute position of every query, [B,T]; negative where the row is shorter than T."""
    last = torch.full((B,), S, device=device) if lens is None else lens.long()
    return last[:, None] - T + torch.arange(T, device=device)


# ---------------------------------------------------------------------------------------------------------------------------
# Selection


def pick_blocks(scores, pos, block_size, topk):
    """Keep `topk` blocks for every query from block scores: the local block always, then the best others, ties to the lower id.

    scores [B,Hkv,T,nb] with -inf where no token of the block is visible; pos [B,T].  Returns ids [B,Hkv,T,topk] int32, -1 after the valid.
    """
    nb = scores.shape[-1]
    block = torch.arange(nb, device=scores.device)
    local = (pos // block_size)[:, None, :, None]  # [B,1,T,1]; negative for a query that stands nowhere
    scores = scores.masked_fill(block == local, float("inf"))
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :topk]  # stable: ties to the lower id
    ids = order.masked_fill(order > local, -1)  # a block after the local one has no visible token
    ids = F.pad(ids, (0, topk - ids.shape[-1]), value=-1)  # fewer blocks than topk
    return ids.int()


def block_scores(iq, ik, pos, block_size):
    """iq [B,T,Hkv,Di], ik [B,S,Di], pos [B,T] -> [B,Hkv,T,nb]: the largest iq . ik among each block's visible tokens, -inf if none is."""
    S = ik.shape[1]
    block_size = min(block_size, max(S, 1))  # a longer block holds nothing more
    nb = -(-S // block_size)
    s = torch.einsum("bthd,bsd->bhts", iq, ik)  # [B,Hkv,T,S] token scores
    s = s.nan_to_num(nan=torch.finfo(s.dtype).min, posinf=torch.finfo(s.dtype).max)
    s = s.masked_fill(torch.arange(S, device=s.device) > pos[:, None, :, None], float("-inf"))
    return F.pad(s, (0, nb * block_size - S), value=float("-inf")).unflatten(-1, (nb, block_size)).amax(-1)


def quantize(x):
    """x [..., Di] -> a pair: FP8 (e4m3) values [..., Di] and fp32 scales [...], one a vector, with x = values * scales within 1/16.

    Why a scale for every token and not for every block: blocks fill token by token, and this way what is written stays as it is. A
    block's scale would change with a later, larger token, and all of the block would have to be rounded again. It costs 4 bytes
    beside Di = 128. The largest entry becomes 448, the largest number of e4m3.
    """
    x = x.float()
    stretch = 448.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return (x * stretch).to(FP8), (1.0 / stretch).squeeze(-1)


@_fp32
def select_blocks(iq, ik, block_size, topk, lens=None, backend=None):
    """The block ids each query keeps, one selection per KV group (paper eq. 4-6; released MiniMaxM3VLIndexer).

    iq [B,T,Hkv,Di], ik [B,S,Di] -> ids [B,Hkv,T,topk] int32, valid ids first, -1 after. No gradient flows.
    A token's score is iq . ik (the 1 / sqrt(Di) of the loss does not change the order); a block's is the max over its visible tokens.
    ik may also be quantize(ik); the queries are then rounded to FP8 as well, each with a scale of its own, which changes no order.
    NaN ranks lowest. Raises ValueError if block_size or topk is not positive, or T > S.
    """
    if block_size < 1 or topk < 1:
        raise ValueError(f"block_size and topk must be positive, not {block_size} and {topk}")
    fp8 = isinstance(ik, tuple)
    keys, scales = ik if fp8 else (ik, None)
    _check(iq, keys, lens, "iq")
    B, T, Hkv, Di = iq.shape
    S = keys.shape[1]
    fast = _kernels(backend, iq, Di=Di, block_size=block_size, topk=topk, fp8=fp8)
    if fast is not None:
        return fast.select_blocks(iq, ik, block_size, topk, lens)
    iq, ik = iq.detach().float(), keys.detach().float()
    if fp8:
        iq, ik = quantize(iq)[0].float(), ik * scales[..., None]
    pos = query_positions(B, T, S, lens, iq.device)  # [B,T]
    step = max(1, 2**24 // (B * Hkv * S))  # query rows at a time, so that T x S scores never stand in memory at once
    chunks = []
    for t in range(0, T, step):
        p = pos[:, t : t + step]
        chunks.append(pick_blocks(block_scores(iq[:, t : t + step], ik, p, block_size), p, block_size, topk))  # [B,Hkv,t,topk]
    return torch.cat(chunks, dim=2)


def local_blocks(B, T, S, Hkv, block_size, topk, lens, device):
    """For comparison: the last `topk` blocks, a sliding window. ids [B,Hkv,T,topk]."""
    local = query_positions(B, T, S, lens, device)[:, None, :, None] // block_size  # [B,1,T,1]
    ids = local - torch.arange(topk, device=device)
    return ids.clamp(min=-1).int().expand(B, Hkv, T, topk)


def random_blocks(B, T, S, Hkv, block_size, topk, lens, device):
    """For comparison: the local block and `topk` - 1 visible blocks drawn at random, anew at every call. ids [B,Hkv,T,topk]."""
    pos = query_positions(B, T, S, lens, device)
    nb = -(-S // block_size)
    scores = torch.rand(B, Hkv, T, nb, device=device)
    hidden = torch.arange(nb, device=device) > (pos // block_size)[:, None, :, None]
    return pick_blocks(scores.masked_fill(hidden, float("-inf")), pos, block_size, topk)


def support(ids, block_size, S, pos):
    """The tokens a query may attend to: those of its selected blocks that are visible.  ids [B,Hkv,T,K] (None: all blocks) -> bool [B,Hkv,T,S].

    Ids below 0 or past the last block select nothing, duplicates select once.
    """
    visible = torch.arange(S, device=pos.device) <= pos[:, None, :, None]  # [B,1,T,S]
    if ids is None:
        return visible
    block_size = min(block_size, max(S, 1))  # a longer block holds nothing more
    nb = -(-S // block_size)
    kept = torch.zeros(*ids.shape[:-1], nb + 1, dtype=torch.bool, device=ids.device)  # the last column takes the invalid ids
    kept.scatter_(-1, torch.where((ids < 0) | (ids >= nb), nb, ids).long(), True)
    return kept[..., :nb].repeat_interleave(block_size, dim=-1)[..., :S] & visible  # [B,Hkv,T,S]


# ---------------------------------------------------------------------------------------------------------------------------
# Attention over a support


def _logits(q, k, scale):
    """[B,T,H,D] x [B,S,Hkv,D] -> [B,Hkv,G,T,S] in fp32: head h belongs to group h // G."""
    q = q.float().unflatten(2, (k.shape[2], -1))  # [B,T,Hkv,G,D]
    return torch.einsum("bthgd,bshd->bhgts", q, k.float()) * scale


def _blank_tail(x, lens):
    """Zero the memory beyond each row's length: it may hold anything, and 0 * NaN is NaN."""
    if lens is None:
        return x
    valid = torch.arange(x.shape[1], device=x.device) < lens[:, None]  # [B,S]
    return torch.where(valid.view(*valid.shape, *[1] * (x.dim() - 2)), x, 0.0)


def _blank_head(x, pos):
    """Zero the queries [B,T,H,D] that stand at a negative position: they too may hold anything."""
    return torch.where((pos >= 0)[..., None, None], x, 0.0)


@_fp32
def attention_weights(q, k, ids, block_size, lens=None, scale=None):
    """The softmax over each query's support: p [B,Hkv,G,T,S] fp32, lse [B,H,T] fp32, some [B,Hkv or 1,T] bool.

    `some` says which queries see anything at all; where it is False, lse is -inf and p is meaningless (but finite, as its gradient is).
    """
    B, T, H, D = q.shape
    S, Hkv = k.shape[1], k.shape[2]
    _check(q, k, lens)
    if H % Hkv:
        raise ValueError(f"{H} query heads cannot be shared evenly by {Hkv} KV heads")
    scale = D**-0.5 if scale is None else scale
    pos = query_positions(B, T, S, lens, q.device)
    ok = support(ids, block_size, S, pos).unsqueeze(2)  # [B,Hkv or 1,1,T,S]
    some = ok.any(-1, keepdim=True)
    logits = _logits(_blank_head(q, pos), _blank_tail(k, lens), scale).masked_fill_(~(ok | ~some), float("-inf"))  # [B,Hkv,G,T,S]
    lse = logits.detach().logsumexp(-1).masked_fill(~some.squeeze(-1), float("-inf")).flatten(1, 2)  # [B,H,T]
    return logits.softmax(-1), lse, some.squeeze(-1).squeeze(2)


@_fp32
def _attend(q, k, v, ids, block_size, lens, scale):
    p, lse, some = attention_weights(q, k, ids, block_size, lens, scale)
    out = torch.einsum("bhgts,bshd->bthgd", p, _blank_tail(v, lens).float())  # [B,T,Hkv,G,D]
    out = out.masked_fill(~some.transpose(1, 2)[..., None, None], 0.0)
    return out.flatten(2, 3).to(q.dtype), lse  # [B,T,H,D]


def sparse_attention(q, k, v, ids, block_size, lens=None, scale=None, backend=None):
    """Exact softmax attention over the visible tokens of the selected blocks (paper eq. 7).

    q [B,T,H,D], k and v [B,S,Hkv,D], ids [B,Hkv,T,K] -> out [B,T,H,D], lse [B,H,T] fp32 (natural log, carries no gradient).
    scale None is 1 / sqrt(D). Future blocks, duplicates and -1 in ids are harmless. With S <= K * block_size this IS dense attention.
    Raises ValueError if T > S without lens, or H is no multiple of Hkv.
    """
    fast = _kernels(backend, q, D=q.shape[3], block_size=block_size, topk=ids.shape[3], H=q.shape[2], Hkv=k.shape[2])
    if fast is not None:
        _check(q, k, lens)
        return fast.sparse_attention(q, k, v, ids, block_size, lens, scale)
    return _attend(q, k, v, ids, block_size, lens, scale)


def dense_attention(q, k, v, lens=None, scale=None):
    """Causal attention over everything visible, with its lse: the warm-up's main branch and every comparison's baseline.

    q [B,T,H,D], k and v [B,S,Hkv,D] -> out [B,T,H,D], lse [B,H,T] fp32 (natural log, carries no gradient).
    On CUDA in half precision with T == S this is PyTorch's flash attention, elsewhere the reference.
    """
    if q.is_cuda and lens is None and q.shape[1] == k.shape[1] and q.dtype in (torch.bfloat16, torch.float16):
        G = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(G, dim=2) for x in (k, v))  # [B,S,H,D]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, True, scale=scale
        )[:2]
        return out.transpose(1, 2), lse.detach()
    return _attend(q, k, v, None, 1, lens, scale)


def full_attention(q, k, v, lens=None, backend=None):
    """What dense_attention computes, without the lse, as fast as can be: scaled_dot_product_attention, or our split-K kernel in
    decoding. -> [B,T,H,D]. Memory beyond the output: none on CUDA when all rows are full (lens None); else 2^28 / S queries'
    masks at a time, and copies of k and v.
    """
    B, T, S = q.shape[0], q.shape[1], k.shape[1]
    whole = lens is None and T == S
    if T <= FEW and not whole and not (torch.is_grad_enabled() and q.requires_grad):
        fast = _kernels(backend, q, D=q.shape[3], H=q.shape[2], Hkv=k.shape[2])
        if fast is not None:
            return fast.dense_decode(q, k, v, lens)[0]
    if lens is not None:
        k, v = _blank_tail(k, lens), _blank_tail(v, lens)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B,H,T,D], [B,Hkv,S,D]
    if whole:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    if lens is None and q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(T, S), enable_gqa=True).transpose(1, 2)
    pos = query_positions(B, T, S, lens, q.device)
    outs, step = [], max(1, 2**28 // (B * S))
    for x, p in zip(q.split(step, dim=2), pos.split(step, dim=1)):
        ok = torch.arange(S, device=q.device) <= p[:, None, :, None]  # [B,1,t,S]
        nowhere = (p < 0)[:, None, :, None]
        out = F.scaled_dot_product_attention(x, k, v, attn_mask=ok | nowhere, enable_gqa=True)
        outs.append(out.masked_fill(nowhere, 0.0))
    return torch.cat(outs, dim=2).transpose(1, 2)


# ---------------------------------------------------------------------------------------------------------------------------
# How the index branch learns


@_fp32
def index_kl(q, k, lse, iq, ik, ids, block_size, lens=None, scale=None, backend=None):
    """KL(teacher || student) over each query's support, mean over the (row, query, group) with a support: a scalar (paper eq. 8-9).

    teacher: softmax of each of the G heads' main logits over the support, THEN the mean of the G distributions (no gradient);
    student: softmax of iq . ik / sqrt(Di) over the same support. d loss / d student logit = (student - teacher) / count.
    q [B,T,H,D], k [B,S,Hkv,D], iq [B,T,Hkv,Di], ik [B,S,Di], ids [B,Hkv,T,K]; lse [B,H,T] is what sparse_attention returned for these
    ids. ids None means the whole causal prefix (the warm-up), lse then dense_attention's. Only iq and ik receive a gradient.
    """
    B, T, H, D = q.shape
    S, Di = k.shape[1], ik.shape[2]
    scale = D**-0.5 if scale is None else scale
    topk, block_size = (1, 64) if ids is None else (ids.shape[3], block_size)  # without ids there are no blocks: any size will do
    fast = _kernels(backend, q, D=D, Di=Di, block_size=block_size, topk=topk, H=H, Hkv=k.shape[2])
    if fast is not None:
        return fast.index_kl(q.detach(), k.detach(), lse.detach(), iq, ik, ids, block_size, lens, scale)
    pos = query_positions(B, T, S, lens, q.device)
    q, iq = _blank_head(q, pos), _blank_head(iq, pos)
    ok = support(ids, block_size, S, pos).expand(B, k.shape[2], T, S)
    some = ok.any(-1, keepdim=True)  # [B,Hkv,T,1]
    hidden = ~(ok | ~some)
    with torch.no_grad():
        rows = lse.unflatten(1, (k.shape[2], -1)).unsqueeze(-1)  # [B,Hkv,G,T,1]
        each = _logits(q, _blank_tail(k, lens), scale).sub_(rows).exp_()  # one softmax a head
        teacher = each.mean(2).masked_fill_(~ok, 0.0)  # [B,Hkv,T,S]
    student = torch.einsum("bthd,bsd->bhts", iq.float(), _blank_tail(ik, lens).float()).mul(Di**-0.5)
    student = student.masked_fill_(hidden, float("-inf")).log_softmax(-1).masked_fill(hidden, 0.0)  # the last: 0 * -inf is NaN
    kl = (torch.xlogy(teacher, teacher) - teacher * student).sum(-1, keepdim=True)  # [B,Hkv,T,1]
    return kl.sum() / some.sum().clamp(min=1)  # a query without support has teacher 0 and adds nothing


@_fp32
@torch.no_grad()
def selection_recall(q, k, ids, block_size, queries=64):
    """How good a selection is, on at most `queries` evenly spaced queries that had to choose (more visible blocks than K), for T == S.

    Returns (block_recall, score_recall): the share of the K blocks that hold most of the dense attention (group mean; local block
    included in both) which were selected, and the share of the dense attention that the selected blocks hold. (1, 1) if none chose.
    """
    B, T, _, D = q.shape
    Hkv, K = ids.shape[1], ids.shape[3]
    first = K * block_size  # the first position that sees more than K blocks
    if first >= T:
        return 1.0, 1.0
    rows = torch.linspace(first, T - 1, min(queries, T - first), device=q.device).long()
    p = _logits(q[:, rows], k, D**-0.5)  # [B,Hkv,G,n,S]
    p = p.masked_fill(torch.arange(T, device=q.device) > rows[:, None], float("-inf")).softmax(-1).mean(2)
    nb = -(-T // block_size)
    mass = F.pad(p, (0, nb * block_size - T)).unflatten(-1, (nb, block_size)).sum(-1)  # [B,Hkv,n,nb]
    best = pick_blocks(mass, rows.expand(B, -1), block_size, K)
    kept = torch.zeros(B, Hkv, len(rows), nb + 1, dtype=torch.bool, device=q.device)
    chosen = ids[:, :, rows].long()
    kept.scatter_(-1, torch.where(chosen < 0, nb, chosen), True)
    hits = kept.gather(-1, best.long())  # every one of these queries has K valid best blocks
    return hits.float().mean().item(), (mass * kept[..., :nb]).sum(-1).mean().item()


# ---------------------------------------------------------------------------------------------------------------------------
# The layer


class MSA(nn.Module):
    """Attention of one decoder layer. sparse=False is plain causal GQA, the released model's "full_attention" layers.

    config is a model.M3Config (any object with the fields read below). config.attention says what a sparse layer does:
        msa      the real thing
        dense    full attention, no index branch
        shared   index scores summed over the groups, ONE selection for all KV heads (as DSA does)
        token    as msa with blocks of one token and the same token budget, K * block
        local    the last K blocks;  random   the local block and K - 1 random visible ones; neither has an index branch
    `probe`, if set, is called with (layer, q, k, ids) in every forward, ids None where attention is dense: how train.py measures recall
    and sample.py draws attention maps.
    """

    def __init__(self, config, sparse, layer=0):
        super().__init__()
        C, self.H, self.Hkv, self.D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if self.H % self.Hkv:
            raise ValueError(f"num_attention_heads {self.H} is no multiple of num_key_value_heads {self.Hkv}")
        if config.attention not in ATTENTION:
            raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, not {config.attention!r}")
        self.layer, self.kind = layer, config.attention if sparse else "dense"
        self.block_size, self.topk, self.detach = config.index_block_size, config.index_topk_blocks, config.index_detach
        if self.kind == "token":
            self.block_size, self.topk = 1, self.topk * self.block_size
        self.backend, self.probe = None, None
        self.q_proj = nn.Linear(C, self.H * self.D, bias=False)
        self.k_proj = nn.Linear(C, self.Hkv * self.D, bias=False)
        self.v_proj = nn.Linear(C, self.Hkv * self.D, bias=False)
        self.o_proj = nn.Linear(self.H * self.D, C, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.D, config.rms_norm_eps), RMSNorm(self.D, config.rms_norm_eps)
        self.indexed = self.kind in ("msa", "shared", "token")
        if self.indexed:
            if config.index_n_heads != self.Hkv:
                raise ValueError(f"index_n_heads {config.index_n_heads} must equal num_key_value_heads {self.Hkv}: one per group")
            if config.index_local_blocks != 1:
                raise ValueError(f"index_local_blocks must be 1, not {config.index_local_blocks}")
            self.Di = config.index_head_dim
            self.index_q_proj = nn.Linear(C, self.Hkv * self.Di, bias=False)
            self.index_k_proj = nn.Linear(C, self.Di, bias=False)
            self.index_q_norm = RMSNorm(self.Di, config.rms_norm_eps)
            self.index_k_norm = RMSNorm(self.Di, config.rms_norm_eps)

    def index(self, x, cos, sin):
        """The index branch's queries and keys, from the same hidden state and positions as the main branch's."""
        if self.detach:
            x = x.detach()  # the KL loss trains these two matrices and norms and nothing else
        B, T, _ = x.shape
        iq = apply_rope(self.index_q_norm(self.index_q_proj(x).view(B, T, self.Hkv, self.Di)), cos, sin)
        ik = apply_rope(self.index_k_norm(self.index_k_proj(x).view(B, T, 1, self.Di)), cos, sin)
        if self.kind == "shared":  # scores are linear in iq, so summing queries sums scores
            iq = iq.sum(2, keepdim=True, dtype=iq.dtype).expand(B, T, self.Hkv, self.Di)  # autocast would make it fp32
        return iq, ik.squeeze(2)  # [B,T,Hkv,Di], [B,T,Di]

    def select(self, q, k, iq, ik, lens):
        B, T, S = q.shape[0], q.shape[1], k.shape[1]
        if self.kind == "local":
            return local_blocks(B, T, S, self.Hkv, self.block_size, self.topk, lens, q.device)
        if self.kind == "random":
            return random_blocks(B, T, S, self.Hkv, self.block_size, self.topk, lens, q.device)
        return select_blocks(iq, ik, self.block_size, self.topk, lens, self.backend)

    def forward(self, x, cos, sin, cache=None, warmup=False):
        """x [B,T,C], cos and sin [B or 1,T,R] -> (out [B,T,C], index KL, a scalar; 0 in eval mode, with a cache, or without an index branch).

        warmup: the main branch is dense and the KL covers the whole causal prefix, so that the index branch learns what it would pick.
        """
        B, T, _ = x.shape
        q = apply_rope(self.q_norm(self.q_proj(x).view(B, T, self.H, self.D)), cos, sin)
        k = apply_rope(self.k_norm(self.k_proj(x).view(B, T, self.Hkv, self.D)), cos, sin)
        v = self.v_proj(x).view(B, T, self.Hkv, self.D)
        iq, ik = self.index(x, cos, sin) if self.indexed else (None, None)
        lens = None
        if cache is not None:
            k, v, ik, lens = cache.append(self.layer, k, v, ik)
        learn = self.indexed and self.training and cache is None
        kl = torch.zeros((), device=x.device)
        ids = None
        if self.kind == "dense":
            out = full_attention(q, k, v, lens, self.backend)
        elif warmup:
            out, lse = dense_attention(q, k, v, lens)
            if learn:
                kl = index_kl(q, k, lse, iq, ik, None, self.block_size, lens, backend=self.backend)
        else:
            ids = self.select(q, k, iq, ik, lens)
            out, lse = sparse_attention(q, k, v, ids, self.block_size, lens, backend=self.backend)
            if learn:
                kl = index_kl(q, k, lse, iq, ik, ids, self.block_size, lens, backend=self.backend)
        if self.probe is not None:
            self.probe(self, q, k, ids)
        return self.o_proj(out.reshape(B, T, self.H * self.D)), kl


# ---------------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def draw(path, iq, ik, ids, block, G):
    """MSA in one picture, around the block scores and the choices of the demonstration. ids [1,Hkv,T,K] for its two groups."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch, Rectangle

    T, Di, K = iq.shape[1], iq.shape[3], ids.shape[3]
    nb, rows = T // block, torch.arange(block - 1, T, block)  # a query for each block: its last
    scores = block_scores(iq[:, rows], ik, rows[None], block)[0] / Di**0.5  # [Hkv,nb,nb]
    kept = ids[0][:, rows].tolist()
    colors, grey, red = ("#2166ac", "#c05a00"), "#555555", "#b2182b"
    fig = plt.figure(figsize=(8.5, 7), dpi=200)
    ax = fig.add_axes((0, 0, 1, 1), xlim=(0, 850), ylim=(0, 700))
    ax.axis("off")

    def say(x, y, text, **kw):
        ax.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": 8, "linespacing": 1.4, **kw})

    def box(x, y, w, h, text="", edge=grey, face="white", squares=(), **kw):
        ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=6", fc=face, ec=edge, lw=1.1))
        say(x + w / 2, y + h / 2 + 9 * bool(squares), text, **kw)
        for n, color in enumerate(squares):  # one for each head
            ax.add_patch(Rectangle((x + w / 2 + 13 * (n - len(squares) / 2) + 1.5, y + 7), 10, 10, fc=color))

    def arrow(*points, color=grey, style="-"):
        ax.plot(*zip(*points[:-1]), color=color, lw=1.3, ls=style)
        ax.annotate("", points[-1], points[-2], arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.3, "ls": style, "shrinkA": 0, "shrinkB": 0})

    def stop(x, y, text=""):
        ax.add_patch(Rectangle((x - 9, y - 2), 18, 4, fc=red, zorder=5))
        say(x + 13, y, text, color=red, ha="left")

    box(8, 352, 834, 340, face="#f2f6fb", edge="#c9d8ea")
    box(8, 8, 834, 332, face="#fbf6f0", edge="#ead9c6")
    say(22, 674, "INDEX BRANCH", ha="left", weight="bold", fontsize=10)
    say(22, 26, "MAIN BRANCH", ha="left", weight="bold", fontsize=10)
    box(18, 322, 60, 48, "x\n[B,T,C]")
    for y in (590, 465, 265, 145):
        arrow((48, 370 if y > 346 else 322), (48, y), (100, y))
    stop(48, 400, "detach")
    box(100, 550, 160, 80, "index_q_proj, norm, RoPE\niq [B,T,Hkv,Di]: one index\nquery head a group", squares=colors)
    box(100, 425, 160, 80, "index_k_proj, norm, RoPE\nik [B,S,Di]: ONE index key\nhead for all groups", squares=[grey])
    box(100, 225, 160, 80, "q_proj, norm, RoPE\nq [B,T,H,D]: G = H / Hkv\nquery heads a group", squares=[c for c in colors for _ in range(G)])
    box(100, 105, 160, 80, "k_proj, norm, RoPE; v_proj\nk, v [B,S,Hkv,D]: one\nkey-value head a group", squares=colors)
    arrow((260, 575), (290, 575))
    arrow((260, 460), (290, 460))
    say(471, 637, "block_scores: the largest iq · ik of a block's visible tokens")
    box(292, 127, 356, 92, edge="#bbbbbb")
    for g, (x, color) in enumerate(zip((302, 486), colors)):
        heat = fig.add_axes((x / 850, 450 / 700, 154 / 850, 154 / 700))
        seen = scores[g][scores[g].isfinite()]
        heat.imshow(scores[g].numpy(), cmap="Greys", extent=(0, nb, nb, 0), vmin=seen.min() - 0.2 * (seen.max() - seen.min()))
        for t, chosen in enumerate(kept[g]):
            for n in chosen:
                heat.add_patch(Rectangle((n + 0.1, t + 0.1), 0.8, 0.8, fill=False, ec=color, lw=1.3)) if n >= 0 else None
        heat.axis("off")
        say(x + 77, 616, f"group {g}", color=color, weight="bold")
        say(x + 77, 441, "blocks of keys")
        arrow((x + 77, 430), (x + 77, 292))
        stop(x + 77, 416, "detach")
        for n in range(nb):
            ax.add_patch(Rectangle((x + n * 154 / nb, 268), 154 / nb, 18, fc=color if n in kept[g][-1] else "#eeeeee", ec="white"))
        say(x + 77, 254, "kept by the last query")
        arrow((x + 77, 244), (x + 77, 219))
        box(x, 137, 154, 58, f"group {g}: {G} query heads\nover the tokens of its {K}\nkept blocks of k and v", edge=color)
    say(295, 527, "queries", rotation=90)
    say(471, 396, "select_blocks", weight="bold")
    say(471, 370, "own block, always,\nand the K - 1 best others")
    say(471, 324, "ids [B,Hkv,T,K]")
    say(471, 207, "sparse_attention: exact softmax", weight="bold")
    arrow((260, 265), (276, 265), (276, 185), (292, 185))
    arrow((260, 145), (292, 145))
    arrow((470, 127), (470, 96))
    box(380, 60, 180, 36, "out [B,T,H,D], then o_proj")
    box(672, 495, 160, 64, "student: softmax of\niq · ik / √Di over the\nkept, visible tokens")
    box(672, 316, 160, 60, "index_kl =\nKL(teacher || student)", edge=red, weight="bold")
    box(672, 137, 160, 80, "teacher: each query\nhead's softmax over the\nsame tokens, then the\nmean over the group")
    arrow((640, 527), (672, 527))
    arrow((648, 175), (672, 175))
    arrow((752, 495), (752, 376))
    arrow((752, 217), (752, 316))
    stop(752, 265, "detach")
    arrow((752, 559), (752, 660), (275, 660), (275, 487), (260, 487), color=red, style="--")
    arrow((275, 612), (260, 612), color=red)
    say(510, 673, "gradient of the KL: index_q_proj, index_k_proj and their norms, nothing else", color=red)
    say(752, 62, "warm-up: dense_attention\ninstead, and the KL over\nall visible tokens")
    fig.savefig(path)
    plt.close(fig)


def main(argv=None):
    p = argparse.ArgumentParser(description="A demonstration of MSA on the CPU.")
    p.add_argument("--draw", metavar="PNG", help="also draw it")
    args = p.parse_args(argv)
    if args.draw and not (args.draw.endswith(".png") and os.path.isdir(os.path.dirname(args.draw) or ".")):
        p.error(f"--draw {args.draw}: not a .png, or there is no such folder")
    torch.manual_seed(0)
    B, T, H, Hkv, D, Di, block, K = 1, 1024, 8, 2, 32, 16, 64, 4
    nb = T // block
    # Keys of one block share a topic; the queries of each group ask for a topic of their own choice, different for the two groups.
    topic = F.normalize(torch.randn(nb, D), dim=-1) * 6
    k = topic.repeat_interleave(block, dim=0).view(B, T, 1, D) + torch.randn(B, T, Hkv, D)
    wanted = topic[torch.randint(nb, (B, T, Hkv))].repeat_interleave(H // Hkv, dim=2)  # [B,T,H,D]
    q, v = wanted + torch.randn(B, T, H, D), torch.randn(B, T, Hkv, D)
    out, lse = dense_attention(q, k, v)
    everything = select_blocks(torch.randn(B, T, Hkv, Di), torch.randn(B, T, Di), block, nb)
    diff = (sparse_attention(q, k, v, everything, block)[0] - out).abs().max().item()
    print(f"q {list(q.shape)}, k and v {list(k.shape)}: {H} query heads in {Hkv} groups, {nb} blocks of {block} keys, {K} kept a query")
    print(f"keeping all {nb} blocks IS dense attention: largest difference {diff:.0e}")
    print("The index branch imitates the main branch (warm-up: KL over everything visible):")
    wq, wk = (nn.Parameter(torch.randn(D, Di) / D**0.5) for _ in range(2))
    optimizer = torch.optim.Adam([wq, wk], lr=0.03)
    for step in range(41):
        iq, ik = q.unflatten(2, (Hkv, -1)).mean(3) @ wq, k.mean(2) @ wk  # [B,T,Hkv,Di], [B,T,Di]
        loss = index_kl(q, k, lse, iq, ik, None, block)
        if step % 20 == 0:
            ids = select_blocks(iq, ik, block, K)
            _, mass = selection_recall(q, k, ids, block)
            print(f"  step {step:2d}: KL {loss.item():.2f}; {K * block} kept tokens hold {mass:.0%} of the dense attention")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for g in range(Hkv):
        print(f"the last query's group {g} keeps blocks {sorted(ids[0, g, -1].tolist())}")
    if args.draw:
        draw(args.draw, iq, ik, ids, block, H // Hkv)
        print(f"drawn: {args.draw}")


if __name__ == "__main__":
    main()
