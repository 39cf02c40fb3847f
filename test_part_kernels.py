"""The Triton kernels against the PyTorch reference: interpreted on the CPU at small sizes, on a GPU at real ones too."""

import math
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

import kernels
import msa

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter cannot multiply bfloat16


def ratio(name, got, want):
    r = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
    print(f"{name}: RMS error ratio {r:.2e}")
    return r.item()


def make(B, T, S, H, Hkv, D, Di, lens=None, dtype=torch.float32, seed=0, poison=True):
    """q, k, v, iq, ik, lens with NaN in all memory beyond the lengths."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, T, H, D), (B, S, Hkv, D), (B, S, Hkv, D), (B, T, Hkv, Di), (B, S, Di))
    xs = [torch.randn(*s, generator=g).to(dtype).to(DEVICE) for s in shapes]
    if lens is not None:
        lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        for b in range(B):
            for x in (xs[1], xs[2], xs[4]) if poison else ():
                x[b, lens[b] :] = float("nan")
    return (*xs, lens)


def selections_agree(got, want):
    assert got.shape == want.shape and got.dtype == torch.int32
    assert ((got >= 0).int().diff(dim=-1) <= 0).all(), "valid ids come first"
    return (got.sort(-1).values == want.sort(-1).values).all(-1).float().mean().item()


def everything(case, dtype=torch.float32, seed=0, ids=None):
    """Selection, attention, both KLs and all gradients of one shape against the fp32 reference; -> the worst RMS error ratio."""
    B, T, S, H, Hkv, D, Di, block, K, lens = case
    *xs, lens = make(B, T, S, H, Hkv, D, Di, lens, dtype, seed)
    xs = [x.requires_grad_() for x in xs]
    ys = [x.detach().float().requires_grad_() for x in xs]
    if ids is None:
        ids = kernels.select_blocks(xs[3], xs[4], block, K, lens)
        same = selections_agree(ids, msa.select_blocks(ys[3], ys[4], block, K, lens, backend="torch"))
        print(f"{case} {dtype}: {same:.2%} of the selections equal")
        assert same == 1.0 if DEVICE == "cpu" else same > 0.999  # a GPU may add the products in another order: near-ties
    do = torch.randn(B, T, H, D, generator=torch.Generator().manual_seed(seed + 1)).to(DEVICE)
    out, lse = kernels.sparse_attention(xs[0], xs[1], xs[2], ids, block, lens)
    out_, lse_ = msa.sparse_attention(ys[0], ys[1], ys[2], ids, block, lens, backend="torch")
    assert out.dtype == dtype and lse.dtype == torch.float32 and not lse.requires_grad
    some = lse_.isfinite()
    assert (some == lse.isfinite()).all() and not out.transpose(1, 2)[~some].any()
    kl = kernels.index_kl(xs[0], xs[1], lse, xs[3], xs[4], ids, block, lens)
    kl_ = msa.index_kl(ys[0], ys[1], lse_, ys[3], ys[4], ids, block, lens, backend="torch")
    dense = msa.dense_attention(ys[0], ys[1], ys[2], lens)[1]
    warm = kernels.index_kl(xs[0], xs[1], dense, xs[3], xs[4], None, block, lens)
    warm_ = msa.index_kl(ys[0], ys[1], dense, ys[3], ys[4], None, block, lens, backend="torch")
    r = [ratio("out", out, out_), ratio("lse", lse[some], lse_[some]), ratio("KL", kl, kl_), ratio("warm-up KL", warm, warm_)]
    for names, got, want in (
        ("q k v", torch.autograd.grad((out.float() * do).sum(), xs[:3]), torch.autograd.grad((out_ * do).sum(), ys[:3])),
        ("iq ik", torch.autograd.grad(3 * kl, xs[3:]), torch.autograd.grad(3 * kl_, ys[3:])),
        ("warm-up iq ik", torch.autograd.grad(warm, xs[3:]), torch.autograd.grad(warm_, ys[3:])),
    ):
        for name, a, b in zip(names.removeprefix("warm-up ").split(), got, want):
            assert a.dtype == dtype
            error = ratio(f"{'warm-up ' if 'warm' in names else ''}d{name}", a, b)
            r.append(error if b.abs().max() > 1e-6 else a.abs().max().item())  # with one visible key a softmax has no gradient
    assert max(r) < float("inf") and not any(math.isnan(x) for x in r)
    return max(r)


SHAPES_THAT_BREAK_KERNELS = [  # B, T, S, H, Hkv, D, Di, block, K, lens
    (1, 1, 1, 2, 2, 16, 16, 16, 2, None),
    (1, 15, 15, 2, 1, 16, 16, 16, 2, None),
    (1, 16, 16, 16, 1, 16, 16, 16, 16, None),  # T == H, one block, K above the block count
    (2, 17, 17, 3, 1, 16, 32, 16, 3, None),  # G 3 is padded to 4
    (1, 49, 49, 6, 2, 32, 16, 16, 2, None),
    (1, 50, 50, 2, 1, 16, 16, 24, 2, None),  # a block that is no power of two
    (2, 3, 90, 4, 4, 16, 16, 16, 3, [90, 37]),  # S much longer than T
    (3, 6, 24, 4, 2, 16, 16, 16, 1, [2, 6, 24]),  # rows shorter than T
    (1, 33, 130, 4, 2, 64, 64, 64, 2, [129]),
]


@pytest.mark.parametrize("case", SHAPES_THAT_BREAK_KERNELS)
def test_kernels_equal_the_reference(case):
    """Guards every mask: block-1, block, block+1, k*block+1, G 1, 3 and 16, poisoned tails, dk and dv of a last short block."""
    assert everything(case) < 1e-4


def test_kernels_in_half_precision():
    """Half-precision products must be summed in fp32, and softmax, log-sum-exp and KL taken in fp32."""
    assert everything((1, 40, 70, 4, 2, 32, 32, 16, 3, [65]), HALF) < 1e-2


def test_kernels_twenty_fresh_seeds():
    """A lucky seed hides an off-by-one at a block edge."""
    for seed in range(20):
        B, T, S = 1, 5 + seed % 3, 17 + seed
        q, k, v, iq, ik, _ = make(B, T, S, 4, 2, 16, 16, seed=100 + seed)
        ids = kernels.select_blocks(iq, ik, 16, 2)
        assert selections_agree(ids, msa.select_blocks(iq, ik, 16, 2, backend="torch")) == 1
        got, want = kernels.sparse_attention(q, k, v, ids, 16)[0], msa.sparse_attention(q, k, v, ids, 16, backend="torch")[0]
        assert ratio(f"seed {seed}", got, want) < 1e-4


def test_kernel_selection_oracle_of_zeros():
    """Ties go to the lower block id and the local block takes one of the K slots."""
    ids = kernels.select_blocks(torch.zeros(1, 18 * 16, 1, 16, device=DEVICE), torch.zeros(1, 18 * 16, 16, device=DEVICE), 16, 16)
    assert set(ids[0, 0, -1].tolist()) == {*range(15), 17}


def test_kernel_selection_of_wild_scores():
    """NaN ranks lowest, infinities and -0 rank as themselves, all as in the reference; a NaN key once won every top-k."""
    iq, ik = (
        torch.ones(1, 160, 2, 16, device=DEVICE),
        torch.randn(1, 160, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE),
    )
    for at, value in ((17, float("nan")), (40, float("inf")), (50, -float("inf")), (70, 1e30)):
        ik[:, at : at + 3] = value
    ik[:, 96:112] = float("nan")  # a whole block of it
    ik[:, 80:96], ik[:, 112:128] = -0.0, 0.0
    for K in (1, 2, 4, 8):
        got, want = kernels.select_blocks(iq, ik, 16, K), msa.select_blocks(iq, ik, 16, K, backend="torch")
        assert selections_agree(got, want) == 1, K
    assert 6 not in kernels.select_blocks(iq, ik, 16, 8)[0, 0, -1].tolist()


@pytest.mark.parametrize("ties", [False, True])
def test_kernel_selection_in_segments(monkeypatch, ties):
    """Past 4,096 blocks the winners of segments are ranked again: the local block must survive, ties still go to the lower id."""
    monkeypatch.setattr(kernels, "MAX_SEGMENT", 8)
    iq, ik = make(2, 9, 560, 2, 2, 16, 16)[3:5]
    if ties:
        iq, ik = iq.sign(), ik.sign()  # small integers: many equal scores
    lens = torch.tensor([555, 300], dtype=torch.int32, device=DEVICE)
    for K in (1, 3, 16):
        got, want = kernels.select_blocks(iq, ik, 16, K, lens), msa.select_blocks(iq, ik, 16, K, lens, backend="torch")
        assert selections_agree(got, want) == 1, K


def test_kernel_pieces_change_nothing(monkeypatch):
    """Memory is bounded by working in pieces and chunks: their edges must not show, nor a query be lost between two of them."""
    case = (2, 150, 150, 2, 1, 16, 16, 16, 2, [150, 140])
    monkeypatch.setattr(kernels, "BUDGET", 128 * 2 * 2 * 16 * 4)  # 128 queries at a time
    monkeypatch.setattr(kernels, "_chunk", lambda *a: 48)
    assert everything(case) < 1e-4


def test_useless_ids_are_harmless():
    """Future, repeated, missing and absurd ids are masked, not trusted: none enters an address, none counts twice."""
    B, T, K = 1, 40, 5
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, 4, (B, 2, T, K), generator=g).int()
    ids[..., 3] = ids[..., 0]
    ids[0, 0, 3] = -1  # a row without any block
    ids[0, 1, 5] = torch.tensor([2, -7, 2**31 - 1, -(2**31), 99])  # one future block and rubbish: nothing is visible
    assert everything((B, T, T, 4, 2, 16, 16, 16, K, None), ids=ids.to(DEVICE)) < 1e-4


def test_kernel_steps_equal_one_go():
    """Prefill in uneven chunks and decoding token by token on a preallocated cache give what one pass gives."""
    S, block, K = 50, 16, 2
    q, k, v, iq, ik, _ = make(1, S, S, 4, 2, 16, 16)
    cache = [torch.full((1, 64, *x.shape[2:]), float("nan"), device=DEVICE) for x in (k, v, ik)]
    ids = kernels.select_blocks(iq, ik, block, K)
    want = kernels.sparse_attention(q, k, v, ids, block)[0]
    outs, at = [], 0
    for n in (13, 18, *[1] * 5, 4, 2, 8):
        for c, x in zip(cache, (k, v, ik)):
            c[:, at : at + n] = x[:, at : at + n]
        at += n
        lens = torch.tensor([at], dtype=torch.int32, device=DEVICE)
        step = kernels.select_blocks(iq[:, at - n : at], cache[2], block, K, lens)
        assert selections_agree(step, ids[:, :, at - n : at]) == 1
        outs.append(kernels.sparse_attention(q[:, at - n : at], cache[0], cache[1], step, block, lens)[0])
    assert at == S and ratio("stepwise", torch.cat(outs, 1), want) < 1e-5


def test_forward_is_deterministic():
    """The lists are filled by atomic adds, in any order; the output must not depend on it."""
    q, k, v, iq, ik, _ = make(1, 70, 70, 4, 2, 16, 16)
    ids = kernels.select_blocks(iq, ik, 16, 2)
    a, b = kernels.sparse_attention(q, k, v, ids, 16), kernels.sparse_attention(q, k, v, ids.flip(-1), 16)
    again = kernels.sparse_attention(q, k, v, ids, 16)
    assert torch.equal(a[0], again[0]) and torch.equal(a[1], again[1])
    assert ratio("slots in another order", b[0], a[0]) < 1e-6


def test_kernels_are_good_operators():
    """torch.library's own checks: schema, fake shapes and strides, autograd registration, tracing with dynamic shapes."""
    q, k, v, iq, ik, lens = make(1, 6, 20, 2, 1, 16, 16, [18], poison=False)
    xs = [x.requires_grad_() for x in (q, k, v, iq, ik)]
    ids = kernels.select_blocks(iq, ik, 16, 2, lens)
    _, lse = kernels.sparse_attention(q, k, v, ids, 16, lens)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.nanom3.select_blocks, (iq.detach(), ik.detach(), 16, 2, lens), test_utils=checks)
    torch.library.opcheck(torch.ops.nanom3.sparse_attention, (*xs[:3], ids, 16, lens, 0.25), test_utils=checks)
    torch.library.opcheck(
        torch.ops.nanom3.index_kl, (q.detach(), k.detach(), lse, *xs[3:], ids, 16, lens, 0.25), test_utils=checks
    )
    torch.library.opcheck(
        torch.ops.nanom3.index_kl, (q.detach(), k.detach(), lse, *xs[3:], None, 16, None, 0.25), test_utils=checks
    )


def test_kernels_under_compile():
    """torch.compile must see one graph, and give the gradients that eager gives."""
    q, k, v, iq, ik, _ = make(1, 20, 20, 2, 1, 16, 16)
    xs = [x.requires_grad_() for x in (q, k, v, iq, ik)]

    def layer(q, k, v, iq, ik):
        ids = kernels.select_blocks(iq * 2, ik, 16, 1)
        out, lse = kernels.sparse_attention(q * 2, k, v, ids, 16)
        return (out * out).sum() + kernels.index_kl(q * 2, k, lse, iq * 2, ik, ids, 16)

    want = torch.autograd.grad(layer(*xs), xs)
    got = torch.autograd.grad(
        torch.compile(layer, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")(*xs), xs
    )
    assert all(ratio(n, a, b) < 1e-5 for n, a, b in zip(("q", "k", "v", "iq", "ik"), got, want))


def test_kernel_guards_name_the_argument():
    """A wrong dtype, shape, device or size must be one sentence that names the argument, not a fault inside a kernel."""
    q, k, v, iq, ik, _ = make(1, 20, 20, 4, 2, 16, 16)
    ids = kernels.select_blocks(iq, ik, 16, 1)
    lse = torch.zeros(1, 4, 20, device=DEVICE)
    for bad, what in (
        (lambda: kernels.select_blocks(iq, ik[..., :8], 16, 1), "ik"),
        (lambda: kernels.select_blocks(iq, ik.double(), 16, 1), "ik"),
        (lambda: kernels.select_blocks(iq, ik, 8, 1), "block_size"),
        (lambda: kernels.select_blocks(iq, ik, 16, 65), "topk"),
        (lambda: kernels.select_blocks(iq, ik, 16, 1, torch.tensor([1.0])), "lens"),
        (lambda: kernels.select_blocks(iq, ik[:, :10], 16, 1), "iq has 20"),
        (lambda: kernels.sparse_attention(q, k.half(), v, ids, 16), "k must be"),
        (lambda: kernels.sparse_attention(q, k, v[:, :10], ids, 16), "v must"),
        (lambda: kernels.sparse_attention(q, k, v, ids.long(), 16), "ids must be torch.int32"),
        (lambda: kernels.sparse_attention(q, k, v, ids[:, :1], 16), "ids must have shape"),
        (lambda: kernels.sparse_attention(q[:, :, :3], k, v, ids, 16), "3 query heads on 2"),
        (lambda: kernels.sparse_attention(q.double(), k.double(), v.double(), ids, 16), "float64"),
        (lambda: kernels.index_kl(q, k, lse[:, :2], iq, ik, ids, 16), "lse"),
        (lambda: kernels.index_kl(q, k, lse, iq[:, :, :1], ik, ids, 16), "iq"),
    ):
        with pytest.raises(ValueError, match=what):
            bad()


def test_tiles_of_a_small_card(monkeypatch):
    """Cards with 100 KB of shared memory get tiles of their own; the results must not depend on the tiles."""
    monkeypatch.setattr(kernels, "SHARED_MEMORY", 100_000)
    assert kernels._tiles("kl", HALF, 128, 128)[0] < 128 and kernels.supported(torch.float32, 128, 128, 128) is not None
    assert everything((1, 40, 70, 4, 2, 16, 16, 16, 3, [65]), HALF) < 1e-2


# ---- the same at real sizes, on a GPU only ----


needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="a GPU's sizes")


@needs_gpu
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ((1, 2048, 2048, 64, 4, 128, 128, 128, 4, None), torch.bfloat16),
        ((2, 1100, 1200, 8, 4, 64, 64, 64, 8, [1200, 700]), torch.bfloat16),
        ((2, 1100, 1200, 8, 4, 64, 64, 64, 8, [1200, 700]), torch.float16),
        ((1, 577, 577, 12, 4, 64, 64, 64, 4, None), torch.float32),
        ((2, 300, 900, 3, 1, 32, 16, 32, 5, [900, 450]), torch.bfloat16),
        ((1, 333, 333, 2, 2, 128, 64, 48, 3, None), torch.bfloat16),
    ],
)
def test_kernels_on_the_gpu(case, dtype):
    """Real tiles, real tensor cores: the interpreter knows neither shared memory nor races nor the order of sums."""
    assert everything(case, dtype) < (1e-4 if dtype == torch.float32 else 1e-2)


@needs_gpu
def test_offsets_beyond_two_billion_elements():
    """q of 270,000 x 64 x 128 has 2.2e9 elements: a 32-bit offset would wrap around and read another query."""
    T, H, Hkv, D, block = 270_000, 64, 4, 128, 128
    q, k, v = (torch.randn(1, T, h, D, device=DEVICE, dtype=HALF) for h in (H, Hkv, Hkv))
    local = torch.arange(T, device=DEVICE) // block
    ids = torch.stack((local, torch.zeros_like(local)), -1).int().expand(1, Hkv, T, 2)
    out, lse = kernels.sparse_attention(q, k, v, ids, block)
    want = msa.sparse_attention(q[:, -16:], k, v, ids[:, :, -16:], block, backend="torch")
    assert ratio("last out", out[:, -16:], want[0]) < 1e-2 and ratio("last lse", lse[..., -16:], want[1]) < 1e-2


@needs_gpu
def test_extra_memory_is_bounded():
    """At most 4 GB beyond inputs, outputs and gradients: partial results of all of 64K queries would be 17 GB."""
    T, H, Hkv, D, block = 65_536, 64, 4, 128, 128
    q, k, v = (torch.randn(1, T, h, D, device=DEVICE, dtype=HALF).requires_grad_() for h in (H, Hkv, Hkv))
    iq, ik = torch.randn(1, T, Hkv, D, device=DEVICE, dtype=HALF), torch.randn(1, T, D, device=DEVICE, dtype=HALF)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ids = kernels.select_blocks(iq, ik, block, 16)
    out, _ = kernels.sparse_attention(q, k, v, ids, block)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    extra = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in (ids, out, out, *grads))
    print(f"extra memory {extra / 2**30:.2f} GB")
    assert extra < 4 * 2**30
