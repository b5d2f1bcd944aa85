"""Codebooks of ggml: the points that the indices in blocks of its IQ types stand for, and codes of single weights.

Several weights share an index of a codebook; in codes each has a number of its own, of 3 or 4 bits, with its sign.
The sets of points are ggml's (`ggml-common.h`, MIT licence, the ggml authors): its files cannot be read without them.
A point of `width` digits below `base` is the number sum(digit[i] * base**i); a codebook has its numbers in ascending
order, stored as their differences: uint16, zlib, base 85.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# Name → base, width, differences. IQ1_M has the codebook of IQ1_S.
_STORED = {
    "IQ2_XXS": (
        3,
        8,
        "c-mEw!AiqG6h*Hxgb;=xA%sE7P$Wnw5<+oNqze}!(nXOjq|1JZOFzJG@mu^J&%BO72{W1Z=HC16dm~-``3jbs&xM@}TVAF8ooYoQPt>T_wPm"
        "ZB>+{*qajlk9rC^N6`qlNbe#dRl2Gn!bE5Z3(FCiN;l_u6YGd;R1Ep-Fp$ykjR_;Ey|?kv;k%6zZcC;qP)S8D*<>O@t~&AaaZbzFdVxs%3pQ"
        "ykcX`H1GBN4+E3>X4C+N-JY-aCYuA_1Cipyp8miJOu4@3$h}=gum6^_yOesZiM0V26EJgzD>Qw#lj~4sF(RI(i@~1blf*+9&|+eJpYmGpa(p"
        ")R66R5seBqXf;p+YnDhhew-^K",
    ),
    "IQ2_XS": (
        3,
        8,
        "c-n=ML2JV>426XW#+VR72%(HnN*JMx5=t38j2(LDX^fr6PCM<m-?E>)&$1WVrs*(oB~^M)dX|WpIoTE8p4j2@S1avVg-yTJS=8&DNg+<^f0)"
        "AUXE8hoty+b~TUlImlPOy0BnQEzXho)lyW-v?hFe|Olgeoq71)LjV!YzqPqKoQW4EbdkJrdH@sxNqekOw)<zb@fA5S$}mYNkc9TP{El6w!nC"
        "!XUyr`bKYHQhZCUGVjqe@pjE?XJ(9!QoO>q1@B`h}x8D<*Idfu?A}xQ5>fuUZ<JfW;UoDx5mh$EM+%p<5ZXMx)w#PtU+n;a_z8FO^kf&Zp4n"
        "9>TTo;v?W=EylO8Sc?WwZ2dYBl+y*o!x&>~Fs`1s!v16mUR77ex2JT+BuB6&4hLcY?0<s^cEckyxZYwX`HSs%D;Xt*azYnJCdE1q;MV%e!13"
        "6vNK2(Qp*7BnmasRf86J9B3-^23@mMj^e",
    ),
    "IQ2_S": (
        3,
        8,
        "c-oy+OKQVF3>9GzLojAAC757JFvWyWvM3>oE_;Tap^M!A0F^XjXZ~@5u|1ZhXX!m@46rF2YQ;0sRb?YFiBiEEjC>GufY1uEBCCFoM|@!6iz$"
        "kFkT=3M%E-4PbeS4UY;YxQkRMxoL``^%Ypq)tp~+URs`{vE)iovWYqRi!E_Za+e9g}>S@U50l;wS*n@%G843>c%tr($&V^J%cg_aIffktyrV"
        "vvm{U1oNA;YAfYu3i~;)ZpG3m;#>nj%kE%s-hu3?uNIOiu$vF*{pK&Qdeg7#;A_|<vv@}6|(|emeHMft4e%RjBQ10UR|Hs@xnQIt*1G1SRI|"
        "S4NC`IGw(Ishow3LC+eJZ_wbc0^JM5Nmajv!WBHlzT(GBsAJ@T0`es9Y{0pDKy!tzfzZ0Uj^OX5U=VQIB<(x37SM#W4rY!0;n7~O;dg`$Yog"
        "1p96N~aDr=<2BMH7y-ens4;eRz`04-`2r>RxCy()}j5_K!I4P7|F2<u;0bjQZ|)QVwwx?F{@8j-d?BRP7*t7tZ2?p8f%+y&0h",
    ),
    "IQ3_XXS": (
        8,
        4,
        "c-l>nT~C8R5JfK_-_RlyslnFP+N2s2qdxnlzBT^;f8&`cA%^TOJ9FmFos~kqn02LqJyot-zg?m!f03W1DrFO$dc>$gi58rRSC=}d(+a}q(Bq"
        "vNeP|$Rnmu$gYhO;Q3$*r##a`!pss|K8YI4=om1rDvVsFu{bSAU=r(|Ap-MeNqDU3c@=C_N>n!U!4&Gy3Dqq62+z<#@%L3i_vJ#0L?C^<*(R"
        "+DM8#K|Xn2a(`tq<c%|#9BcwU@Ll@xh?72KwWDKbtG$@dvcMhzteZXX#zDs*ld}ew3+74i2mZ($i^!+5L=WUsrf<es5d%W-d-TUNdsT#8DFt"
        "(@NE6|MD2}Qed!PKX%Cq",
    ),
    "IQ3_S": (
        8,
        4,
        "c-mD{Yfr;440PH&+9q9Bw!y|g0u5<`?-T$3pK-o8(@>SfcKkSBToH$_myV~y*-`cqB|z%UqH==P-~Bwj)Z(cnnXw1NIa(a=dirR#mT87GK=-"
        "sH)`*OlnWvXbO|6mpA`|q&+hD#6q|6K(S)nE7Za#`+|A4b~ReR7F%|8-r?NOr=t0mq??33~04avmSSg80MBUeb-SejX-a&macxyY5>>HYc6X"
        "n{?mhkq!$J1S=!ReiR%(iM%{x@(OiwTZbC@q1#fY<l$Dsz!8}v5&AP-km4~ShPmQKG1uTH*)ETJHzs7csfS3+2~m>GOA-HMY|=2dQ;!<L~er"
        "hHu6+71LsYrXypsf%$<o~g0{o=VeDqP*qhY;6F#jJtajv-MB-L-fjk7ffbvx67wnZTIG>Qw0a+o^Pe>~wkDM@N>BL-$veqm1Z&aQ~;8G?hR-"
        "NSqr$en7XR*mCxGnO9wL{b|JK5lDGkXC3EpolfGtfl#ty~tOzQK3F>Vaer-?Mxp=0-H5Wzb5RA;Yu7o3(#V`8;tlHppH7>ZAO?_X9|;@&~>@"
        "55W",
    ),
    "IQ1_S": (
        3,
        8,
        "c-oCuYnS672(5x7leROn-}nFj&NaLQO=k9Zni?M{aJi7jqk4l!>rd>z_8=bF!-)0pQFONU-nkNe#zwav_MbbbKV>!Q$>48K-AUY#&->E1Q+D"
        "ZdvZCs2(eawvhsvxz``K5&`aik8g-;a8$S1FN#ak`TUSn(Q{RukqQt5Q7JE*0ljoE{5X)<fD>?!@FtHJMYO;(ZG!kWzNY^QU_w|k@oU!mICY"
        "%aGfdM5ID!?s0lSp9a8tS@_P#p)9oYvGP%T3OOa_U-Wh&=1pYP`RLz3tLjqwX<)~wXGNT6eJuSDK-lo%R}pNA7n|8?(xyrZvB6oyki){zWzv"
        "<Fa$(YT+NDqH$In=EzO^#c$=dbZ|8Q^cu!uH5jhbUb>#6euqbN}_y1^eQqx_eSZ<2N<0g)d5CeuuP_1o*!U;`LI`0}9x7%2Lxu(*-SyN$>fr"
        "^2!I$6Bxxfw%(>1T+fLw%1O7p=chKN)(TmRQJ=Od6?eGe&WGH#`p17v<;~v&~}!Zcc>|lg7?wnW2}k!WQyDj2-I%-=`!UFvM%*hQXZ{TjrT>"
        "k9*nu$##r9gn<F0zN8s~63=IT$+oH&v+<_mOj`Vbet*kLdB=yxUtv5Hmmz+G1z{z5woF!|v|9W=TejS??5tb4Xm!yZmKj)N)`@**+2B&H&m8"
        "PB#(+_1BP~THDh})9Q|ZS!yo@Kh#Kh`#&^Fc(Gt|cDK}THFaKzP?EcFV^O9_2~kax&Xf;O=z=^cuXNp`kO{L<>FFw2Rx-^zJkp3&>Xes#&Ry"
        "RMt#6jR-FR#P(v)u895;}A|3|21XsoOL3CP$lL34*dI4uZ^rAS!UNPnDZmJCt|#U-@_`a(+ls3Q40Ha3l`3qriH5Eu0E`xx{O*jodNHy5}s="
        "Fb>^*A=H{6gwYH_eM$z9R2VB);r_VoAB`j96cmdXC3oI9FNbve()bP;`rtLn}tyV)EzgX~nlgT9tDP-tfzenbLv|=8;#w}iNj69S5MjEffR#"
        "nHI38gznT8<le?i#UW$`mC<4tOo~e|%I!y}#Dlq^#KjGZ`n7`UO2gjFAqnR57q|;i?5)@0B}d3&-jMQVy3o@T0dqeZ9P#iQhlO($yE*$exAS"
        "A!bvlD?wvMzD)7gO7V~So<emC&ij8SEaZxSmfU~VG3E{69V3%~@-{ld)rD!EKj^+|l}_A4-_hKPS;}hLf0HK}p#",
    ),
}


@cache
def _numbers(name: str) -> Tensor:
    packed = zlib.decompress(base64.b85decode(_STORED[name][2]))
    return torch.frombuffer(bytearray(packed), dtype=torch.uint16).long().cumsum(0)


@cache
def points(name: str) -> Tensor:
    """Return the points of a codebook, uint8 [points, digits]."""
    base, width, _ = _STORED[name]
    powers = base ** torch.arange(width)
    return (_numbers(name)[:, None] // powers % base).to(torch.uint8)


@cache
def _indices(name: str) -> Tensor:
    base, width, _ = _STORED[name]
    found = torch.zeros(base**width, dtype=torch.long)
    found[_numbers(name)] = torch.arange(len(_numbers(name)))
    return found


def find_points(name: str, digits: Tensor) -> Tensor:
    """Return the index of each point, int64 [n], 0 where the codebook lacks it; `digits` int [n, width]."""
    base, width, _ = _STORED[name]
    return _indices(name)[(digits.long() * base ** torch.arange(width)).sum(1)]


@dataclass(frozen=True)
class SignedPoints:
    """Codes of points whose digits are levels, with a sign for each weight, in ascending order of their values.

    `even`: of 8 signs 7 are stored, the last makes their number even. A join of codes that are no points, or of odd
    signs where only even ones are stored, gives others: who writes a type decodes it again and compares.
    """

    book: str
    even: bool = False

    @property
    def levels(self) -> int:
        return _STORED[self.book][0]

    def split(self, numbers: Mapping[str, Tensor]) -> Tensor:
        levels = points(self.book)[numbers["index"].int()].flatten(1)
        negative = eight_bits(_with_parity(numbers["signs"]) if self.even else numbers["signs"])
        return torch.where(negative == 1, self.levels - 1 - levels, self.levels + levels)

    def join(self, codes: Tensor) -> dict[str, Tensor]:
        negative = codes < self.levels
        levels = torch.where(negative, self.levels - 1 - codes, codes - self.levels)
        width = _STORED[self.book][1]
        index = find_points(self.book, levels.clamp(0, self.levels - 1).reshape(-1, width))
        grouped = negative.reshape(len(codes), -1, 8)
        places = torch.arange(7 if self.even else 8)
        signs = (grouped[:, :, : len(places)].long() << places).sum(2)
        return {"index": index.reshape(len(codes), -1), "signs": signs}


@dataclass(frozen=True)
class ShiftedPoints:
    """Codes of points of -1, 0 and 1 raised by 1/8, or lowered by it where `down` is 1: one for `shared` points."""

    book: str
    shared: int

    def split(self, numbers: Mapping[str, Tensor]) -> Tensor:
        down = numbers["down"]
        digits = points(self.book)[numbers["index"].int()].reshape(*down.shape, -1)
        return (2 * digits + (1 - down)[..., None]).flatten(1)

    def join(self, codes: Tensor) -> dict[str, Tensor]:
        codes = codes.clamp(0, 5).reshape(len(codes), -1, 8)
        index = find_points(self.book, (codes >> 1).reshape(-1, 8)).reshape(len(codes), -1)
        return {"index": index, "down": 1 - (codes[:, :: self.shared, 0] & 1)}


def eight_bits(numbers: Tensor) -> Tensor:
    """Return the bits of uint8 [n, k], lowest first: uint8 [n, 8k]."""
    return (numbers[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _with_parity(seven: Tensor) -> Tensor:
    """Return numbers of 7 bits with the eighth that makes the number of their bits even."""
    folded = seven ^ seven >> 4
    folded = folded ^ folded >> 2
    return seven | (folded ^ folded >> 1) << 7
