"""The vision side of MiniMax M3: pictures and clips to patches, a ViT that attends over four frames at once, and the projector.

    python vit3d.py                     a demonstration on the CPU: shapes, one equality, one number

The idea. A 2D ViT looks at every frame alone, so motion is left to the language model. Here a clip is cut into SEGMENTS of at most four
temporal patches, and inside a segment every patch attends to every other: 3D attention. A still picture is a segment of one. Positions
are 3-axis RoPE (time, height, width), and time restarts in each segment. A segment sees nothing outside itself.

    clip [T,C,h,w] -> patchify -> patches [N, C*tp*p*p], grids [n,3]      one grid row (t, h, w) a segment, in patches
    patches -> ViT -> [N, hidden] -> Projector -> [N / merge^2, text hidden]      one visual token for 2 x 2 patches

Follows the released model (transformers, minimax_m3_vl, version 5.23 or later).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


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
            raise ValueError(f"vision hidden_size {self.hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}")
        if self.hidden_size // self.num_attention_heads < 6:
            raise ValueError("a vision head needs at least 6 dims: two for each of the three axes")


# ---------------------------------------------------------------------------------------------------------------------------
# Patches


def patchify(clip, patch_size=14, temporal_patch_size=1, merge_size=2, frames_per_segment=4):
    """Cut a picture or clip into patches and segments, in the order the ViT and the projector expect.

    clip [T,C,h,w], any dtype (a still picture has T = 1; with a temporal patch of 2 it is doubled, as is an odd last frame)
    -> patches [N, C*tp*p*p] in that order within a patch, grids [n,3] int64 (t, h, w) in patches, one row a segment.
    Within a temporal patch the patches run block after block of merge x merge neighbours, so that the projector's groups are contiguous.
    Raises ValueError if h or w is no multiple of patch_size * merge_size.
    """
    if clip.dim() != 4:
        raise ValueError(f"a clip has shape [T,C,h,w], not {list(clip.shape)}")
    T, C, h, w = clip.shape
    p, tp, m = patch_size, temporal_patch_size, merge_size
    if T < 1 or h < 1 or w < 1 or h % (p * m) or w % (p * m):
        raise ValueError(f"a clip of {T} frames of {h} x {w} pixels: height and width must be multiples of {p * m}")
    if T % tp:
        clip = torch.cat((clip, clip[-1:].expand(tp - T % tp, -1, -1, -1)))
    t, hp, wp = clip.shape[0] // tp, h // p, w // p
    x = clip.reshape(t, tp, C, hp // m, m, p, wp // m, m, p)
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # [t, h blocks, w blocks, m, m, C, tp, p, p]
    lengths = [min(frames_per_segment, t - i) for i in range(0, t, frames_per_segment)]
    return x.reshape(t * hp * wp, C * tp * p * p), torch.tensor([[n, hp, wp] for n in lengths])


def positions(grids, merge_size):
    """(t, h, w) of every patch, [N,3], in patchify's order; t restarts in each segment."""
    parts = []
    for t, h, w in grids.tolist():
        m = merge_size
        at = torch.stack(torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij"), dim=-1)  # [t,h,w,3]
        at = at.view(t, h // m, m, w // m, m, 3).transpose(2, 3)  # [t, h blocks, w blocks, m, m, 3]
        parts.append(at.reshape(-1, 3))
    return torch.cat(parts)


def rope_3d(at, head_dim, theta):
    """cos and sin [N,R] for positions at [N,3]. Each axis gets the largest even number of dims <= head_dim / 3 (80 -> 26, R = 78); the bands
    stand T|H|W in the first half and again in the second, so that dim i pairs with i + R/2 across all three; the last head_dim - R dims stay."""
    band = 2 * (head_dim // 3 // 2)
    freq = theta ** -(torch.arange(0, band, 2, device=at.device, dtype=torch.float32) / band)  # [band/2]
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


class Layer(nn.Module):
    """Pre-LN transformer layer with biases everywhere and an erf-GELU MLP."""

    def __init__(self, c):
        super().__init__()
        self.heads = c.num_attention_heads
        self.norm1, self.norm2 = nn.LayerNorm(c.hidden_size, c.layer_norm_eps), nn.LayerNorm(c.hidden_size, c.layer_norm_eps)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(c.hidden_size, c.hidden_size) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(c.hidden_size, c.intermediate_size), nn.Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x, cos, sin, groups):
        """x [N,C]; groups: [(start, count, length)]: `count` segments of `length` patches each stand one after the other from `start`."""
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)) for f in (self.q_proj, self.k_proj, self.v_proj))  # [N,heads,d]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        outs = []
        for start, count, length in groups:
            one = [y[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2) for y in (q, k, v)]  # [count,heads,length,d]
            outs.append(F.scaled_dot_product_attention(*one).transpose(1, 2).flatten(2).flatten(0, 1))  # [count*length,C]
        x = x + self.out_proj(torch.cat(outs))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """patches [N, C*tp*p*p] float, grids [n,3] on the CPU -> features [N, hidden].

    No padding: segments of one length are one batch for attention, whatever pictures they come from. No class token, no absolute
    position, one LayerNorm after the patch embedding and none at the end. Raises ValueError if the grids do not add up to N patches.
    """

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        # The released Conv3d with kernel = stride is a linear map of the flattened patch; Linear is the same numbers and faster.
        self.embed = nn.Linear(c.num_channels * c.temporal_patch_size * c.patch_size**2, c.hidden_size, bias=False)
        self.pre_norm = nn.LayerNorm(c.hidden_size, c.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))

    def plan(self, grids):
        """Sort the segments by length -> (order [N] or None if sorted already, groups [(start, count, length)])."""
        lengths = grids.prod(-1).tolist()
        by_length = sorted(range(len(lengths)), key=lambda i: lengths[i])
        groups, start = [], 0
        for length in sorted(set(lengths)):
            count = lengths.count(length)
            groups.append((start, count, length))
            start += count * length
        if by_length == list(range(len(lengths))):
            return None, groups
        firsts = torch.tensor([0, *lengths]).cumsum(0)
        return torch.cat([torch.arange(int(firsts[i]), int(firsts[i + 1])) for i in by_length]), groups

    def forward(self, patches, grids):
        c = self.config
        if int(grids.prod(-1).sum()) != len(patches):
            raise ValueError(f"the grids describe {int(grids.prod(-1).sum())} patches, but there are {len(patches)}")
        order, groups = self.plan(grids)
        at = positions(grids, c.spatial_merge_size)
        if order is not None:
            at, patches = at[order], patches[order.to(patches.device)]
        cos, sin = rope_3d(at.to(patches.device), c.hidden_size // c.num_attention_heads, c.rope_theta)
        x = self.pre_norm(self.embed(patches.to(self.embed.weight.dtype)))  # [N,hidden]
        for layer in self.layers:
            x = layer(x, cos, sin, groups)
        return x if order is None else torch.empty_like(x).index_copy(0, order.to(x.device), x)


class Projector(nn.Module):
    """features [N, vision hidden] -> visual tokens [N / merge^2, text hidden]: an MLP a patch, then an MLP over merge x merge neighbours."""

    def __init__(self, vision_hidden, projector_hidden, text_hidden, merge_size):
        super().__init__()
        self.merge = merge_size**2
        self.linear_1, self.linear_2 = nn.Linear(vision_hidden, projector_hidden), nn.Linear(projector_hidden, text_hidden)
        self.merge_linear_1, self.merge_linear_2 = nn.Linear(text_hidden * self.merge, projector_hidden), nn.Linear(projector_hidden, text_hidden)

    def forward(self, x):
        x = self.linear_2(F.gelu(self.linear_1(x)))  # [N,text]
        x = x.view(-1, self.merge * x.shape[-1])  # [N/merge^2, merge^2*text]
        return self.merge_linear_2(F.gelu(self.merge_linear_1(x)))


def main():
    torch.manual_seed(0)
    clip = torch.randn(8, 3, 56, 84)
    for frames in (1, 4):
        c = ViTConfig(hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, temporal_patch_size=1, frames_per_segment=frames)
        patches, grids = patchify(clip, c.patch_size, 1, 2, frames)
        torch.manual_seed(1)
        vit = ViT(c)
        out = vit(patches, grids)
        changed = clip.clone()
        changed[0] += 1  # touch the first frame only
        moved = (vit(patchify(changed, c.patch_size, 1, 2, frames)[0], grids) - out).abs().view(8, -1).amax(1) > 1e-6
        print(f"frames_per_segment {frames}: clip {list(clip.shape)} -> patches {list(patches.shape)}, segments {grids.tolist()}")
        print(f"   touching frame 0 changes the features of frames {moved.nonzero().flatten().tolist()}")
    alone = vit(*patchify(clip[:4], c.patch_size, 1, 2, 4))
    print(f"the first segment alone gives the same features: largest difference {(alone - out[: len(alone)]).abs().max().item():.0e}")


if __name__ == "__main__":
    main()
