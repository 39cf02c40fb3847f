# ---- Kernels, against the reference: interpreted on the CPU at small sizes, on the GPU at real ones ----


def kernel_case(B, T, S, H, Hkv, D, Di, block, K, lens=None, dtype=torch.float32, device="cpu", poison=True):
    """Run selection, attention and KL with their gradients through both backends -> {name: RMS error ratio}, the share of equal id sets."""
    pytest.importorskip("triton")
    make = lambda *s: torch.randn(*s, device=device).to(dtype)
    q, k, v, iq, ik = make(B, T, H, D), make(B, S, Hkv, D), make(B, S, Hkv, D), make(B, T, Hkv, Di), make(B, S, Di)
    if lens is not None:
        lens = torch.tensor(lens, dtype=torch.int32, device=device)
        for b in range(B if poison else 0):
            for x in (k, v, ik):
                x[b, lens[b] :] = float("nan")
    do = make(B, T, H, D)
    results, errors = [], {}
    for backend, kind in (("torch", torch.float32), ("triton", dtype)):
        args = [x.to(kind).clone().requires_grad_() for x in (q, k, v, iq, ik)]
        ids = msa.select_blocks(args[3], args[4], block, K, lens, backend)
        if backend == "torch":
            first = ids  # attention and KL are compared on one selection
        out, lse = msa.sparse_attention(*args[:3], first, block, lens, backend=backend)
        kl = msa.index_kl(args[0], args[1], lse, args[3], args[4], first, block, lens, backend=backend)
        whole_lse = msa.dense_attention(*args[:3], lens)[1]
        warm = msa.index_kl(args[0], args[1], whole_lse, args[3], args[4], None, block, lens, backend=backend)
        grads = torch.autograd.grad((out * do).sum(), args[:3]) + torch.autograd.grad(kl, args[3:]) + torch.autograd.grad(warm, args[3:])
        names = ("dq", "dk", "dv", "kl diq", "kl dik", "warm diq", "warm dik")
        results.append({"out": out, "lse": lse.clamp(min=-1e4), "kl": kl, "warm-up kl": warm, **dict(zip(names, grads)), "ids": ids})
    want, got = results
    same = (want.pop("ids").sort(-1).values == got.pop("ids").sort(-1).values).all(-1).float().mean().item()
    for name, x in want.items():
        y = got[name].detach().float()
        assert y.isfinite().all(), name
        errors[name] = ratio(name, y, x.detach().float())
    print(f"equal selections: {same:.4%}")
    return errors, same


KERNEL_CASES = [  # B, T, S, H, Hkv, D, Di, block, K, lens
    (1, 1, 1, 1, 1, 16, 16, 16, 3, None),
    (1, 15, 15, 2, 2, 16, 32, 16, 2, None),
    (2, 33, 33, 6, 2, 16, 16, 16, 2, None),
    (1, 3, 67, 16, 1, 32, 16, 16, 3, None),
    (2, 5, 40, 2, 1, 16, 16, 16, 2, [40, 3]),
    (1, 16, 16, 16, 4, 16, 16, 16, 64, None),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the real sizes")
@pytest.mark.parametrize("case", KERNEL_CASES)
def test_kernels_interpreted(case):
    """Every output and gradient in fp32 with IEEE dots at sizes that break tiles: T = 1, block - 1, 2 * block + 1, G = 1, 3, 16, a row shorter than T,
    K above the block count, NaN beyond every tail."""
    *shape, lens = case
    errors, same = kernel_case(*shape, lens)
    assert max(errors.values()) < 1e-4 and same == 1.0


GPU_CASES = [
    (2, 1000, 1000, 8, 4, 64, 64, 64, 4, None),
    (1, 2049, 2049, 16, 1, 128, 128, 128, 3, None),
    (2, 300, 1500, 6, 2, 32, 64, 32, 5, [1500, 211]),
    (1, 513, 513, 4, 4, 128, 32, 16, 16, None),
    (3, 7, 777, 12, 4, 64, 64, 64, 4, [777, 5, 64]),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("case", GPU_CASES)
def test_kernels_on_the_gpu(case, dtype, limit):
    """The same at real sizes: fp32 with IEEE dots, and bf16 against an fp32 reference of the same rounded inputs."""
    torch.backends.cuda.matmul.allow_tf32 = False
    *shape, lens = case
    errors, same = kernel_case(*shape, lens, dtype=dtype, device="cuda")
    assert max(errors.values()) < limit and same > (0.9999 if dtype == torch.float32 else 0.99)


def test_kernel_selection_oracle():
    """Ties to the lower id, local block kept, fewer blocks than K, NaN lowest: the top-k kernel is its own code and needs its own oracle."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    zeros = lambda *s: torch.zeros(*s, device=device)
    ids = msa.select_blocks(zeros(1, 4, 1, 16), zeros(1, 18 * 16, 16), 16, 16, backend="triton")
    assert set(ids[0, 0, -1].tolist()) == {*range(15), 17}
    ids = msa.select_blocks(zeros(1, 4, 1, 16), zeros(1, 40, 16), 16, 5, backend="triton")
    assert ids[0, 0, -1].tolist() == [2, 0, 1, -1, -1]
    ik = zeros(1, 64, 16) + 1
    ik[:, 16:32] = float("nan")
    assert 1 not in msa.select_blocks(zeros(1, 1, 1, 16) + 1, ik, 16, 3, backend="triton")[0, 0, -1].tolist()


def test_kernels_survive_bad_ids():
    """-1 in the middle, duplicates, future and absurd ids never become addresses."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v, _, _ = (x.to(device) for x in inputs(1, 40, 40, 2, 1, 16, 16))
    ids = torch.tensor([-1, 0, 0, 99, 2, -7, 2**30], dtype=torch.int32, device=device).expand(1, 1, 40, 7)
    want, lse = msa.sparse_attention(q, k, v, ids, 16, backend="torch")
    got, got_lse = msa.sparse_attention(q, k, v, ids, 16, backend="triton")
    assert ratio("out", got, want) < 1e-4 and ratio("lse", got_lse, lse) < 1e-4
    none = torch.full_like(ids, -1)
    out, lse = msa.sparse_attention(q, k, v, none, 16, backend="triton")
    assert (out == 0).all() and (lse == float("-inf")).all()


def test_kernels_are_proper_operators():
    """torch.library's own check of schemas, shapes under fake tensors and autograd registration."""
    pytest.importorskip("triton")
    import kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v, iq, ik = (x.to(device).requires_grad_() for x in inputs(1, 20, 20, 2, 1, 16, 16))
    ids = msa.select_blocks(iq, ik, 16, 2)
    torch.library.opcheck(kernels._select_op, (iq.detach(), ik.detach(), 16, 2, None))
    torch.library.opcheck(kernels._attention_op, (q, k, v, ids, 16, None, 0.25))
    lse = msa.sparse_attention(q, k, v, ids, 16)[1]
    torch.library.opcheck(kernels._kl_op, (q.detach(), k.detach(), lse, iq, ik, ids, 16, None, 0.25))


def test_unsupported_shapes_fall_back_and_say_so(capsys):
    """A shape without a kernel runs on the reference with one printed line, instead of failing or silently differing."""
    pytest.importorskip("triton")
    msa._print_once.cache_clear()
    q, k, v, iq, ik = inputs(1, 12, 12, 2, 1, 24, 24)
    ids = msa.select_blocks(iq, ik, 5, 2, backend="triton")
    out, _ = msa.sparse_attention(q, k, v, ids, 5, backend="triton")
    assert torch.equal(out, msa.sparse_attention(q, k, v, ids, 5)[0]) and "reference" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_layer_equals_eager():
    """torch.compile must keep the operators whole: same output, KL and gradients, no graph break."""
    torch.manual_seed(8)
    layer = msa.MSA(layer_config(hidden_size=128, num_attention_heads=8, num_key_value_heads=4, index_n_heads=4, index_block_size=16), sparse=True).cuda()
    x, cs = torch.randn(2, 100, 128, device="cuda", requires_grad=True), [c.cuda() for c in rope(100)]
    compiled, got = torch.compile(layer, fullgraph=True), []
    for f in (layer, compiled):
        out, kl = f(x, *cs)
        grads = torch.autograd.grad(out.square().sum() + kl, [x, *layer.parameters()])
        got.append([out, kl, *grads])
    for a, b in zip(*got):
        assert ratio("compiled", b, a) < 1e-3
