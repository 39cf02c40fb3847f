"""The vision side of MiniMax M3: pictures and clips to patches, a ViT that attends over four frames at once, and the projector.

    python vit3d.py                     a demonstration on the CPU: shapes, one equality, one number

The idea. A 2D ViT looks at every frame alone, so motion is left to the language model. Here a clip is cut into SEGMENTS of at
most four temporal patches, and inside a segment every patch attends to every other: 3D attention. A still picture is a segment of
one. Positions are 3-axis RoPE (time, height, width), and time restarts in each segment. A segment sees nothing outside itself.

    clip [T,C,h,w] -> patchify -> patches [N, C*tp*p*p], grids [n,3]      one grid row (t, h, w) a segment, in patches
    patches -> ViT -> [N, hidden] -> Projector -> [N / merge^2, text hidden]      one visual token for 2 x 2 patches

Follows the released model (transformers, minimax_m3_vl, version 5.23 or later).
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn


@dataclass
class ViTConfig:
    """Released names; the defaults are the released sizes."""

    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    num_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2  # frames in one patch; our presets use 1
    spatial_merge_size: int = 2  # merge x merge patches become one visual token
    layer_norm_eps: float = 1e-5
    rope_theta: float = 1e4
    frames_per_segment: int = 4  # temporal patches that attend to each other; 1 is a 2D ViT

    def __post_init__(self):
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"vision hidden_size {self.hidden_size} is no multiple of {self.num_attention_heads} heads")
        if self.hidden_size // self.num_attention_heads < 6:
            raise ValueError("a vision head needs at least 6 dims: two for each of the three axes")
        if self.frames_per_segment < 1:
            raise ValueError(f"frames_per_segment must be at least 1, not {self.frames_per_segment}")


# ---------------------------------------------------------------------------------------------------------------------------
# Patches


def patchify(clip, patch_size=14, temporal_patch_size=1, merge_size=2, frames_per_segment=4):
    """Cut a picture or clip into patches and segments, in the order the ViT and the projector expect.

    clip [T,C,h,w], any dtype (a still picture has T = 1; with a temporal patch of 2 it is doubled, as is an odd last frame)
    -> patches [N, C*tp*p*p] in that order within a patch, grids [n,3] int64 (t, h, w) in patches, one row a segment.
    Within a temporal patch the patches run block after block of merge x merge neighbours, so that the projector joins rows that
    follow each other. ValueError if the clip is empty, h or w is no multiple of patch_size * merge_size, or frames_per_segment
    is below 1.
    """
    if clip.dim() != 4:
        raise ValueError(f"a clip has shape [T,C,h,w], not {list(clip.shape)}")
    T, C, h, w = clip.shape
    p, tp, m = patch_size, temporal_patch_size, merge_size
    if T < 1 or h < 1 or w < 1 or h % (p * m) or w % (p * m):
        raise ValueError(f"a clip of {T} frames of {h} x {w} pixels: height and width must be multiples of {p * m}")
    if frames_per_segment < 1:
        raise ValueError(f"frames_per_segment must be at least 1, not {frames_per_segment}")
    if T % tp:
        clip = torch.cat((clip, clip[-1:].expand(tp - T % tp, -1, -1, -1)))  # [t*tp,C,h,w]
    t, hp, wp = clip.shape[0] // tp, h // p, w // p
    x = clip.reshape(t, tp, C, hp // m, m, p, wp // m, m, p)  # [t, tp, C, h blocks, m, p, w blocks, m, p]
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # [t, h blocks, w blocks, m, m, C, tp, p, p]
    lengths = [min(frames_per_segment, t - i) for i in range(0, t, frames_per_segment)]
    return x.reshape(t * hp * wp, C * tp * p * p), torch.tensor([[n, hp, wp] for n in lengths])


@functools.cache
def segment_positions(t, h, w, m):
    """(t, h, w) of every patch of one segment, [t*h*w, 3], in patchify's order."""
    at = torch.stack(torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij"), dim=-1)  # [t,h,w,3]
    return at.view(t, h // m, m, w // m, m, 3).transpose(2, 3).reshape(-1, 3)  # [t, h blocks, w blocks, m, m, 3] in rows


def positions(grids, merge_size):
    """(t, h, w) of every patch of all segments, [N,3]; t restarts in each."""
    return torch.cat([segment_positions(*g, merge_size) for g in grids.tolist()])


def rope_3d(at, head_dim, theta):
    """cos and sin [N,R] fp32 for positions at [N,3] (released MiniMaxM3VLVisionRotaryEmbedding).

    Each axis gets the largest even number of dims <= head_dim / 3 (80 -> 26 each, R = 78). The bands stand T|H|W in the first
    half and again in the second, so that dim i pairs with i + R/2 across all three; the last head_dim - R dims pass unchanged.
    """
    band = 2 * (head_dim // 3 // 2)
    freq = 1.0 / theta ** (torch.arange(0, band, 2, device=at.device, dtype=torch.float32) / band)  # [band/2]
    angle = (at.float()[:, :, None] * freq).flatten(1)  # [N, 3*band/2]
    angle = torch.cat((angle, angle), dim=-1)  # [N,R]
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """x [N,heads,d]: rotate the first R dims, pairs (i, i + R/2)."""
    R = cos.shape[-1]
    rot, rest = x[..., :R].float(), x[..., R:]
    turned = torch.cat((-rot[..., R // 2 :], rot[..., : R // 2]), dim=-1)
    return torch.cat(((rot * cos[:, None] + turned * sin[:, None]).to(x.dtype), rest), dim=-1)


# ---------------------------------------------------------------------------------------------------------------------------
# The ViT


@torch.compiler.disable  # the groups differ from batch to batch: inside a compiled layer every new set would be compiled anew
def attend(q, k, v, groups, edges):
    """q, k, v [N,heads,d] -> [N,heads*d]; groups [g,2] on the CPU: one after the other, `count` segments of `length` patches
    each; edges int32 [n+1]: where each segment begins, and the end. Nothing is padded and no segment sees another: on a GPU in
    half precision FlashAttention takes them all in one call, elsewhere a group is one batch. split and not slices: the gradient of
    a slice is as long as all of x, that of a split is put together once."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and torch.cuda.get_device_capability(q.device) >= (8, 0):
        longest = int(groups[:, 1].max())
        return varlen_attn(q, k, v, edges, edges, longest, longest).flatten(1)
    outs, rows = [], groups.prod(-1).tolist()
    for (count, length), *qkv in zip(groups.tolist(), q.split(rows), k.split(rows), v.split(rows)):
        out = F.scaled_dot_product_attention(*(x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv))  # [count,heads,length,d]
        outs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))  # [count*length, heads*d]
    return torch.cat(outs)


class Layer(nn.Module):
    """Pre-LN transformer layer with biases everywhere and an erf-GELU MLP."""

    def __init__(self, c):
        super().__init__()
        self.heads = c.num_attention_heads
        self.norm1, self.norm2 = (nn.LayerNorm(c.hidden_size, c.layer_norm_eps) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(c.hidden_size, c.hidden_size) for _ in range(4))
        self.fc1 = nn.Linear(c.hidden_size, c.intermediate_size)
        self.fc2 = nn.Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x, cos, sin, groups, edges):
        """x [N,C], cos and sin [N,R], groups and edges as for attend -> [N,C]."""
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)) for f in (self.q_proj, self.k_proj, self.v_proj))  # [N,heads,d]
        x = x + self.out_proj(attend(rotate(q, cos, sin), rotate(k, cos, sin), v, groups, edges))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """patches [N, C*tp*p*p] float, grids [n,3] on the CPU -> features [N, hidden].

    No padding: segments of one length are one batch for attention, whatever pictures they come from. No class token, no absolute
    position, one LayerNorm after the patch embedding and none at the end. Raises ValueError if the grids do not add up to N
    patches, or cannot be merged.
    """

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        # The released Conv3d with kernel = stride is a linear map of the flattened patch; Linear is the same numbers and faster.
        self.embed = nn.Linear(c.num_channels * c.temporal_patch_size * c.patch_size**2, c.hidden_size, bias=False)
        self.pre_norm = nn.LayerNorm(c.hidden_size, c.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))

    @staticmethod
    def plan(grids):
        """Bring segments of one length together -> order [N] of the patches (None: they are), groups [g,2] for attend."""
        lengths = grids.prod(-1)  # [n] patches of each segment
        sizes, counts = lengths.unique(return_counts=True)  # sorted
        groups = torch.stack((counts, sizes), dim=-1)
        by_length = lengths.argsort(stable=True)
        if (by_length == torch.arange(len(lengths))).all():
            return None, groups
        segment = torch.arange(len(lengths)).repeat_interleave(lengths)  # [N] the segment of each patch
        return lengths[segment].argsort(stable=True), groups

    def forward(self, patches, grids):
        c = self.config
        if (said := int(grids.prod(-1).sum())) != len(patches):
            raise ValueError(f"the grids describe {said} patches, but there are {len(patches)}")
        if (grids[:, 1:] % c.spatial_merge_size).any():
            raise ValueError(f"grid heights and widths must be multiples of {c.spatial_merge_size}, not {grids.tolist()}")
        order, groups = self.plan(grids)
        at = positions(grids, c.spatial_merge_size)
        if order is not None:
            at, patches = at[order], patches[order.to(patches.device)]
        cos, sin = rope_3d(at.to(patches.device), c.hidden_size // c.num_attention_heads, c.rope_theta)
        x = self.pre_norm(self.embed(patches.to(self.embed.weight.dtype)))  # [N,hidden]
        edges = F.pad(groups[:, 1].repeat_interleave(groups[:, 0]).cumsum(0), (1, 0)).int().to(x.device)
        for layer in self.layers:
            x = layer(x, cos, sin, groups, edges)
        return x if order is None else torch.empty_like(x).index_copy(0, order.to(x.device), x)


class Projector(nn.Module):
    """features [N, vision hidden] -> visual tokens [N/merge^2, text hidden]: an MLP a patch, then one over neighbours."""

    def __init__(self, vision_hidden, projector_hidden, text_hidden, merge_size):
        super().__init__()
        self.merge = merge_size**2
        self.linear_1 = nn.Linear(vision_hidden, projector_hidden)
        self.linear_2 = nn.Linear(projector_hidden, text_hidden)
        self.merge_linear_1 = nn.Linear(text_hidden * self.merge, projector_hidden)
        self.merge_linear_2 = nn.Linear(projector_hidden, text_hidden)

    def forward(self, x):
        x = self.linear_2(F.gelu(self.linear_1(x)))  # [N,text]
        x = x.view(-1, self.merge * x.shape[-1])  # [N/merge^2, merge^2*text]
        return self.merge_linear_2(F.gelu(self.merge_linear_1(x)))


def main():
    clip = torch.randn(8, 3, 56, 84, generator=torch.Generator().manual_seed(0))
    changed = clip.clone()
    changed[0] += 1  # touch the first frame only
    print(f"clip {list(clip.shape)}: 8 frames of 56 x 84 pixels, patches of 14 x 14, so 4 x 6 patches a frame")
    for frames in (1, 4):
        torch.manual_seed(1)
        c = ViTConfig(hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, temporal_patch_size=1)
        vit, cut = ViT(c), lambda x, frames=frames: patchify(x, frames_per_segment=frames)
        patches, grids = cut(clip)
        out = vit(patches, grids)
        moved = (vit(*cut(changed)) - out).abs().view(8, -1).amax(1) > 1e-6  # [8], a frame each
        print(f"frames_per_segment {frames}: patches {list(patches.shape)}, {len(grids)} segments (t, h, w) {grids[0].tolist()}")
        print(f"  touching frame 0 changes the features of frames {moved.nonzero().flatten().tolist()}")
    alone = vit(*cut(clip[:4]))  # [96,96]
    diff = (alone - out[: len(alone)]).abs().max().item()
    print(f"the first segment alone gives the same features: largest difference {diff:.0e}")
    tokens = Projector(96, 128, 64, 2)(out)
    print(f"projector: features {list(out.shape)} -> visual tokens {list(tokens.shape)}, one for 2 x 2 patches")


if __name__ == "__main__":
    main()
