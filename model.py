"""MiniMax M3 but for its attention (msa.py) and its eyes (vit3d.py): config, MLP, mixture of experts, decoder, cache, loss.

    python model.py                     a demonstration on the CPU: sizes, FLOPs, one equality

    tokens -> embedding -> [ RMSNorm -> MSA -> + -> RMSNorm -> MLP or MoE -> + ] x layers -> RMSNorm -> logits
    pictures -> ViT -> projector -> visual tokens, which replace the placeholder tokens' embeddings one for one

Names of fields and modules are the released model's (transformers, minimax_m3_vl), so that both can be read side by side and
from_hf is little more than a copy. `python test_all.py -k oracle` compares small random models of both kinds in fp32:

    part               here                        compared                            known differences, and why
    (1+w) RMSNorm      msa.RMSNorm                 layer outputs                       none
    partial RoPE       rope_table, msa.apply_rope  layer outputs; all dims or some     fp32 tables; there of the activations
    GQA, QK norm       msa.MSA                     layer outputs; 1 to 6 KV heads      none
    index and top-k    msa.select_blocks           sets of blocks, a query and group   equal scores: the lower block; there any
    sparse attention   msa.sparse_attention        layer outputs; past the budget too  none (there: dense with a mask)
    SwiGLU-OAI         swiglu_oai, MLP             layer outputs; both clamps hit      none
    router, MoE        MoE                         layer outputs; with a bias          fp32 router; there in the weights' dtype
    patches            vit3d.patchify              with their processors               no resize here: that is data.py's
    ViT, 3-axis RoPE   vit3d.ViT                   layer outputs; stills and clips     Conv3d of stride = kernel is a Linear here
    projector          vit3d.Projector             visual tokens                       none
    visual tokens      M3.embed                    logits                              one list for both placeholder ids here
    cache              Cache                       greedy tokens                       preallocated; there grown by concatenation
    index KL, balance  msa.index_kl, M3.balance    nothing                             training only: not in the released code

Text agrees with transformers 5.17 and later. For vision we follow 5.23 and later: older versions rotate and mask it differently.
"""

from dataclasses import asdict, dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from msa import FEW, FP8, MSA, RMSNorm, quantize
from vit3d import Projector, ViT, ViTConfig


@dataclass
class M3Config:
    """Released names, and the released sizes: M3Config() is MiniMax M3 itself. ValueError names a field that makes no sense."""

    vocab_size: int = 200064
    hidden_size: int = 6144
    num_hidden_layers: int = 60
    num_attention_heads: int = 64
    num_key_value_heads: int = 4
    head_dim: int = 128
    partial_rotary_factor: float = 0.5  # the share of each head's dims that RoPE turns
    rope_theta: float = 5e6
    rms_norm_eps: float = 1e-6
    layer_types: list[str] | None = None  # "full_attention" or "minimax_m3_sparse", a layer each; None: three of the first kind
    mlp_layer_types: list[str] | None = None  # "dense" or "sparse" (MoE), a layer each; None: three dense ones, as released
    dense_intermediate_size: int = 12288
    intermediate_size: int = 3072  # of one expert
    shared_intermediate_size: int = 3072  # of the shared expert
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 2.0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    index_n_heads: int = 4  # one a KV head
    index_head_dim: int = 128
    index_block_size: int = 128
    index_topk_blocks: int = 16
    index_local_blocks: int = 1
    max_position_embeddings: int = 524288
    tie_word_embeddings: bool = False
    projector_hidden_size: int = 6144
    image_token_id: int = 200025
    video_token_id: int = 200026
    vision: ViTConfig = field(default_factory=ViTConfig)
    attention: str = "msa"  # ours, see msa.MSA: what the sparse layers do
    index_detach: bool = True  # ours: keep the index KL out of the rest of the model
    index_kl_coef: float = 1.0  # ours: lambda, unpublished

    def __post_init__(self):
        n = self.num_hidden_layers
        self.layer_types = self.layer_types or ["full_attention"] * min(3, n) + ["minimax_m3_sparse"] * (n - 3)
        self.mlp_layer_types = self.mlp_layer_types or ["dense"] * min(3, n) + ["sparse"] * (n - 3)
        both = (("layer_types", ("full_attention", "minimax_m3_sparse")), ("mlp_layer_types", ("dense", "sparse")))
        for name, kinds in both:
            got = getattr(self, name)
            if len(got) != n or not set(got) <= set(kinds):
                raise ValueError(f"{name} must give one of {kinds} for each of {n} layers, not {got}")
        R = self.rotary_dim
        if R % 2 or not 2 <= R <= self.head_dim:
            raise ValueError(f"partial_rotary_factor {self.partial_rotary_factor} of head_dim {self.head_dim} rotates {R} dims")
        if "minimax_m3_sparse" in self.layer_types:
            if self.index_head_dim < R:
                raise ValueError(f"index_head_dim {self.index_head_dim} is less than the {R} dims that RoPE rotates")
            if self.index_local_blocks != 1:
                raise ValueError(f"index_local_blocks must be 1, not {self.index_local_blocks}")
            if self.index_n_heads != self.num_key_value_heads:
                raise ValueError(f"index_n_heads {self.index_n_heads} must equal num_key_value_heads {self.num_key_value_heads}")
        if not 1 <= self.num_experts_per_tok <= self.num_local_experts:
            raise ValueError(f"num_experts_per_tok {self.num_experts_per_tok} must lie in 1..{self.num_local_experts} experts")

    @property
    def rotary_dim(self):
        return int(self.head_dim * self.partial_rotary_factor)

    @classmethod
    def of_size(cls, name, vision=None, **other):
        """A config of SIZES, with other fields of it and of its vision part (a dict) as given."""
        size = dict(SIZES[name])
        n, dense = size["num_hidden_layers"], size.pop("dense_layers")
        size["layer_types"] = ["full_attention"] * dense + ["minimax_m3_sparse"] * (n - dense)
        size["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (n - dense)
        size["index_n_heads"], size["projector_hidden_size"] = size["num_key_value_heads"], size["hidden_size"]
        return cls(vision=ViTConfig(**({"temporal_patch_size": 1} | size.pop("vision") | (vision or {}))), **(size | other))

    def to_dict(self):
        """Plain data, for checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, d):
        """The inverse of to_dict. ValueError names a key that is no field."""
        d = dict(d)
        vision = d.pop("vision", {})
        for have, known in ((d, fields(cls)), (vision, fields(ViTConfig))):
            for k in have:
                if k not in {f.name for f in known}:
                    raise ValueError(f"config has an unknown field {k!r}")
        return cls(vision=ViTConfig(**vision), **d)


# The sizes that train.py --preset offers. dense_layers: how many leading layers have full attention and a dense MLP (three of M3's sixty).
# In long attention is nearly everything: at 32K tokens 93% of the products if it were dense; with MSA a token takes 358 MFLOP instead of 1,153.
SIZES = {
    "tiny": {
        "hidden_size": 128, "num_hidden_layers": 4, "dense_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "dense_intermediate_size": 384, "intermediate_size": 128, "shared_intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
        "index_head_dim": 32, "index_block_size": 16, "index_topk_blocks": 6,
        "vision": {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3},
    },
    "study": {
        "hidden_size": 256, "num_hidden_layers": 6, "dense_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
        "dense_intermediate_size": 768, "intermediate_size": 256, "shared_intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2,
        "index_head_dim": 32, "index_block_size": 32, "index_topk_blocks": 8,
        "vision": {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 6},
    },
    "base": {
        "hidden_size": 512, "num_hidden_layers": 10, "dense_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "dense_intermediate_size": 2048, "intermediate_size": 512, "shared_intermediate_size": 512, "num_local_experts": 16, "num_experts_per_tok": 2,
        "index_head_dim": 64, "index_block_size": 64, "index_topk_blocks": 8,
        "vision": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6},
    },
    "long": {
        "hidden_size": 512, "num_hidden_layers": 8, "dense_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 64,
        "dense_intermediate_size": 2048, "intermediate_size": 512, "shared_intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2,
        "index_head_dim": 64, "index_block_size": 128, "index_topk_blocks": 16,
        "vision": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6},
    },
}  # fmt: skip
SIZES["gpt"] = SIZES["base"] | {"dense_layers": 10, "dense_intermediate_size": 1680}  # for comparison: no sparse layer, no experts, as many active parameters


@dataclass
class M3Output:
    logits: torch.Tensor | None  # [B,T,V], or [B,1,V] with last_only; None when targets were given: training never holds them all
    loss: torch.Tensor | None  # lm_loss + index_kl_coef * index_kl
    lm_loss: torch.Tensor | None  # mean over this call's unmasked targets
    index_kl: torch.Tensor  # plain sum over layers


def rope_table(pos, rotary_dim, theta):
    """pos [B,T] -> cos, sin [B,T,R] fp32; the two halves are the same, so that dim i pairs with i + R/2."""
    freq = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, device=pos.device, dtype=torch.float32) / rotary_dim)  # [R/2]
    angle = pos[..., None].float() * freq  # [B,T,R/2]
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


# ---------------------------------------------------------------------------------------------------------------------------
# MLP and mixture of experts


def swiglu_oai(x, alpha, limit):
    """x [..., 2I] = gate | up -> [..., I]: gate clamped above, up on both sides, (up + 1) * gate * sigmoid(alpha * gate)."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


class MLP(nn.Module):
    def __init__(self, c, width):
        super().__init__()
        self.alpha, self.limit = c.swiglu_alpha, c.swiglu_limit
        self.gate_up_proj = nn.Linear(c.hidden_size, 2 * width, bias=False)
        self.down_proj = nn.Linear(width, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(swiglu_oai(self.gate_up_proj(x), self.alpha, self.limit))


class Experts(nn.Module):
    """All experts of a layer as two 3-D tensors, as released: gate_up_proj [E,2I,C], down_proj [E,C,I].

    On CUDA in bf16 all experts are one grouped matrix product, and the host never learns how many tokens each got; elsewhere a
    loop. `grouped` True or False forces one of them, for tests.
    """

    def __init__(self, c):
        super().__init__()
        self.alpha, self.limit, self.grouped = c.swiglu_alpha, c.swiglu_limit, None
        self.gate_up_proj = nn.Parameter(torch.empty(c.num_local_experts, 2 * c.intermediate_size, c.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(c.num_local_experts, c.hidden_size, c.intermediate_size))

    def forward(self, x, load):
        """x [M,C] sorted by expert, load [E] rows of each -> [M,C], all in x's dtype."""
        up, down = self.gate_up_proj.to(x.dtype), self.down_proj.to(x.dtype)
        grouped = self.grouped
        if grouped is None:  # its rows must be multiples of 16 bytes
            grouped = x.is_cuda and x.dtype == torch.bfloat16 and up.shape[2] % 8 == down.shape[2] % 8 == 0 and can_group(x.device)
        if grouped:
            ends = load.cumsum(0).int()  # [E]
            h = F.grouped_mm(x, up.transpose(1, 2), offs=ends)  # [M,2I]
            return F.grouped_mm(swiglu_oai(h, self.alpha, self.limit), down.transpose(1, 2), offs=ends)
        parts = x.split(load.tolist())
        return torch.cat([F.linear(swiglu_oai(F.linear(p, up[e]), self.alpha, self.limit), down[e]) for e, p in enumerate(parts)])


def can_group(device):
    return torch.cuda.get_device_capability(device) >= (8, 0)


class Router(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.num_local_experts, c.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.num_local_experts))


@torch.library.custom_op("nanom3::take_rows", mutates_args=())
def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x [N,C], rows [M] -> x[rows] [M,C]. An operator of its own, so that torch.compile does not read rows and take the gradient of the norm before
    them in one kernel: PyTorch up to 2.13 writes one that reads back what other threads have just stored and does not wait for them
    (pytorch/pytorch#190519): garbage in 9 of 20 runs (results/compile_race_h200.json). In layers wider than 1,024 it does so without any rows."""
    return x.index_select(0, rows)


@take_rows.register_fake
def _(x, rows):
    return x.new_empty(rows.shape[0], x.shape[1])


class Permute(torch.autograd.Function):
    """Every row of x [N,C] k times, in any order: x[rows] [N*k,C]. back [N*k] says where each copy went, a row's k copies side by side, and makes the
    gradient a read and a sum; autograd, which cannot know that every row is taken k times, would add row by row with atomics."""

    @staticmethod
    def forward(ctx, x, rows, back, k):
        ctx.save_for_backward(back)
        ctx.k = k
        return take_rows(x, rows)

    @staticmethod
    def backward(ctx, grad):
        return take_rows(grad, ctx.saved_tensors[0]).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class MoE(nn.Module):
    """Sigmoid scores; the correction bias helps to CHOOSE the experts only; the chosen scores are renormalised, the routed sum is
    scaled, one shared expert is added unscaled. In training the bias balances the load: see M3.balance."""

    def __init__(self, c):
        super().__init__()
        self.k, self.scaling = c.num_experts_per_tok, c.routed_scaling_factor
        self.gate, self.experts = Router(c), Experts(c)
        self.shared_experts = MLP(c, c.shared_intermediate_size)
        self.register_buffer("load", torch.zeros(c.num_local_experts), persistent=False)  # tokens an expert got since balance()

    def route(self, x):
        """x [N,C] -> experts [N,k], weights [N,k]; in fp32 whatever the autocast: near-ties decide which expert learns."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.gate.weight.float()).sigmoid()  # [N,E]
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.k, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True)

    def forward(self, x):
        B, T, C = x.shape
        x = x.reshape(B * T, C)  # [N,C]
        chosen, weights = self.route(x)
        flat = chosen.flatten()  # [N*k]
        load = torch.zeros_like(self.load, dtype=torch.long).scatter_add(0, flat, torch.ones_like(flat))
        if self.training:
            self.load += load
        order = flat.argsort(stable=True)
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype  # autocast knows no grouped products
        y = self.experts(Permute.apply(x.to(dtype), order // self.k, back, self.k), load)  # [N*k,C], sorted by expert
        y = Permute.apply(y, back, order, 1).view(B * T, self.k, C)  # in token order again
        routed = (y * weights.unsqueeze(-1).to(y.dtype)).sum(1) * self.scaling
        return (routed + self.shared_experts(x)).view(B, T, C)


# ---------------------------------------------------------------------------------------------------------------------------
# Cache


class Cache:
    """Preallocated keys, values and index keys of every layer, for `batch` rows of up to `capacity` positions.

    k[layer], v[layer] [B,S,Hkv,D]; ik[layer] [B,S,Di] or None; lens [B] int32 valid positions a row. Memory is taken at the
    first append, in the dtype and on the device of what is appended; what lies beyond lens is never read. index_dtype "fp8"
    keeps the index keys as msa.quantize's pair, in half the memory: ik[layer] holds the values, scale[layer] [B,S] the scales.

    In decoding everything is written in place and nothing asks the device for a number, so that a step can be recorded as a CUDA
    graph: `longest`, the longest row, is kept on the host for checking the capacity.
    """

    def __init__(self, config, batch, capacity, index_dtype="bf16"):
        if index_dtype not in ("bf16", "fp8"):
            raise ValueError(f'index_dtype must be "bf16" (as computed) or "fp8", not {index_dtype!r}')
        n = config.num_hidden_layers
        self.batch, self.capacity, self.longest, self.fp8 = batch, capacity, 0, index_dtype == "fp8"
        self.k, self.v, self.ik, self.scale = [None] * n, [None] * n, [None] * n, [None] * n
        self.lens = torch.zeros(batch, dtype=torch.int32)

    def check(self, B, T):
        """ValueError if T more positions of B rows do not fit."""
        if B != self.batch:
            raise ValueError(f"the cache has {self.batch} rows, the tokens {B}")
        if self.longest + T > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} positions, {self.longest + T} are needed")

    def append(self, layer, k, v, ik=None):
        """Write T new positions of every row behind its lens -> k, v, ik (or its FP8 pair) up to and with them, and the lens [B]
        they then have (lens moves in `advance`).

        A prompt of a single row gets views that end with its last position, and lens None: nothing need look past it.
        """
        B, T = k.shape[:2]
        ik, scale = quantize(ik) if self.fp8 and ik is not None else (ik, None)
        rows = torch.arange(B, device=k.device)[:, None]
        at = self.lens.long()[:, None] + torch.arange(T, device=k.device)  # [B,T]
        alone = B == 1 and T > FEW
        now = []
        for store, x in ((self.k, k), (self.v, v), (self.ik, ik), (self.scale, scale)):
            if x is not None:
                if store[layer] is None:
                    store[layer] = x.new_zeros(B, self.capacity, *x.shape[2:])
                plain(store[layer])[rows, at] = plain(x)
            now.append(store[layer][:, : self.longest + T] if alone and x is not None else store[layer])
        k, v, ik, scale = now
        return k, v, ik if scale is None else (ik, scale), None if alone else self.lens + T

    def advance(self, T):
        """All layers have written: T more positions count."""
        self.lens += T
        self.longest += T

    def truncate(self, lens):
        """Forget everything from position lens[b] on, row by row (lens [B], or one number for all)."""
        lens = torch.as_tensor(lens, dtype=torch.int32, device=self.lens.device).expand(self.batch)
        if (lens > self.lens).any() or (lens < 0).any():
            raise ValueError(f"truncate to {lens.tolist()}: rows hold {self.lens.tolist()}")
        self.lens.copy_(lens.clone())
        self.longest = int(lens.max())

    def select(self, rows):
        """Keep these rows, in this order; a row may be repeated (one prompt, many samples)."""
        rows = torch.as_tensor(rows, device=self.lens.device)
        for store in (self.k, self.v, self.ik, self.scale):
            for i, x in enumerate(store):
                store[i] = None if x is None else plain(x)[rows.to(x.device)].view(x.dtype)
        self.lens, self.batch = self.lens[rows], len(rows)
        self.longest = int(self.lens.max())


def plain(x):
    """FP8 as bytes: not every indexing of torch knows FP8."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


# ---------------------------------------------------------------------------------------------------------------------------
# The model


class Block(nn.Module):
    def __init__(self, c, i):
        super().__init__()
        self.self_attn = MSA(c, sparse=c.layer_types[i] == "minimax_m3_sparse", layer=i)
        self.mlp = MoE(c) if c.mlp_layer_types[i] == "sparse" else MLP(c, c.dense_intermediate_size)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x, cos, sin, cache=None, warmup=False):
        """-> x, index KL. A return value: kept on the side, activation checkpointing would silently drop the KL's gradient."""
        a, kl = self.self_attn(self.input_layernorm(x), cos, sin, cache, warmup)
        x = x + a
        return x + self.mlp(self.post_attention_layernorm(x)), kl


def chunked_loss(x, weight, targets, chunk=4096):
    """Sum of cross entropies of x [N,C] @ weight.T [C,V] against targets [N] (-100 ignored), and how many there are. A chunk of rows
    at a time, computed again in the backward pass: [N,V] never exists. Targets on the CPU cost no wait for the device."""

    def part(x, weight, y):
        return F.cross_entropy(F.linear(x, weight).float(), y, reduction="sum")

    asked = (targets != -100).nonzero().squeeze(1)  # most positions of picture rows carry no loss
    x, targets = x.index_select(0, asked.to(x.device, non_blocking=True)), targets[asked].to(x.device, non_blocking=True)
    total = x.sum().float() * 0.0  # a batch without any target still has a graph to walk back
    for a, y in zip(x.split(chunk), targets.split(chunk)):
        total = total + checkpoint(part, a, weight, y, use_reentrant=False, preserve_rng_state=False)
    return total, len(asked)


class M3(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.vision_tower = ViT(c.vision)
        v = c.vision
        self.multi_modal_projector = Projector(v.hidden_size, c.projector_hidden_size, c.hidden_size, v.spatial_merge_size)
        self.checkpoint_layers = False  # activation checkpointing: every layer is computed again in the backward pass
        self.reset_parameters()
        if c.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def reset_parameters(self):
        """Our own choice, unpublished for M3: matrices N(0, 1 / fan in), those that write to the residual stream divided by
        sqrt(2 layers) besides, embeddings N(0, 0.3^2), a small head (so the first loss is ln(vocabulary)). Biases 0, norms 1."""
        c = self.config
        for name, p in self.named_parameters():
            if p.ndim >= 2:
                std = {"embed_tokens.weight": 0.3, "lm_head.weight": 0.02}.get(name, p.shape[-1] ** -0.5)
                if name.startswith("multi_modal_projector"):
                    std *= 2
                if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
                    std /= (2 * c.num_hidden_layers) ** 0.5
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def embed(self, tokens, patches, grids):
        """Token embeddings [B,T,C], placeholders replaced by the visual tokens in the order of the flattened batch.

        Counting the placeholders takes the host: free if tokens are still on the CPU, a wait for the device if they are not.
        """
        c = self.config
        at = ((tokens == c.image_token_id) | (tokens == c.video_token_id)).flatten().nonzero().squeeze(1)  # [placeholders]
        have = 0 if patches is None else len(patches) // c.vision.spatial_merge_size**2
        if len(at) != have:
            raise ValueError(f"{len(at)} placeholder tokens, but {have} visual tokens")
        device = self.embed_tokens.weight.device
        x = self.embed_tokens(tokens.to(device, non_blocking=True))
        if patches is None:
            return x
        seen = self.multi_modal_projector(self.vision_tower(patches, grids)).to(x.dtype)  # [visual tokens, C]
        return x.flatten(0, 1).index_copy(0, at.to(device, non_blocking=True), seen).view_as(x)

    def forward(self, tokens, patches=None, grids=None, targets=None, cache=None, warmup=False, last_only=False):
        """tokens [B,T] (with a cache: the T that follow each row's lens), patches [N,P] float
        and grids [n,3] on the CPU of every picture and clip in the order of their placeholders, targets [B,T] already shifted,
        -100 ignored -> M3Output. Tokens and targets may stay on the CPU: then the host never waits for the device.

        warmup: see MSA.forward. last_only: logits of the last position alone. Raises ValueError when placeholders and visual
        tokens differ in number, or the cache would overflow; nothing is written then.
        """
        if cache is not None:
            cache.check(*tokens.shape)
        x, kl = self.trunk(self.embed(tokens, patches, grids), cache, warmup)
        if targets is None:
            return M3Output(self.lm_head(self.norm(x[:, -1:] if last_only else x)), None, None, kl)
        total, n = chunked_loss(self.norm(x).flatten(0, 1), self.lm_head.weight, targets.flatten())
        lm_loss = total / max(1, n)  # no targets at all: a loss of 0, not NaN
        return M3Output(None, lm_loss + self.config.index_kl_coef * kl, lm_loss, kl)

    def trunk(self, x, cache=None, warmup=False):
        """All layers: embeddings [B,T,C] -> hidden state [B,T,C] before the last norm, index KL."""
        c = self.config
        T = x.shape[1]
        pos = torch.arange(T, device=x.device)[None]  # [1,T]
        if cache is not None:
            cache.lens = cache.lens.to(x.device)
            pos = pos + cache.lens[:, None]  # [B,T]
        cos, sin = rope_table(pos, c.rotary_dim, c.rope_theta)
        kl = torch.zeros((), device=x.device)
        if self.training and cache is None and T <= c.index_topk_blocks * c.index_block_size:
            warmup = True  # in rows so short every block is kept, and sparse attention is dense attention
        for layer in self.layers:
            if self.checkpoint_layers and self.training and cache is None:
                x, layer_kl = checkpoint(layer, x, cos, sin, None, warmup, use_reentrant=False)
            else:
                x, layer_kl = layer(x, cos, sin, cache, warmup)
            kl = kl + layer_kl
        if cache is not None:
            cache.advance(T)
        return x, kl

    def prefill(self, tokens, cache, patches=None, grids=None, chunk=8192):
        """Read a prompt [B,T] into the cache, `chunk` tokens at a time -> logits [B,V] of what follows it.

        The same as one forward, in memory for the cache, the prompt's embeddings [B,T,C] and what a chunk needs. Raises what
        forward raises, with nothing written.
        """
        cache.check(*tokens.shape)
        for x in self.embed(tokens, patches, grids).split(chunk, dim=1):
            x, _ = self.trunk(x, cache)
        return self.lm_head(self.norm(x[:, -1]))

    def step(self, tokens, cache):
        """Tokens [B,T] on the model's device, none of them a placeholder -> logits [B,V] of what follows them.

        What forward does with them, but nothing here waits for the host, nor looks at the tokens: it can be recorded as a CUDA graph.
        """
        cache.check(*tokens.shape)
        x, _ = self.trunk(self.embed_tokens(tokens), cache)
        return self.lm_head(self.norm(x[:, -1]))

    @torch.no_grad()
    def balance(self, rate):
        """Move every MoE's correction bias by `rate`: up for the experts that got less than their share since the last call,
        down for those that got more, as in DeepSeek-V3: no auxiliary loss. Loads are summed over processes; activation
        checkpointing counts every token twice, which changes no sign."""
        for m in self.modules():
            if isinstance(m, MoE):
                if torch.distributed.is_available() and torch.distributed.is_initialized():
                    torch.distributed.all_reduce(m.load)
                m.gate.e_score_correction_bias += rate * torch.sign(m.load.mean() - m.load)
                m.load.zero_()

    def compile_layers(self):
        """torch.compile every decoder and ViT layer in place: layers of one kind share one compilation. ValueError on a GPU if a layer is wider than 1,024:
        there Inductor writes the kernel that take_rows speaks of for a norm alone."""
        width = max(self.config.hidden_size, self.config.vision.hidden_size)
        if self.embed_tokens.weight.is_cuda and width > 1024:
            raise ValueError(f"layers {width:,} wide are not compiled, PyTorch gets their gradients wrong: train with --no-compile")
        for layer in self.layers:
            layer.compile(dynamic=False)  # two shapes only, rows of text and rows of pictures
        for layer in self.vision_tower.layers:
            layer.compile(dynamic=True)  # the number of patches differs from batch to batch

    # ---- sizes ----

    def parameters_total(self):
        return sum(p.numel() for p in self.parameters())

    def parameters_active(self, embeddings=True):
        """Parameters a text token passes through: k of the E experts, no ViT; with or without embedding and head."""
        c = self.config
        n = sum(p.numel() for m in (self.layers, self.norm) for p in m.parameters())
        idle = sum(p.numel() for m in self.modules() if isinstance(m, Experts) for p in m.parameters())
        n -= idle * (c.num_local_experts - c.num_experts_per_tok) // c.num_local_experts
        return n + (self.embed_tokens.weight.numel() + self.lm_head.weight.numel() if embeddings else 0)

    def flops_per_token(self, context):
        """Forward FLOPs of a text token, the average in a window of `context` tokens, which sees context / 2 keys:

        2 x active weights, head in and embedding out, + 4 H D x keys looked at + 2 Hkv Di x keys indexed, a layer.
        """
        c = self.config
        n = 2 * (self.parameters_active(False) + self.lm_head.weight.numel())
        for kind in c.layer_types:
            sparse = kind == "minimax_m3_sparse" and c.attention != "dense"
            most = min(context, c.index_topk_blocks * c.index_block_size) if sparse else context
            keys = most - most**2 / (2 * context)  # the mean over positions t of min(t, most)
            n += 4 * c.num_attention_heads * c.head_dim * keys
            if sparse and c.attention in ("msa", "shared", "token"):
                n += 2 * c.num_key_value_heads * c.index_head_dim * context / 2
        return n

    # ---- the released weights ----

    @classmethod
    def from_hf(cls, config, state_dict):
        """The released architecture's config (its to_dict()) and IN-MEMORY state dict -> our model with the same numbers.

        state_dict is that of MiniMaxM3SparseForConditionalGeneration, with fused expert tensors. ValueError names a config
        field that cannot be expressed here, or the first tensor that is missing, left over or of another shape.
        """
        model = cls(config_from_hf(config))
        ours = model.state_dict()
        theirs = dict(state_dict)
        if model.config.tie_word_embeddings:
            theirs.setdefault("lm_head.weight", theirs.get("model.language_model.embed_tokens.weight"))
        want = model.to_hf()
        for what, names in (("is missing", want.keys() - theirs.keys()), ("is not expected", theirs.keys() - want.keys())):
            if names:
                raise ValueError(f"state dict: {min(names)} {what} ({len(names)} such)")
        for k, x in want.items():
            if theirs[k].shape != x.shape:
                raise ValueError(f"state dict: {k} has shape {list(theirs[k].shape)}, expected {list(x.shape)}")
        model.load_state_dict({k: theirs[name_in_hf(k)].reshape(x.shape) for k, x in ours.items()})
        return model

    def to_hf(self):
        """The state dict under the released names and shapes; the inverse of from_hf. The tensors share the model's memory."""
        v = self.config.vision
        out = {name_in_hf(k): x for k, x in self.state_dict().items()}
        k = name_in_hf("vision_tower.embed.weight")  # a Conv3d kernel there: [out, C, tp, p, p]
        out[k] = out[k].view(-1, v.num_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
        return out


VISION_NAMES = (
    [("embed.", "embeddings.proj."), ("pre_norm.", "pre_layrnorm."), (".norm1.", ".layer_norm1."), (".norm2.", ".layer_norm2.")]
    + [(f".{x}.", f".mlp.{x}.") for x in ("fc1", "fc2")]
    + [(f".{x}_proj.", f".self_attn.{x}_proj.") for x in ("q", "k", "v", "out")]
)
INDEX_NAMES = [(f"index_{x}", f"indexer.{x}") for x in ("q_proj", "k_proj", "q_norm", "k_norm")]


def name_in_hf(k):
    """Our tensor's name -> the released model's, piece by piece."""
    if k.startswith("lm_head."):
        return k
    eyes = k.startswith(("vision_tower.", "multi_modal_projector."))
    for ours, theirs in VISION_NAMES if k.startswith("vision_tower.") else INDEX_NAMES:
        k = k.replace(ours, theirs)
    return f"model.{k}" if eyes else f"model.language_model.{k}"


def config_from_hf(config):
    """The released config as a dict -> M3Config. ValueError names a field whose value has no counterpart here."""
    t, v = dict(config["text_config"]), dict(config["vision_config"])
    rope, vision_rope = t.get("rope_parameters") or {}, v.get("rope_parameters") or {}
    for where, have, name, fixed in (
        ("rope_parameters", rope, "rope_type", "default"),
        ("vision rope_parameters", vision_rope, "rope_type", "axial"),
        ("text_config", t, "hidden_act", "silu"),  # the pointwise act of the released class is never used
        ("vision_config", v, "hidden_act", "gelu"),
        ("text_config", t, "attention_dropout", 0.0),
        ("vision_config", v, "attention_dropout", 0.0),
    ):
        if have.get(name, fixed) != fixed:
            raise ValueError(f"{where}: {name} {have[name]!r} cannot be expressed here, only {fixed!r}")
    taken = {f.name for f in fields(M3Config)} - {"vision", "attention", "index_detach", "index_kl_coef"}
    kw = {k: x for k, x in t.items() if k in taken}
    n = t["num_hidden_layers"]  # where a list is missing, transformers' default counts, not the released model
    kw["layer_types"] = t.get("layer_types") or ["full_attention"] * n
    kw["mlp_layer_types"] = t.get("mlp_layer_types") or ["sparse"] * n
    kw["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)  # the field rotary_dim is not read there either
    kw["rope_theta"] = rope.get("rope_theta", 5e6)
    kw |= {"image_token_id": config["image_token_index"], "video_token_id": config["video_token_index"]}
    kw["projector_hidden_size"] = config["projector_hidden_size"]
    kw["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    vision = {k: x for k, x in v.items() if k in {f.name for f in fields(ViTConfig)}}
    vision["rope_theta"] = vision_rope.get("rope_theta", 1e4)
    return M3Config(vision=ViTConfig(**vision), **kw)


def main():
    configs = {name: M3Config.of_size(name, vocab_size=4096, image_token_id=4093, video_token_id=4094) for name in SIZES}
    print("FLOPs of a token: 2 x active weights + a layer 4 x H x D x keys looked at + 2 x Hkv x Di x keys indexed")
    for name, config in (configs | {"released": M3Config()}).items():
        with torch.device("meta"):  # shapes without memory: the released size has 427 billion parameters
            m = M3(config)
        unit, letter = (1e9, "B") if name == "released" else (1e6, "M")
        counts = m.parameters_total(), m.parameters_active(), m.parameters_active(embeddings=False)
        total, active, bare = (f"{n / unit:.1f}{letter}" for n in counts)
        print(f"{name}: {total} parameters, {active} active a token, {bare} without embedding and head")
        for context in (4096, 1 << 20):
            print(f"  {m.flops_per_token(context) / unit:,.1f}{letter} FLOPs a token in a context of {context:,}")
    torch.manual_seed(0)
    model, tokens = M3(configs["tiny"]).eval(), torch.randint(0, 4000, (1, 300))
    with torch.no_grad():
        whole, cache = model(tokens).logits, Cache(model.config, 1, 300)
        pieces = torch.cat([model(part, cache=cache).logits for part in tokens.split(7, dim=1)], dim=1)  # [1,300,4096]
    print(f"tiny: 300 tokens at once and in sevens through the cache: largest difference {(whole - pieces).abs().max().item():.0e}")


if __name__ == "__main__":
    main()
