"""MSA against its definition, then training, checkpoints and sampling end to end (merged into test_all.py)."""

import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import msa

HERE = Path(__file__).parent


def ratio(name, got, want):
    # the 1e-3 is for gradients that are truly zero
    r = (got.double() - want.double()).norm() / (want.double().norm() + 1e-3)
    print(f"{name}: RMS error ratio {r:.2e}")
    return r.item()


# ---- MSA ----


def rand(*shape, seed=None, **kw):
    g = torch.Generator().manual_seed(seed) if seed is not None else None
    return torch.randn(*shape, generator=g, **kw)


def inputs(B, T, S, H, Hkv, D, Di, dtype=torch.float32):
    return rand(B, T, H, D, dtype=dtype), rand(B, S, Hkv, D, dtype=dtype), rand(B, S, Hkv, D, dtype=dtype), rand(B, T, Hkv, Di), rand(B, S, Di)


def slow_msa(q, k, v, iq, ik, block, K, lens=None):
    """MSA one query at a time, from the paper's sentences, in fp64 with Python sets: shares no line with msa.py."""
    B, T, H, D = q.shape
    S, Hkv, G = k.shape[1], k.shape[2], H // k.shape[2]
    out, picks = torch.zeros(B, T, H, D, dtype=torch.float64), {}
    for b, t, g in itertools.product(range(B), range(T), range(Hkv)):
        p = (S if lens is None else int(lens[b])) - T + t
        if p < 0:
            picks[b, t, g] = set()
            continue
        score = [(iq[b, t, g].double() @ ik[b, s].double()).item() for s in range(p + 1)]
        local = p // block
        best = sorted(range(local), key=lambda n: (-max(score[n * block : (n + 1) * block]), n))
        picks[b, t, g] = {local, *best[: K - 1]}
        seen = [s for s in range(p + 1) if s // block in picks[b, t, g]]
        for h in range(g * G, (g + 1) * G):
            w = (k[b, seen, g].double() @ q[b, t, h].double() / D**0.5).softmax(0)
            out[b, t, h] = w @ v[b, seen, g].double()
    return out, picks


def check_against_slow(case):
    B, T, S, H, Hkv, block, K, lens = case
    q, k, v, iq, ik = inputs(B, T, S, H, Hkv, 16, 16)
    lens = None if lens is None else torch.tensor(lens, dtype=torch.int32)
    ids = msa.select_blocks(iq, ik, block, K, lens)
    out, lse = msa.sparse_attention(q, k, v, ids, block, lens)
    want, picks = slow_msa(q, k, v, iq, ik, block, K, lens)
    for (b, t, g), chosen in picks.items():
        row = ids[b, g, t].tolist()
        n = len(chosen)
        assert set(row[:n]) == chosen and row[n:] == [-1] * (K - n), (case, b, t, g, row, chosen)
    assert ids.shape == (B, Hkv, T, K) and ids.dtype == torch.int32 and lse.shape == (B, H, T)
    return ratio(f"sparse_attention {case}", out, want)


CASES = [  # B, T, S, H, Hkv, block, K, lens
    (1, 1, 1, 2, 1, 4, 3, None),
    (2, 7, 7, 4, 2, 8, 2, None),
    (1, 8, 8, 3, 3, 8, 1, None),
    (1, 9, 9, 6, 2, 8, 2, None),
    (2, 33, 33, 4, 4, 8, 3, None),
    (1, 3, 41, 16, 1, 8, 4, None),
    (2, 4, 40, 4, 2, 8, 3, [40, 13]),
    (3, 6, 24, 6, 2, 4, 2, [2, 6, 24]),
    (1, 16, 16, 16, 16, 4, 9, None),  # T == H, and K above the block count
]


@pytest.mark.parametrize("case", CASES)
def test_msa_equals_its_definition(case):
    """Guards selection, masking and group layout at ragged sizes, T == H, K above the block count and rows shorter than T."""
    assert check_against_slow(case) < 1e-5


def test_msa_twenty_fresh_seeds():
    """A lucky seed hides an off-by-one at a block edge."""
    for seed in range(20):
        torch.manual_seed(1000 + seed)
        assert check_against_slow((1, 5 + seed % 3, 17 + seed, 4, 2, 4, 3, None)) < 1e-5


def test_selection_oracle_of_zeros():
    """Ties go to the lower block id and the local block takes one of the K slots: torch.topk alone breaks ties otherwise."""
    ids = msa.select_blocks(torch.zeros(1, 18 * 8, 1, 16), torch.zeros(1, 18 * 8, 16), 8, 16)
    assert set(ids[0, 0, -1].tolist()) == {*range(15), 17}


def test_nan_scores_rank_lowest():
    """A NaN index key once won every top-k, because NaN sorts first in descending order."""
    iq, ik = torch.ones(1, 64, 1, 16), torch.ones(1, 64, 16)
    ik[:, 8:16] = float("nan")
    ids = msa.select_blocks(iq, ik, 8, 4)
    assert 1 not in ids[0, 0, -1].tolist()


def test_few_blocks_is_dense():
    """With S <= K * block the result IS dense attention; the first unit test of any MSA."""
    q, k, v, iq, ik = inputs(2, 50, 50, 4, 2, 16, 16)
    out, lse = msa.sparse_attention(q, k, v, msa.select_blocks(iq, ik, 8, 7), 8)
    want, want_lse = msa.dense_attention(q, k, v)
    assert ratio("out", out, want) < 1e-6 and ratio("lse", lse, want_lse) < 1e-6
    assert ratio("full_attention", msa.full_attention(q, k, v), want) < 1e-5


def test_groups_keep_their_own_blocks():
    """Two groups that want different far blocks must not be merged (as a shared selection would)."""
    iq, ik = torch.zeros(1, 64, 2, 16), torch.zeros(1, 64, 16)
    iq[..., 0, 0] = 1
    iq[..., 1, 1] = 1
    ik[:, 16:24, 0], ik[:, 40:48, 1] = 5, 5
    ids = msa.select_blocks(iq, ik, 8, 2)
    assert set(ids[0, 0, -1].tolist()) == {2, 7} and set(ids[0, 1, -1].tolist()) == {5, 7}


def test_poisoned_tails_change_nothing():
    """Memory past lens may hold NaN: a masked weight of 0 times NaN is NaN. Any amount of right padding must change nothing."""
    B, T, S = 2, 5, 40
    q, k, v, iq, ik = inputs(B, T, S, 4, 2, 16, 16)
    lens = torch.tensor([23, 9], dtype=torch.int32)
    args = [x.clone() for x in (k, v, ik)]
    for b in range(B):
        for x in args:
            x[b, lens[b] :] = float("nan")
    for (kk, vv, ii), n in ((args, S), ([x[:, :24] for x in (k, v, ik)], 24)):
        q_ = q.clone().requires_grad_()
        iq_ = iq.clone().requires_grad_()
        ids = msa.select_blocks(iq_, ii, 8, 2, lens)
        out, lse = msa.sparse_attention(q_, kk, vv, ids, 8, lens)
        kl = msa.index_kl(q_, kk, lse, iq_, ii, ids, 8, lens)
        (out.sum() + kl).backward()
        got = [out.detach(), lse, kl.detach(), q_.grad, iq_.grad]
        assert all(x.isfinite().all() for x in got), n
        if n == S:
            first = got
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first, got))
        assert msa.full_attention(q, kk, vv, lens).isfinite().all()


def test_queries_before_the_start_see_nothing():
    """A row shorter than T: ids -1, output 0, lse -inf, nothing in the loss, gradient 0 and not NaN."""
    q, k, v, iq, ik = inputs(1, 6, 8, 2, 1, 16, 16)
    lens = torch.tensor([4], dtype=torch.int32)  # queries stand at -2 .. 3
    q[:, :2], iq[:, :2] = float("nan"), float("nan")  # and may hold anything
    q.requires_grad_(), iq.requires_grad_()
    ids = msa.select_blocks(iq, ik, 4, 2, lens)
    out, lse = msa.sparse_attention(q, k, v, ids, 4, lens)
    assert (ids[:, :, :2] == -1).all() and (out[:, :2] == 0).all() and (lse[:, :, :2] == float("-inf")).all()
    kl = msa.index_kl(q, k, lse, iq, ik, ids, 4, lens)
    short = torch.tensor([4], dtype=torch.int32)
    same = msa.index_kl(q[:, 2:], k, lse[:, :, 2:], iq[:, 2:], ik, ids[:, :, 2:], 4, short)
    assert torch.allclose(kl, same)
    (out.sum() + kl).backward()
    assert q.grad.isfinite().all() and (iq.grad[:, :2] == 0).all() and iq.grad.isfinite().all()


def test_bad_ids_are_harmless():
    """Future blocks, duplicates, -1 in the middle and ids past the end are masked, not trusted."""
    q, k, v, _, _ = inputs(1, 20, 20, 2, 1, 16, 16)
    clean = torch.full((1, 1, 20, 2), -1, dtype=torch.int32)
    clean[..., 0] = 0
    dirty = torch.tensor([-1, 0, 0, 99, 4], dtype=torch.int32).expand(1, 1, 20, 5).clone()
    dirty[0, 0, 16:, 4] = -1  # block 4 is in the future of queries 0 .. 15 only
    assert torch.equal(msa.sparse_attention(q, k, v, dirty, 4)[0][:, :16], msa.sparse_attention(q, k, v, clean, 4)[0][:, :16])
    nothing = torch.full((1, 1, 20, 2), -1, dtype=torch.int32)
    out, lse = msa.sparse_attention(q, k, v, nothing, 4)
    assert (out == 0).all() and (lse == float("-inf")).all()


@pytest.mark.parametrize("chunks", [[1] * 37, [5, 16, 1, 15], [36, 1]])
def test_chunked_prefill_equals_one_go(chunks):
    """Selections and outputs of uneven chunks on a preallocated cache equal one pass, across block edges."""
    torch.manual_seed(3)
    T, cap = 37, 50
    q, k, v, iq, ik = inputs(1, T, T, 4, 2, 16, 16)
    ids = msa.select_blocks(iq, ik, 4, 3)
    out, _ = msa.sparse_attention(q, k, v, ids, 4)
    ck, cv, ci = (torch.full((1, cap, *x.shape[2:]), float("nan")) for x in (k, v, ik))
    at, parts, idparts = 0, [], []
    for n in chunks:
        ck[:, at : at + n], cv[:, at : at + n], ci[:, at : at + n] = k[:, at : at + n], v[:, at : at + n], ik[:, at : at + n]
        lens = torch.tensor([at + n], dtype=torch.int32)
        idparts.append(msa.select_blocks(iq[:, at : at + n], ci, 4, 3, lens))
        parts.append(msa.sparse_attention(q[:, at : at + n], ck, cv, idparts[-1], 4, lens)[0])
        at += n
    assert torch.equal(torch.cat(idparts, 2).sort().values, ids.sort().values)
    assert ratio("chunked", torch.cat(parts, 1), out) < 1e-5


@pytest.mark.parametrize("whole", [False, True])
def test_index_kl_value_and_gradient(whole):
    """Teacher = mean of the heads' softmaxes (not softmax of the mean); d loss / d student logit = (student - teacher) / count; both stages."""
    torch.manual_seed(4)
    B, T, H, Hkv, D, Di, block, K = 2, 19, 6, 2, 16, 8, 4, 3
    q, k, v, iq, ik = (x.double() for x in inputs(B, T, T, H, Hkv, D, Di))
    ids = None if whole else msa.select_blocks(iq, ik, block, K)
    lse = (msa.dense_attention(q, k, v) if whole else msa.sparse_attention(q, k, v, ids, block))[1]
    iq.requires_grad_(), ik.requires_grad_()
    kl = msa.index_kl(q, k, lse, iq, ik, ids, block)
    kl.backward()
    total, giq, gik = 0.0, torch.zeros_like(iq), torch.zeros_like(ik)
    for b, t, g in itertools.product(range(B), range(T), range(Hkv)):
        seen = [s for s in range(t + 1) if whole or s // block in ids[b, g, t].tolist()]
        teacher = torch.stack([(k[b, seen, g] @ q[b, t, h] / D**0.5).softmax(0) for h in range(g * 3, g * 3 + 3)]).mean(0)
        student = (ik[b, seen] @ iq[b, t, g] / Di**0.5).softmax(0).detach()
        total += (teacher * (teacher / student).log()).sum().item()
        d = (student - teacher) / (B * T * Hkv) / Di**0.5
        giq[b, t, g] += d @ ik[b, seen].detach()
        gik[b, seen] += d[:, None] * iq[b, t, g].detach()
    assert abs(kl.item() - total / (B * T * Hkv)) < 1e-5 * total
    assert ratio("d iq", iq.grad, giq) < 1e-5 and ratio("d ik", ik.grad, gik) < 1e-5
    e = 0.05  # and by finite difference; everything inside is fp32, so the step is wide
    with torch.no_grad():
        bump = torch.zeros_like(iq)
        bump[1, 11, 1, 3] = e
        slope = (msa.index_kl(q, k, lse, iq + bump, ik, ids, block) - msa.index_kl(q, k, lse, iq - bump, ik, ids, block)).item() / (2 * e)
    assert abs(slope - iq.grad[1, 11, 1, 3].item()) < 0.01 * abs(slope)


def layer_config(**kw):
    return SimpleNamespace(**{
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "index_n_heads": 2,
        "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1, "attention": "msa", "index_detach": True, **kw,
    })  # fmt: skip


def rope(T, R=8):
    a = torch.arange(T)[:, None] / 100 ** (torch.arange(R // 2) / (R // 2))
    return torch.cat((a.cos(), a.cos()), -1)[None], torch.cat((a.sin(), a.sin()), -1)[None]


@pytest.mark.parametrize("warmup", [False, True])
def test_who_learns_from_what(warmup):
    """The LM loss gives the index branch exactly zero gradient; the KL moves the index branch and nothing else, input included."""
    layer = msa.MSA(layer_config(), sparse=True)
    x = rand(2, 30, 32).requires_grad_()
    out, kl = layer(x, *rope(30), warmup=warmup)
    out.square().sum().backward(retain_graph=True)
    grads = {n: p.grad for n, p in layer.named_parameters()}
    assert all(g is None or (g == 0).all() for n, g in grads.items() if n.startswith("index_"))
    assert all(g.abs().sum() > 0 for n, g in grads.items() if not n.startswith("index_"))
    layer.zero_grad(set_to_none=True)
    x.grad = None
    kl.backward()
    assert x.grad is None or (x.grad == 0).all()
    for n, p in layer.named_parameters():
        moved = p.grad is not None and p.grad.abs().sum() > 0
        assert moved == n.startswith("index_"), n


def test_no_detach_reaches_the_hidden_state():
    """--no-detach must really let the KL into the rest of the model, or the comparison of the two is empty."""
    layer = msa.MSA(layer_config(index_detach=False), sparse=True)
    x = rand(1, 30, 32).requires_grad_()
    layer(x, *rope(30))[1].backward()
    assert x.grad.abs().sum() > 0 and layer.q_proj.weight.grad is None


def test_index_weights_matter_past_the_budget():
    """Randomised index weights change outputs beyond K * block tokens and never before: no silent dense fallback."""
    torch.manual_seed(5)
    layer = msa.MSA(layer_config(), sparse=True).eval()
    x = rand(1, 60, 32)
    before = layer(x, *rope(60))[0]
    torch.nn.init.normal_(layer.index_q_proj.weight)
    after = layer(x, *rope(60))[0]
    same = (before == after).all(-1)[0]
    assert same[:12].all() and not same[12:].all()


def test_comparison_selections():
    """shared gives every group one selection; token has the same token budget; local is a window; random differs from call to call."""
    x, cs = rand(1, 40, 32), rope(40)
    got = {}
    for kind in ("shared", "token", "local", "random", "msa"):
        torch.manual_seed(6)
        layer = msa.MSA(layer_config(attention=kind), sparse=True)
        layer.probe = lambda m, q, k, ids, kind=kind: got.setdefault(kind, []).append(ids)
        layer(x, *cs), layer(x, *cs)
    assert torch.equal(got["shared"][0][:, 0], got["shared"][0][:, 1]) and not torch.equal(got["msa"][0][:, 0], got["msa"][0][:, 1])
    assert (got["token"][0][0, 0, -1] >= 0).sum() == 12 and 39 in got["token"][0][0, 0, -1]
    assert got["local"][0][0, 0, -1].tolist() == [9, 8, 7] and got["local"][0][0, 0, 0].tolist() == [0, -1, -1]
    assert not torch.equal(got["random"][0], got["random"][1]) and (got["random"][0][0, 0, :, 0] == torch.arange(40) // 4).all()


def test_recall_of_perfect_and_worst_selection():
    """The recall must tell a good selection from a bad one, or its curve means nothing."""
    torch.manual_seed(7)
    q, k, v, _, _ = inputs(1, 64, 64, 4, 2, 16, 16)
    p = msa.attention_weights(q, k, None, 1)[0].mean(2).unflatten(-1, (16, 4)).sum(-1)  # [B,Hkv,T,nb]
    pos = torch.arange(64)[None]
    best, worst = msa.pick_blocks(p, pos, 4, 4), msa.pick_blocks(-p, pos, 4, 4)
    good, bad = msa.selection_recall(q, k, best, 4), msa.selection_recall(q, k, worst, 4)
    assert good[0] == 1.0 and good[1] > bad[1] + 0.05 and bad[0] < 0.7


def test_msa_says_what_is_wrong():
    """Bad arguments get one sentence that names them."""
    q, k, v, iq, ik = inputs(1, 8, 4, 4, 2, 16, 16)
    with pytest.raises(ValueError, match="8 positions but the keys only 4"):
        msa.select_blocks(iq, ik, 4, 2)
    with pytest.raises(ValueError, match="lens must be"):
        msa.select_blocks(iq, ik, 4, 2, torch.tensor([1.0]))
    with pytest.raises(ValueError, match="backend"):
        msa.select_blocks(iq[:, :4], ik, 4, 2, backend="cuda")
    with pytest.raises(ValueError, match="index_local_blocks"):
        msa.MSA(layer_config(index_local_blocks=2), sparse=True)
    with pytest.raises(ValueError, match="attention must be one of"):
        msa.MSA(layer_config(attention="linear"), sparse=True)
    with pytest.raises(ValueError, match="33 query heads"):
        msa.dense_attention(rand(1, 2, 33, 4), rand(1, 2, 2, 4), rand(1, 2, 2, 4))
    with pytest.raises(ValueError, match="RoPE rotates 32"):
        msa.apply_rope(rand(1, 2, 1, 16), torch.ones(1, 2, 32), torch.ones(1, 2, 32))


def test_rope_leaves_the_other_dims():
    """Dims past the rotated ones pass unchanged; pairs are (i, i + R/2); position 0 is the identity."""
    x = rand(1, 5, 2, 16)
    y = msa.apply_rope(x, *rope(5))
    assert torch.equal(y[..., 8:], x[..., 8:]) and torch.allclose(y[:, 0], x[:, 0])
    assert torch.allclose(y[..., 1] ** 2 + y[..., 5] ** 2, x[..., 1] ** 2 + x[..., 5] ** 2, atol=1e-5)


def test_imports_without_triton():
    """`import model, msa, sample` must work where Triton does not exist (macOS, Windows)."""
    code = "import sys; sys.modules['triton'] = None\nimport model, msa, vit3d, data, sample\nprint('fine')"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


# ---- Training, end to end ----

FAST = ["--preset", "tiny", "--max_steps", "6", "--eval_interval", "3", "--eval_items", "4", "--eval_rows", "2", "--pictures", "24", "--corpus_bytes", "400000",
        "--batch_size", "2", "--vision_rows", "2", "--index_warmup_steps", "2", "--workers", "0",
        "--device", "cpu", "--tasks", "", "--vision_context", "200"]  # fmt: skip


def run(script, *flags, check=True, **kw):
    done = subprocess.run([sys.executable, script, *flags], cwd=HERE, capture_output=True, text=True, timeout=240, **kw)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def call(script, *flags):
    """What `python script flags` would do, in this process: (exit code, everything printed). Saves the seconds of importing torch anew."""
    said, handlers = io.StringIO(), {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = __import__(script.removesuffix(".py")).main(list(flags))
        except (ValueError, OSError) as e:  # the script's last lines turn these into one sentence
            code = 1
            print(e)
        except SystemExit as e:
            code = e.code
    for n, handler in handlers.items():
        signal.signal(n, handler)
    return code, said.getvalue()


def losses(out):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if "eval" not in r]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "out"
    run("train.py", "--native", *FAST, "--out_dir", str(out))
    return out


def test_training_writes_what_it_promises(trained):
    """The files and log keys that others read; a first loss near ln(vocabulary)."""
    rows = [json.loads(x) for x in (trained / "log.jsonl").read_text().splitlines()]
    steps, evals = [r for r in rows if "eval" not in r], [r for r in rows if "eval" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6] and len(evals) == 2
    assert {"step", "loss", "lm_loss", "index_kl", "grad_norm", "lr", "tokens_per_s", "block_recall", "score_recall"} <= steps[0].keys()
    assert {"bits_per_byte", "caption_loss", "picture", "scene", "clip", "question", "unseen_clip"} <= evals[-1]["eval"].keys()
    assert 7.5 < steps[0]["text_loss"] < 9.5 and all(r["index_kl"] > 0 for r in steps)
    assert (trained / "ckpt.pt").exists() and (trained / "curve.png").stat().st_size > 5000 and not list(trained.glob("*.tmp"))


def test_kill_and_resume_is_exact(trained, tmp_path):
    """6 steps == 3 steps + kill -9 + resume, bit for bit: a resume that forgets RNG, data position or optimizer differs at once."""
    out = tmp_path / "out"
    p = subprocess.Popen([sys.executable, "train.py", *FAST, "--out_dir", str(out)], cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = out / "log.jsonl"
    while p.poll() is None and not (log.exists() and '"step": 4' in log.read_text()):
        time.sleep(0.02)
    os.kill(p.pid, signal.SIGKILL)
    p.wait()
    done = run("train.py", "--resume", "--out_dir", str(out), "--workers", "0", "--device", "cpu")
    assert losses(out) == losses(trained), done.stdout
    a, b = (torch.load(d / "ckpt.pt", weights_only=True)["model"] for d in (trained, out))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_settings_that_must_not_change_training(trained, tmp_path):
    """How often it evaluates, and how rows are cut into micro-batches, must not change what is learned."""
    often = tmp_path / "often"
    run("train.py", *FAST, "--eval_interval", "2", "--out_dir", str(often))
    assert losses(often) == losses(trained)
    micro = tmp_path / "micro"
    run("train.py", *FAST, "--micro_batch_tokens", "64", "--out_dir", str(micro))
    for (_, a, _), (_, b, _) in zip(losses(micro), losses(trained)):
        assert abs(a - b) < 2e-3 * abs(b)


def test_recipes_share_text_and_pictures():
    """Every recipe sees the same number of picture rows, each once and in order, and none before its start; text_only sees none."""
    import train

    for recipe, start in (("native", 0.0), ("midtrain", 0.5), ("cpt", 0.7)):
        s = {"recipe": recipe, "vision_start": start, "vision_rows": 5, "max_steps": 97, "lr": 1.0}
        plan = [train.vision_plan(t, s) for t in range(97)]
        assert sum(n for _, n in plan) == 5 * 97 and all(n == 0 for t, (_, n) in enumerate(plan) if t < round(start * 97))
        assert [a for a, _ in plan[1:]] == list(itertools.accumulate(n for _, n in plan))[:-1]
        lr = [train.learning_rate(t, s) for t in range(97)]
        assert max(lr) == 1.0 and 0 < lr[-1] < 0.2
        assert (min(lr[60:75]) < 0.2) == (recipe == "cpt")
    assert train.vision_plan(5, {"recipe": "text_only", "vision_rows": 5}) == (0, 0)


def test_training_learns(trained):
    """Loss falls on a repeated batch: the model, optimizer and loss are wired to each other, pictures included."""
    import data
    import sample
    import train

    model, tok, prep, s = sample.load(trained, "cpu")
    rows = data.Rows(tok, prep, data.Corpus(tok, max_bytes=400_000), data.Pictures(56, 24), 256, 1)
    batches = [train.stack([rows.text(0)]), train.stack([rows.vision(0)])]
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    seen = []
    for _ in range(25):
        o = [train.forward(model, b, prep, "cpu") for b in batches]
        sum(x.loss for x in o).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([x.lm_loss.item() for x in o])
    assert seen[-1][0] < 0.6 * seen[0][0] and seen[-1][1] < 0.4 * seen[0][1], (seen[0], seen[-1])


def test_signal_saves_and_says_how_to_go_on(tmp_path):
    """SIGTERM once lost the run since the last evaluation."""
    out = tmp_path / "out"
    p = subprocess.Popen([sys.executable, "train.py", *FAST, "--max_steps", "500", "--eval_interval", "500", "--out_dir", str(out)], cwd=HERE,
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    log = out / "log.jsonl"
    while p.poll() is None and not (log.exists() and '"step": 2' in log.read_text()):
        time.sleep(0.05)
    p.send_signal(signal.SIGTERM)
    said = p.communicate(timeout=120)[0]
    assert p.returncode == 0 and "--resume" in said and (out / "ckpt.pt").exists()


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--no_such_flag"], "unrecognized arguments"),
        (["--resume", "--out_dir", "no/such/dir"], "there is no"),
        (["--text", "no/such/file"], "no/such/file"),
        (["--max_steps", "0"], "--max_steps"),
        (["--native", "--vision_start", "0.5"], "--vision_start"),
        (["--init_from", "no.pt"], "no.pt"),
        (["--tasks", "naming=1"], "naming"),
        (["--tasks", "single=nan"], "finite"),
        (["--cpt", "--max_steps", "1"], "--vision_start"),
        (["--seed", "-1"], "--seed"),
        (["--eval_rows", "0"], "--eval_rows"),
        (["--vision_rows", "-1"], "--vision_rows"),
        (["--resume", "--overwrite"], "exclude each other"),
        (["--device", "cuda"], "CUDA"),
    ],
)
def test_train_refuses_in_one_sentence(flags, said, tmp_path):
    """One clear sentence that names the thing, a non-zero exit, no traceback, nothing written."""
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    code, printed = call("train.py", *(flags if "--out_dir" in flags else [*flags, "--out_dir", str(tmp_path / "x")]))
    assert code and said in printed and "Traceback" not in printed, printed
    assert not (tmp_path / "x").exists()


def test_used_out_dir_is_not_overwritten(trained):
    """A second run into the same folder needs --resume or --overwrite."""
    before = (trained / "ckpt.pt").read_bytes()
    for flags, said in ((FAST, "--overwrite"), (["--resume", "--lr", "5"], "--lr")):
        done = run("train.py", *flags, "--out_dir", str(trained), check=False)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
        assert (trained / "ckpt.pt").read_bytes() == before


def test_resume_with_random_attention_is_exact(tmp_path):
    """The data loader once drew a seed from the global generator, so that a resumed run drew other random blocks."""
    a, b = tmp_path / "a", tmp_path / "b"
    flags = [*FAST, "--attention", "random", "--pictures", "16", "--max_steps", "2"]
    assert call("train.py", *flags, "--out_dir", str(a))[0] == 0
    assert call("train.py", *flags, "--out_dir", str(b), "--max_minutes", "0.00001")[0] == 0  # stops at the first step
    code, said = call("train.py", "--resume", "--out_dir", str(b), "--workers", "0", "--device", "cpu")
    assert code == 0, said
    a, b = (torch.load(d / "ckpt.pt", weights_only=True)["model"] for d in (a, b))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_resume_makes_up_for_a_lost_evaluation(trained, tmp_path):
    """A crash in the last evaluation once lost it for good; a resume with other values was not validated; --overwrite lost the old run."""
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    lines = (out / "log.jsonl").read_text().splitlines()
    (out / "log.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    for flags, said in ((["--max_steps", "3"], "already"), (["--eval_interval", "0"], "--eval_interval"), (["--init_from", "x.pt"], "--init_from")):
        code, printed = call("train.py", "--resume", "--out_dir", str(out), *flags)
        assert code == 1 and said in printed, printed
    assert call("train.py", "--resume", "--out_dir", str(out), "--workers", "0", "--device", "cpu")[0] == 0
    again, before = json.loads((out / "log.jsonl").read_text().splitlines()[-1]), json.loads(lines[-1])
    assert again["step"] == 6 and again["eval"] == before["eval"]
    assert call("train.py", *FAST, "--max_steps", "1", "--index_warmup_steps", "0", "--out_dir", str(out), "--overwrite")[0] == 0
    assert torch.load(out / "old_ckpt.pt", weights_only=True)["step"] == 6


def test_help_is_quick():
    """--help must not import torch: it exits 0 in about a second, on any machine."""
    for script in ("train.py", "sample.py"):
        began = time.time()
        assert "usage" in run(script, "--help").stdout and time.time() - began < 3


def test_non_finite_gradients_stop_the_run(tmp_path):
    """An inf gradient skips the step and says so; many in a row stop the run, the good checkpoint intact."""
    done = run("train.py", *FAST, "--max_steps", "12", "--eval_interval", "2", "--lr", "1e30", "--out_dir", str(tmp_path / "o"), check=False)
    assert done.returncode != 0 and "step skipped" in done.stdout + done.stderr and "non-finite" in done.stderr, done.stderr[-500:]
    assert torch.load(tmp_path / "o" / "ckpt.pt", weights_only=True)["step"] >= 2


# ---- Sampling ----


@pytest.fixture(scope="session")
def trained_model(trained):
    import sample

    return sample.load(trained, "cpu")


def test_cached_equals_uncached(trained_model):
    """KV and index-key cache against no cache at all, greedy, across many block edges."""
    import sample

    model, tok, _, _ = trained_model
    ids = [tok.eod, *tok.encode("def main():\n    import os\n")]
    got = [t for (t,) in sample.generate(model, ids, max_tokens=120)]
    seq = list(ids)
    with torch.no_grad():
        for t in got:
            assert model(torch.tensor([seq]), last_only=True).logits[0, -1].argmax().item() == t
            seq.append(t)


def test_greedy_equals_teacher_forcing(trained_model):
    """evaluate() counts an answer by the argmax at its positions: that must be what greedy decoding yields."""
    import data
    import sample
    import train

    model, tok, prep, s = trained_model
    for e in data.heldout("question", 3, data.Pictures(56, 24)):
        batch = next(train.caption_batches([e], tok, prep, 1))
        logits = model(batch["tokens"], patches=data.normalize(batch["patches"], prep), grids=batch["grids"]).logits[0]
        first = (batch["targets"][0] >= 0).nonzero()[0].item()
        said = sample.answer(model, tok, prep, e.visuals, e.question, max_tokens=1)
        assert batch["tokens"][0, first] == tok.sep and said == tok.decode([logits[first].argmax().item()])


def test_sampler_edge_cases(trained_model):
    """temperature 0, 1e-9 and negative; k in {0, 1, V, V + 1, -1}; its own seed; several samples; a full context."""
    import sample

    model, tok, _, _ = trained_model
    ids = tok.encode("x = ")
    ask = lambda **kw: [t for (t,) in sample.generate(model, ids, max_tokens=8, **kw)]
    greedy = ask(temperature=0.0)
    assert ask(temperature=1e-9) == greedy == ask(temperature=1.0, top_k=1)
    assert ask(temperature=1.0, top_k=tok.vocab_size) == ask(temperature=1.0, top_k=tok.vocab_size + 1) == ask(temperature=1.0)
    torch.manual_seed(1)
    a = ask(temperature=1.0, seed=3)
    torch.manual_seed(2)
    assert a == ask(temperature=1.0, seed=3) != ask(temperature=1.0, seed=4)
    for bad in ({"temperature": -1.0}, {"top_k": -1}, {"num_samples": 0}):
        with pytest.raises(ValueError):
            ask(**bad)
    with pytest.raises(ValueError, match="prompt has"):
        list(sample.generate(model, ids, capacity=len(ids)))
    assert len(list(sample.generate(model, ids, max_tokens=50, capacity=len(ids) + 3))) == 3
    assert all(len(step) == 3 for step in sample.generate(model, ids, max_tokens=4, num_samples=3, temperature=1.0))


def test_streaming_never_breaks_a_character():
    """Printing token by token once tore multi-byte characters apart."""
    import data
    import sample

    tok = data.Tokenizer()
    text = "é🔥中 naïve"
    stream, out = sample.Stream(tok), ""
    for t in tok.encode(text):
        piece = stream([t])
        assert "\ufffd" not in piece
        out += piece
    assert out + stream([], final=True) == text


def test_sample_command(trained, tmp_path):
    """The command line as the README gives it, with a picture, a clip, an attention map; and what it refuses."""
    from PIL import Image

    png, half = tmp_path / "a.png", tmp_path / "half.pt"
    Image.new("RGB", (70, 50), "red").save(png)
    frames = [Image.new("RGB", (56, 56), c) for c in ("red", "green", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    ckpt = str(trained)
    assert "x = 1" in run("sample.py", "--ckpt", ckpt, "--prompt", "x = 1", "--max_tokens", "5").stdout
    look = ["--image", str(png), "--clip", str(tmp_path / "a.gif"), "--max_tokens", "5", "--attention_map", str(tmp_path / "map.png")]
    code, said = call("sample.py", "--ckpt", ckpt, *look)
    assert code == 0 and ((tmp_path / "map.png").exists() or "no word" in said)
    code, said = call("sample.py", "--ckpt", ckpt, "--prompt", "é🔥中", "--num_samples", "2", "--max_tokens", "3", "--temperature", "1")
    assert code == 0 and "sample 2" in said
    data = (trained / "ckpt.pt").read_bytes()
    half.write_bytes(data[: len(data) // 2])
    state = torch.load(trained / "ckpt.pt", weights_only=True)
    state["prep"]["colour"] = 1  # plain data, but not ours
    torch.save(state, odd := tmp_path / "odd.pt")
    (tmp_path / "fake.jpg").write_text("<html>not a picture</html>")
    for flags, said in (
        (["--ckpt", str(half), "--prompt", "x"], "half.pt"),
        (["--ckpt", str(tmp_path / "none"), "--prompt", "x"], "none"),
        (["--ckpt", ckpt, "--image", str(tmp_path / "gone.png")], "gone.png"),
        (["--ckpt", ckpt, "--image", str(tmp_path / "fake.jpg")], "fake.jpg"),
        (["--ckpt", ckpt, "--prompt", "word " * 400], "context"),
        (["--ckpt", ckpt, "--prompt", "x", "--temperature", "-1"], "--temperature"),
        (["--ckpt", ckpt, "--prompt", "x", "--temperature", "nan"], "--temperature"),
        (["--ckpt", ckpt, "--image", str(png), "--attention_map", "no/such/map.png"], "--attention_map"),
        (["--ckpt", str(odd), "--prompt", "x"], "does not fit"),
        (["--ckpt", ckpt, "--unknown"], "unrecognized"),
    ):
        code, printed = call("sample.py", *flags)
        assert code and said in printed and "Traceback" not in printed, (flags, printed)
