import sys; sys.path.insert(0,"/work/main/scratch_kernels"); sys.path.insert(0,"/work/main")
import triton, triton.language as tl
from comp import comp,P
@triton.jit(do_not_specialize=["t0","Tc","T","S","NB"])
def one(iq, ik, lens, scores, t0, Tc, T, S, NB, Hkv: tl.constexpr, Di: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr, V: tl.constexpr):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1)
    b = (bh // Hkv).to(tl.int64)
    r = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, Di)
    c = tl.arange(0, BS)
    live = r < Tc
    start = tl.load(lens + b) - T + t0
    pos = start + r
    q = tl.load(iq + ((b * T + t0 + r)[:, None] * Hkv + bh % Hkv) * Di + d[None, :], mask=live[:, None], other=0.0)
    first = start + tile * BM
    last = start + tl.minimum(tile * BM + BM, Tc) - 1
    whole = tl.maximum(first + 1, 0) // BS
    steps = tl.where(last < 0, 0, last // BS + 1)
    base = ik + b * S * Di
    if V==0:
        out = scores + (bh.to(tl.int64) * Tc + r) * NB
        kp = base + c[None,:]*Di + d[:,None]
        for j in range(0, whole):
            s = tl.dot(q, tl.load(kp)); tl.store(out + j, tl.max(s, 1), mask=live); kp += BS*Di
    if V==1:  # one loop, always causal mask by row max only on last? mask everywhere
        out = scores + (bh.to(tl.int64) * Tc + r) * NB
        for j in range(0, steps):
            n = j*BS + c
            k = tl.load(base + (n.to(tl.int64)*Di)[:,None] + d[None,:], mask=(n<=last)[:,None], other=0.)
            s = tl.dot(q, tl.trans(k))
            s = tl.where(n[None,:] <= pos[:,None], s, float("-inf"))
            tl.store(out + j, tl.max(s, 1), mask=live)
    if V==5:
        out = scores + (bh.to(tl.int64) * Tc + r) * NB
        for j in range(0, steps):
            n = j*BS + c
            k = tl.load(base + (n.to(tl.int64)*Di)[:,None] + d[None,:], mask=(n<=last)[:,None], other=0.)
            s = tl.dot(q, tl.trans(k))
            if j >= whole:
                s = tl.where(n[None,:] <= pos[:,None], s, float("-inf"))
            tl.store(out + j, tl.max(s, 1), mask=live)
    if V==2:  # transposed scores, [bh, NB, Tc]
        out = scores + bh.to(tl.int64) * NB * Tc + r
        kp = base + c[None,:]*Di + d[:,None]
        for j in range(0, whole):
            s = tl.dot(q, tl.load(kp)); tl.store(out, tl.max(s, 1), mask=live); kp += BS*Di; out += Tc
    if V==3:  # K as A operand: s^T
        out = scores + (bh.to(tl.int64) * Tc + r) * NB
        kp = base + c[:,None]*Di + d[None,:]
        qt = tl.trans(q)
        for j in range(0, whole):
            s = tl.dot(tl.load(kp), qt); tl.store(out + j, tl.max(s, 0), mask=live); kp += BS*Di
    if V==4:
        out = scores + (bh.to(tl.int64) * Tc + r) * NB
        kp = base + c[None,:]*Di + d[:,None]
        for j in range(0, whole):
            s = tl.dot(q, tl.load(kp)); tl.store(out + j, tl.max(s, 1), mask=live); kp += BS*Di
        for j in range(whole, steps):
            n = j*BS + c
            s = tl.dot(q, tl.load(kp, mask=(n<=last)[None,:], other=0.))
            s = tl.where(n[None,:] <= pos[:,None], s, float("-inf"))
            tl.store(out + j, tl.max(s, 1), mask=live); kp += BS*Di
if __name__=="__main__":
    for V in (5,):
        for BM,w,s in ((128,8,2),(128,8,3),(128,4,2),(64,4,3),(256,8,2)):
            print(V,BM,w,s,end=" "); comp(one,dict(Hkv=4,Di=128,BS=128,BM=BM,V=V),P("bf16"),90,num_warps=w,num_stages=s)
