import os, sys, time
os.environ["TRITON_INTERPRET"]="1"
sys.path.insert(0,"/work/main")
import torch; torch.set_num_threads(1)
import msa, kernels
def ratio(name, got, want):
    r = (got.float()-want.float()).norm() / want.float().norm().clamp_min(1e-30); print(f"{name}: {r:.2e}"); return r.item()
def run(B,T,S,H,Hkv,D,Di,block,K,lens=None,dtype=torch.float32,seed=0):
    torch.manual_seed(seed)
    t0=time.time()
    q,k,v=torch.randn(B,T,H,D),torch.randn(B,S,Hkv,D),torch.randn(B,S,Hkv,D)
    iq,ik=torch.randn(B,T,Hkv,Di),torch.randn(B,S,Di)
    lens=None if lens is None else torch.tensor(lens,dtype=torch.int32)
    if lens is not None:
        for b in range(B):
            for x in (k,v,ik): x[b,lens[b]:]=float("nan")
    xs=[x.to(dtype).requires_grad_() for x in (q,k,v,iq,ik)]
    ys=[x.detach().float().clone().requires_grad_() for x in xs]
    do=torch.randn(B,T,H,D)
    res=[]
    ids=kernels.select_blocks(xs[3],xs[4],block,K,lens)
    want=msa.select_blocks(ys[3],ys[4],block,K,lens)
    a,b_=ids.sort(-1)[0],want.sort(-1)[0]
    assert (a==b_).all() or dtype!=torch.float32, (a!=b_).float().mean()
    print("ids differ", (a!=b_).any(-1).float().mean().item())
    valid=(ids>=0).int(); assert (valid.diff(dim=-1)<=0).all()
    out,lse=kernels.sparse_attention(xs[0],xs[1],xs[2],ids,block,lens)
    o2,l2=msa.sparse_attention(ys[0],ys[1],ys[2],ids,block,lens)
    fin=l2.isfinite(); assert (fin==lse.isfinite()).all()
    res+=[ratio("out",out,o2),ratio("lse",lse[fin],l2[fin])]
    kl=kernels.index_kl(xs[0],xs[1],lse,xs[3],xs[4],ids,block,lens)
    kl2=msa.index_kl(ys[0],ys[1],l2,ys[3],ys[4],ids,block,lens)
    res+=[ratio("kl",kl,kl2)]
    g=torch.autograd.grad((out.float()*do).sum()+3*kl, xs); g2=torch.autograd.grad((o2*do).sum()+3*kl2, ys)
    for n,x,y in zip(["dq","dk","dv","diq","dik"],g,g2): res.append(ratio(n,x,y.nan_to_num()))
    _,ld=msa.dense_attention(ys[0],ys[1],ys[2],lens)
    kl=kernels.index_kl(xs[0],xs[1],ld,xs[3],xs[4],None,block,lens); kl2=msa.index_kl(ys[0],ys[1],ld,ys[3],ys[4],None,block,lens)
    res.append(ratio("kl dense",kl,kl2))
    for n,x,y in zip(["diq","dik"],torch.autograd.grad(kl,xs[3:]),torch.autograd.grad(kl2,ys[3:])): res.append(ratio(n,x,y.nan_to_num()))
    print("max",max(res),"sec",time.time()-t0)
    return max(res)
if __name__=="__main__":
    assert run(1,40,40,4,2,16,16,16,2)<1e-4
    assert run(2,33,70,3,1,16,32,16,3,lens=[70,20])<1e-4
    assert run(1,64,64,6,2,32,16,32,2)<1e-4
    assert run(1,65,65,16,1,16,16,24,2)<1e-4
    assert run(1,40,90,2,2,16,16,16,2,dtype=torch.float16)<1e-2
