# compile without a GPU: python comp.py [cc]
import sys, os, subprocess, tempfile, time
sys.path.insert(0,"/work/main")
import torch, triton, kernels as kn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
def comp(fn, consts, ptr, cc=90, **opt):
    names=fn.arg_names
    sig={}; con={}; attrs={}
    for i,n in enumerate(names):
        if n in consts: sig[n]="constexpr"; con[(i,)]=consts[n]
        elif n in ptr: sig[n]="*"+ptr[n]; attrs[(i,)]=[["tt.divisibility",16]]
        elif n in ("scale","zscale"): sig[n]="fp32"
        else: sig[n]="i32"
    t0=time.time()
    try: r=triton.compile(ASTSource(fn,sig,con,attrs), target=GPUTarget("cuda",cc,32), options=opt)
    except Exception as e: print(fn.__name__,opt,"FAILED",repr(e)[:300]); return
    f=tempfile.NamedTemporaryFile(suffix=".cubin",delete=False); f.write(r.asm["cubin"]); f.close()
    o=subprocess.run(["/tmp/t36/site/triton/backends/nvidia/bin/cuobjdump","-res-usage",f.name],capture_output=True,text=True).stdout
    u=[l for l in o.splitlines() if "REG" in l]
    ptx=r.asm["ptx"]
    sass=r.asm.get("ptx")
    print(f"{fn.__name__} cc{cc} {opt} smem {r.metadata.shared} | {u[-1].strip().split('SHARED')[0] if u else o[:100]} | wgmma {ptx.count('wgmma.mma_async')} cp.async {ptx.count('cp.async.cg')} red.v {ptx.count('red.global.add.v')+ptx.count('.v4.f32')} | {time.time()-t0:.1f}s",flush=True)
    return r
P=lambda t: dict(q=t,k=t,v=t,do=t,out=t,dout=t,iq=t,ik=t,partial=t,dq=t,diq=t,lens="i32",ids="i32",entries="i32",rank="i32",counts="i32",ends="i32",candidates="i32",scores="fp32",plse="fp32",lse="fp32",delta="fp32",lse2="fp32",dk="fp32",dv="fp32",dik="fp32",loss="fp32",zlse="fp32")
def allk(t="bf16",cc=90,D=128,BS=128,G=16,Hkv=4,K=16,cfg=None):
    p=P(t); c=cfg or {}
    GP=triton.next_power_of_2(G)
    def tile(kind):
        return c[kind]
    for (BM,NPB,w,s,*o) in c["score"]:
        comp(kn.score_kernel,dict(Hkv=Hkv,Di=D,BS=BS,BSP=BS,NPB=NPB,BM=BM),p,cc,num_warps=w,num_stages=s,**(dict(maxnreg=o[0]) if o else {}))
    for (R,N) in c["topk"]:
        comp(kn.topk_kernel,dict(Hkv=Hkv,K=K,KP=triton.next_power_of_2(K),BS=BS,R=R,N=N,AGAIN=False),{**p},cc,num_warps=4)
    for (M,w,s) in c["attend"]:
        comp(kn.attend_kernel,dict(Hkv=Hkv,G=G,GP=GP,D=D,K=K,BS=BS,BSP=BS,QC=64,QT=M//GP),p,cc,num_warps=w,num_stages=s)
    for (M,w,s) in c["backward"]:
        comp(kn.attend_backward_kernel,dict(Hkv=Hkv,G=G,GP=GP,D=D,K=K,BS=BS,BSP=BS,QC=256,QT=M//GP),p,cc,num_warps=w,num_stages=s)
    for (M,w,s) in c["kl"]:
        comp(kn.kl_kernel,dict(Hkv=Hkv,G=G,D=D,Di=D,K=K,BS=BS,BSP=BS,QC=128,QT=M),p,cc,num_warps=w,num_stages=s)
        comp(kn.student_kernel,dict(Hkv=Hkv,Di=D,K=K,BS=BS,BSP=BS,QC=128,QT=M),p,cc,num_warps=w,num_stages=s)
    for (M,BN,w,s) in c["dense"]:
        comp(kn.kl_dense_kernel,dict(Hkv=Hkv,G=G,D=D,Di=D,BM=M,BN=BN),p,cc,num_warps=w,num_stages=s)
if __name__=="__main__":
    which=sys.argv[1]
    if which=="b":
        allk(cfg=dict(score=[(128,1,8,2),(128,1,8,3)],topk=[],attend=[],backward=[],kl=[],dense=[]))
        allk(BS=64,cfg=dict(score=[(128,2,8,2)],topk=[],attend=[],backward=[],kl=[],dense=[]))
        allk(BS=32,D=64,cfg=dict(score=[(128,4,8,2)],topk=[],attend=[],backward=[],kl=[],dense=[]))
    if which=="a":
        allk(cfg=dict(score=[(128,1,8,2),(128,1,8,2,128),(64,1,4,2),(64,1,4,2,168),(128,1,8,3,128)],topk=[],attend=[(64,4,4)],backward=[],kl=[(64,8,2),(64,8,1),(64,8,3),(64,4,2),(128,8,2)],dense=[(64,64,8,2),(64,64,4,2)]))
    if which=="90":
        allk(cfg=dict(score=[(128,1,8,2),(128,1,4,2),(128,1,8,3),(256,1,8,2)],topk=[(4,1024)],attend=[(64,4,2),(64,4,3),(128,8,2),(128,4,2)],backward=[(64,8,2),(64,8,3),(32,8,3)],kl=[(64,8,2),(64,4,2),(128,8,2)],dense=[(64,64,8,2),(64,128,8,2),(64,64,4,2)]))
    if which=="89":
        allk(cc=89,cfg=dict(score=[(64,1,4,1)],topk=[(4,1024)],attend=[(64,4,1)],backward=[(16,8,1),(32,8,1)],kl=[(32,8,1)],dense=[(32,64,4,1)]))
    if which=="fp32":
        for cc in (90,):
            allk("fp32",cc,D=64,BS=64,G=4,cfg=dict(score=[(32,1,4,1)],topk=[],attend=[(16,4,1)],backward=[(16,4,1)],kl=[(16,4,1)],dense=[(16,32,4,1)]))
            allk("fp32",cc,D=128,BS=128,G=16,cfg=dict(score=[(32,1,4,1)],topk=[],attend=[(16,4,1)],backward=[(16,4,1)],kl=[(16,4,1)],dense=[(16,32,4,1)]))
